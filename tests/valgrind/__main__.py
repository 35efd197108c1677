"""Run calls.py under valgrind; fail where it finds an error, or memory that nobody points to any more, that is ours.

Ours is what has a frame of the extension in its stack. CPython and NumPy have some of both kinds; yet

* an error with a frame of NumPy is ours, too: NumPy has none itself, and reads all that the extension answers;
* a leak of more than a few blocks is ours, too: made elsewhere, such as an array whose reference a call has kept.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from cp_attn import _C

HERE = Path(__file__).parent
EXTENSION, NUMPY = Path(_C.__file__).name, "_multiarray_umath"
FEW = 20  # blocks; a call that leaks one leaks more than that in all
OPTIONS = (
    "--leak-check=full",
    "--show-leak-kinds=definite",
    "--error-limit=no",
    "--num-callers=40",
    "--fair-sched=yes",  # valgrind runs one thread at a time: a rank that waits must not keep the others from running
    "--xml=yes",
)


def main():
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed; on Debian and Ubuntu: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        code, found = run(Path(folder))
    ours = [error for error in found if is_ours(error)]
    for error in ours:
        print(describe(error))
    kinds = Counter(error.findtext("kind") for error in found)
    print(f"valgrind found {sum(kinds.values())} errors and leaks ({dict(kinds)}), of which ours: {len(ours)}")
    if code != 0:
        print(f"calls.py ended with exit code {code}")
    sys.exit(1 if ours or code else 0)


def run(folder):
    """Return the exit code of the calls, and what valgrind says of them."""
    library, log = folder / "small_host.so", folder / "log.xml"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, HERE / "small_host.c", "-ldl"], check=True)
    environ = dict(PYTHONMALLOC="malloc", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", LD_PRELOAD=str(library))
    command = ["valgrind", *OPTIONS, f"--xml-file={log}", sys.executable, str(HERE / "calls.py")]
    code = subprocess.run(command, env=os.environ | environ, timeout=600).returncode
    return code, list(ET.parse(log).getroot().iter("error"))


def is_ours(error):
    files = [frame.findtext("obj", "") for frame in error.iter("frame")]
    if any(EXTENSION in file for file in files):
        return True
    if error.findtext("kind").startswith("Leak"):
        return int(error.findtext("xwhat/leakedblocks")) > FEW
    return any(NUMPY in file for file in files)


def describe(error):
    """Return the kind and the stack, from within to without, up to the interpreter's loop."""
    lines = [f"{error.findtext('kind')}: {error.findtext('what') or error.findtext('xwhat/text')}"]
    for frame in error.iter("frame"):
        name = frame.findtext("fn", "?")
        lines.append(f"    {name}  {frame.findtext('file') or Path(frame.findtext('obj', '?')).name}")
        if name == "_PyEval_EvalFrameDefault":
            break
    return "\n".join(lines)


if __name__ == "__main__":
    main()
