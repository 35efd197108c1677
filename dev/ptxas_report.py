#!/usr/bin/env python3
"""Prints a table of the registers and spills of CUDA kernels from what `nvcc -Xptxas -v` said.

Usage: ptxas_report.py [--help] [--own] FILE...

FILE is the compiler's output for one source; `make -C cuda report` has them. With --own there is no table: it prints
which instances of the own kernel (own_*_kernel) spill registers or have a frame in memory, and fails where one does.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def read(text):
    """Yield (mangled name, architecture, registers, bytes of spill stores, of a thread's frame) of each kernel."""
    name, arch, frame, spilled = None, None, 0, 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            name, arch, frame, spilled = match[1], int(match[2]), 0, 0
        elif match := SPILLS.search(line):
            frame, spilled = int(match[1]), int(match[2])
        elif (match := USED.search(line)) and name:
            yield name, arch, int(match[1]), spilled, frame
            name = None


def plain(names):
    """Return {mangled: readable}: the kernel's name and what it is a template of."""
    shown = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    readable = {}
    for name, long in zip(names, shown.splitlines(), strict=True):
        # "> >" and the place in no namespace are c++filt's ways of writing.
        short = long.replace("(anonymous namespace)::", "").replace("> >", ">>")
        match = re.search(r"(\w+_kernel)(<[^(]*>)?\(", short)
        readable[name] = (match[1] + (match[2] or "")) if match else long
    return readable


def check_own(kernels):
    """Print each instance of the own kernel that has a frame; return the exit status."""
    own = [kernel for kernel in kernels if re.search(r"\d+own_\w+_kernel", kernel[0])]
    names = plain([kernel[0] for kernel in own])
    framed = [kernel for kernel in own if kernel[3] or kernel[4]]
    for name, arch, _, spilled, frame in framed:
        print(f"{names[name]} on sm_{arch}: {spilled} bytes of spill stores, a frame of {frame} bytes")
    print(f"{len(own)} instances of the own kernel, {len(framed)} of them spill")
    return 1 if framed or not own else 0


def main():
    files = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    options = set(sys.argv[1:]) - set(files)
    if not files or options - {"--own"}:
        print(__doc__)
        return 0 if "--help" in options else 2
    kernels = [kernel for file in files for kernel in read(Path(file).read_text())]
    if "--own" in options:
        return check_own(kernels)
    if not kernels:
        print("no kernel in " + ", ".join(files))
        return 1
    table, archs = defaultdict(dict), sorted({kernel[1] for kernel in kernels})
    for name, arch, registers, spilled, _ in kernels:
        table[name][arch] = f"{registers}/{spilled}" if spilled else str(registers)
    names = plain(list(table))
    print("| kernel | " + " | ".join(f"sm_{arch}" for arch in archs) + " |")
    print("|---" * (len(archs) + 1) + "|")
    for name in sorted(table, key=names.get):
        print(f"| `{names[name]}` | " + " | ".join(table[name].get(arch, "-") for arch in archs) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
