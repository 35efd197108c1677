"""Programs that measure the C core: one file beside this one, linked with csrc/ as setup.py compiles it."""

import functools
import json
import os
import subprocess
import sys

from .provenance import ROOT

BUILD = ROOT / "build" / "benchmarks"
FLAGS = "-std=c11 -O2 -D_GNU_SOURCE -pthread".split()


@functools.cache
def build(name, cc):
    """Compile benchmarks/<name>.c, and what it needs where that has changed; the path of the program."""
    mode = "release"
    make = ["make", "-s", "-j", str(os.cpu_count()), "-C", ROOT / "tests" / "c", f"MODE={mode}", f"CC={cc}"]
    print("compiling the C core", file=sys.stderr)
    subprocess.run([*make, f"VENV_PYTHON={sys.executable}", "library"], check=True, stdout=subprocess.DEVNULL)
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = f"{mode}-clang" if "clang" in cc else mode
    program, library = BUILD / name, ROOT / "build" / "c" / folder / "libcp.a"
    source = ROOT / "benchmarks" / f"{name}.c"
    subprocess.run([cc, *FLAGS, f"-I{ROOT / 'csrc'}", source, library, "-lm", "-o", program], check=True)
    return program


def call(program, timeout, before=(), environ=None, **job):
    """Start bench_call once, with what the top of bench_call.c names, behind the words `before`; what it prints."""
    words = [*before, program, *(f"{name}={value}" for name, value in job.items())]
    environ = os.environ | (environ or {})
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=timeout, env=environ)
    return json.loads(done.stdout)


def call_us(program, timeout, **job):
    """As `call`: the microseconds a call of each batch."""
    return call(program, timeout, **job)["us"]
