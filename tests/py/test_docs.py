"""README's Python example does what its comments say."""

import re
from pathlib import Path

from launch import launch

README = Path(__file__).parents[2] / "README.md"


def test_the_direct_example(tmp_path):
    (example,) = re.findall(r"^```python\n(# run\.py.*?)^```$", README.read_text(), re.M | re.S)
    script = tmp_path / "run.py"
    script.write_text(example + '\nprint(f\'{{"mine": {out.shape[1]}, "whole": {whole.shape[1]}}}\')\n')
    ranks = launch(script, 2)
    assert [rank.code for rank in ranks] == [0, 0], [rank.err[-3000:] for rank in ranks]
    assert [rank.lines for rank in ranks] == [[{"mine": 19, "whole": 37}], [{"mine": 18, "whole": 37}]]
