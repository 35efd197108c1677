"""Programs of this folder that are linked with the C core."""

import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"
FLAGS = "-std=c11 -O2 -D_GNU_SOURCE -pthread".split()


@functools.cache
def build(name, cc):
    """Compile benchmarks/<name>.c with the static library of the C core; the program's path."""
    tests = ROOT / "tests" / "c"
    make = ["make", "-s", "-C", str(tests), "MODE=plain", f"VENV_PYTHON={sys.executable}", "library"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    BUILD.mkdir(parents=True, exist_ok=True)
    program, source = BUILD / name, ROOT / "benchmarks" / f"{name}.c"
    library = ROOT / "build" / "c" / "plain" / "libcp.a"
    subprocess.run([cc, *FLAGS, f"-I{ROOT / 'csrc'}", source, library, "-lm", "-o", program], check=True)
    return program
