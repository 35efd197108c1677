#!/usr/bin/env python3
"""Prints a table of the registers and spills of CUDA kernels from what `nvcc -Xptxas -v` said.

Usage: ptxas_report.py [--help] FILE...     FILE is the compiler's output for one source; `make -C cuda report` has them
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
    """Yield (mangled name, architecture, registers, bytes of spill stores) of each kernel."""
    name, arch, spilled = None, None, 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            name, arch, spilled = match[1], int(match[2]), 0
        elif match := SPILLS.search(line):
            spilled = int(match[2])
        elif (match := USED.search(line)) and name:
            yield name, arch, int(match[1]), spilled
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


def main():
    files = [arg for arg in sys.argv[1:] if arg != "--help"]
    if not files or len(files) != len(sys.argv) - 1:
        print(__doc__)
        return 0 if "--help" in sys.argv else 2
    table, archs = defaultdict(dict), set()
    for file in files:
        for name, arch, registers, spilled in read(Path(file).read_text()):
            table[name][arch] = f"{registers}/{spilled}" if spilled else str(registers)
            archs.add(arch)
    if not table:
        print("no kernel in " + ", ".join(files))
        return 1
    names = plain(list(table))
    print("| kernel | " + " | ".join(f"sm_{arch}" for arch in sorted(archs)) + " |")
    print("|---" * (len(archs) + 1) + "|")
    for name in sorted(table, key=names.get):
        print(f"| `{names[name]}` | " + " | ".join(table[name].get(arch, "-") for arch in sorted(archs)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
