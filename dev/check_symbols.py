#!/usr/bin/env python3
"""Checks the symbols of the built extension and of the static library, with nm.

The extension exports PyInit__C and nothing else; every symbol of the library that crosses a file
starts with cp_; what can be written at run time is on the short lists below.

Usage: check_symbols.py [--help] [--so FILE] [--lib FILE]
    --so    the extension; default: the one that this interpreter imports as cp_attn._C
    --lib   the static library; default: build/c/plain/libcp.a (`make -C tests/c library`)
"""

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Writable globals of the core. State belongs into a context: add a line only with its reason.
WRITABLE = {
    "last_error.o: last",  # thread-local: the sentence of the last error
    "mem.o: live_blocks",  # counts that tests compare before and after
    "mem.o: allocations",
    "mem.o: fail_after",  # which allocation fails, for tests
    "meet_fork.o: fork_mutex",  # a fork is of the whole process: the open meetings whose descriptors
    "meet_fork.o: fork_once",  # its child must close
    "meet_fork.o: fork_error",
    "meet_fork.o: fork_entries",
    "kernel_cpu.o: has_f16c",  # what the CPU has, written before main
    "device_cpu.o: cpu",  # the host, which has no state; every device is handed out by a plain pointer
}
# Of py/: tables that CPython wants writable and nobody writes, and NumPy's table of its C API.
WRITABLE_PY = re.compile(
    r"(\w+_)?(methods|slots|spec|getset|members|module|keywords|kwlist)|PyArray_API|PyArray_RUNTIME_VERSION"
)
# What the compiler's start files and the linker add to any shared object.
TOOLCHAIN = {
    "__cpu_model",
    "__cpu_features2",
    "completed",
    "__dso_handle",
    "__TMC_END__",
    "__bss_start",
    "_edata",
    "_end",
}


def symbols(file, *options):
    """Yields (object file in an archive, name, nm class letter, section)."""
    member = ""
    out = subprocess.run(["nm", "-f", "sysv", *options, file], check=True, capture_output=True, text=True).stdout
    for line in out.splitlines():
        if line.startswith("Symbols from "):
            member = line.rstrip("]:").rpartition("[")[2]
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 7 and fields[0] != "Name":
            yield member, fields[0], fields[2], fields[6]


def is_writable(section):
    """Constants that hold addresses live in .data.rel.ro, which nm calls data too."""
    return re.match(r"\.(data|bss|tdata|tbss)|\*COM\*", section) and not section.startswith(".data.rel.ro")


def plain(name):
    """A static variable inside a function is NAME.1234."""
    return re.sub(r"\.\d+$", "", name)


def check(so, library):
    problems = []
    exported = {name for _, name, _, _ in symbols(so, "-D", "--defined-only")}
    if exported != {"PyInit__C"}:
        problems.append(f"{so}: exports {sorted(exported)}, want PyInit__C alone")
    core = set()
    for member, name, letter, section in symbols(library, "--defined-only"):
        if letter.isupper() and not name.startswith("cp_"):
            problems.append(f"{member}: {name} crosses files and does not start with cp_")
        if is_writable(section):
            core.add(f"{member}: {plain(name)}")
    problems += [f"{entry} is writable and not on the list" for entry in sorted(core - WRITABLE)]
    problems += [f"{entry} is on the list and not there" for entry in sorted(WRITABLE - core)]
    known = TOOLCHAIN | {entry.rpartition(" ")[2] for entry in core}
    for _, name, _, section in symbols(so, "--defined-only"):
        if is_writable(section) and plain(name) not in known and not WRITABLE_PY.fullmatch(plain(name)):
            problems.append(f"{so}: {name} is writable and not on the list")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--so")
    parser.add_argument("--lib", default=ROOT / "build/c/plain/libcp.a")
    args = parser.parse_args()
    if args.so is None:
        package = importlib.util.find_spec("cp_attn")
        files = sorted(f for d in package.submodule_search_locations for f in Path(d).glob("_C*.so")) if package else []
        if not files:
            parser.error("no built cp_attn found; run `make venv`, or name the file with --so")
        args.so = files[0]
    problems = check(args.so, args.lib)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"symbols: {Path(args.so).name}, {Path(args.lib).name}, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
