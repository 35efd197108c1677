"""tests/cases.md says which tests show which kind of fault: every row has some, and every name is one."""

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = (HERE.parent / "cases.md").read_text()
ROWS = {
    "NUM": (1, 2, 4, 5, 6, 8, 9),
    "SHP": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 16),
    "MSK": (1, 2, 3, 4, 5, 7, 8, 9, 10),
    "CAU": (1, 2, 3, 4, 7),
    "GQA": (1, 2, 5, 6),
    "DT": (1, 2, 3, 5),
    "AG": (1, 2, 3, 5, 6, 7, 9, 10),
    "HNG": (1, 2, 3, 4, 5, 6, 7, 8, 11, 12),
    "RDV": (1, 3, 4, 5, 6, 7, 9, 11),
    "DLP": (1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 15),
    "STR": (1, 2, 3, 4, 5, 7, 9),
    "MEM": (1, 3, 4),
    "GRF": (1, 2, 3, 4, 5),
    "HKP": (1, 2, 3, 5, 6, 7, 10, 11),
    "ERR": (1, 2, 3, 4),
    "CPY": (1, 2, 3, 4, 7, 8, 9),
    "SRC": (1, 2, 3, 4, 5, 6, 7, 8),
}
# Nothing can show these on a CPU.
ON_A_GPU = {"RDV-9", "STR-1", "STR-2", "STR-3", "STR-5", "STR-9", "GRF-4", "GRF-5"}
NAMES = sorted(set(re.findall(r"`([\w.]+)::(\w+)`", TABLE)))


@functools.cache
def functions(file):
    """Return the names of a file's functions."""
    return {node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_test():
    found = re.findall(r"^\| ([A-Z]+-\d+) \| [^|]+ \| ([^|]+) \|$", TABLE, re.M)
    assert [row for row, _ in found] == [f"{kind}-{n}" for kind, numbers in ROWS.items() for n in numbers]
    for row, tests in found:
        assert (tests == "needs a GPU") == (row in ON_A_GPU), row
        assert row in ON_A_GPU or re.fullmatch(r"`[\w.]+::\w+`(, `[\w.]+::\w+`)*", tests), row


@pytest.mark.parametrize("file, name", NAMES, ids=["::".join(pair) for pair in NAMES])
def test_every_name_is_a_test(file, name):
    if file.endswith(".c"):
        assert f"\nTEST({name})\n" in (HERE.parent / "c" / file).read_text()
    elif file.startswith("test_"):
        assert name.startswith("test_") and name in functions(file)
    else:
        # A scene: its script has it, and some test asks for it.
        asked = [path for path in HERE.glob("test_*.py") if f'"{file}"' in path.read_text()]
        assert name in functions(file)
        assert any(re.search(rf'"{name}[",]', path.read_text()) for path in asked), asked
