#!/usr/bin/env python3
"""Checks who includes whom: the table of allowed includes, header guards, file names.

Usage: check_layers.py [--help] [ROOT]     ROOT is the source tree, by default the one around this script
"""

import re
import sys
from pathlib import Path

CORE = {"base", "tensor", "plan", "schedule", "comm", "device", "kernel"}
# What another module fills, or calls.
TABLES = {"comm/comm.h", "device/device.h", "kernel/kernel.h", "kernel/package.h", "exec/accelerator.h"}

# folder: the folders it may include besides itself
MAY_INCLUDE = {
    "base": set(),
    "tensor": {"base"},
    "control": {"base"},
    "plan": {"base", "tensor"},
    "schedule": {"base", "tensor", "plan"},
    "comm": {"base"},
    "device": {"base", "tensor"},
    "kernel": {"base", "tensor"},
    "exec": CORE | {"control"},
    "py": CORE | {"control", "exec"},
    "cuda": {"base", "tensor", *TABLES},
    "tests": CORE | {"control", "exec"},
    "tests/simgpu": CORE | {"control", "exec", "cuda", "tests"},
}

# folder: the folders whose headers it names as if they were beside it
BESIDE = {"tests/simgpu": ("tests/c", "cuda")}

# Headers that are neither ours nor the system's: a pattern, and the only files that may have them.
FOREIGN = [
    (r"(Python|structmember|frameobject)\.h|cpython/.*", r"csrc/py/.*|cuda/cuda_module\.c"),
    (r"numpy/.*", r"csrc/py/.*"),
    (r"dlpack/.*", r"csrc/py/.*|csrc/tensor/tensor_dlpack\.[ch]|tests/(c|fuzz)/.*dlpack.*"),
    (r"(cuda|cublas|cudnn|nccl|nvtx|cooperative_groups|mma).*", r"cuda/.*|tests/simgpu/.*"),
    (r"ucontext\.h|cmath|cstdint|cstring|tuple|type_traits", r"cuda/.*|tests/simgpu/.*"),
    (r"(immintrin|cpuid|x86intrin|arm_neon|arm_sve|arm_acle)\.h", r"csrc/(kernel|base)/.*|tests/c/.*"),
]
SYSTEM = re.compile(
    r"(assert|complex|ctype|errno|fenv|float|inttypes|iso646|limits|locale|math|setjmp|signal|stdalign|stdarg|"
    r"stdatomic|stdbool|stddef|stdint|stdio|stdlib|stdnoreturn|string|tgmath|threads|time|uchar|wchar|"
    r"dlfcn|fcntl|ifaddrs|malloc|netdb|poll|pthread|pwd|sched|semaphore|strings|unistd|"
    r"(sys|linux|netinet|arpa|net|asm)/\w+)\.h"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*(<([^>]+)>|"([^"]+)")', re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def check_include(root, file, name, quoted):
    """Returns what is wrong with this include, or None."""
    path = file.relative_to(root).as_posix()
    for pattern, allowed in FOREIGN:
        if not quoted and re.fullmatch(pattern, name):
            return None if re.fullmatch(allowed, path) else f"<{name}> is not for this folder"
    if not quoted:
        return None if SYSTEM.fullmatch(name) else f"<{name}> is neither ours nor a known system header"
    parts = Path(path).parts
    folder = "tests/simgpu" if path.startswith("tests/simgpu/") else parts[parts[0] == "csrc"]
    if folder not in MAY_INCLUDE:
        return f"folder {folder} has no row in {Path(__file__).name}"
    beside = [root / "csrc", file.parent, *(root / d for d in BESIDE.get(folder, ()))]
    found = next((d / name for d in beside if (d / name).is_file()), None)
    if found is None:
        return f'"{name}" is neither in csrc/ nor beside this file'
    found = found.resolve().relative_to(root).parts
    target = found[1] if found[0] == "csrc" else found[0]
    allowed = MAY_INCLUDE[folder] | {folder}
    if target in allowed or "/".join(found[1:]) in allowed:
        return None
    return f"{folder} may not include {target} (allowed: {', '.join(sorted(allowed))})"


def check(root):
    problems, seen = [], {}
    files = [f for top in ("csrc", "cuda", "tests") for f in sorted((root / top).rglob("*"))]
    for file in files:
        if file.suffix not in (".c", ".h", ".cu", ".cuh"):
            continue
        path = file.relative_to(root).as_posix()
        source = file.read_text()
        text = COMMENT.sub(lambda m: "\n" * m.group().count("\n"), source)
        for match in INCLUDE.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            wrong = check_include(root, file, match.group(2) or match.group(3), match.group(3) is not None)
            if wrong:
                problems.append(f"{path}:{line}: {wrong}")
        if not path.startswith("csrc/"):
            continue
        if file.name in seen:
            problems.append(f"{path}: the name is taken by {seen[file.name]}")
        seen[file.name] = path
        # A template may be included once for each set of macros, so it needs no guard.
        if file.suffix == ".h" and not source.startswith("/* Template:"):
            guard = "_".join(("CP", *file.relative_to(root / "csrc").with_suffix("").parts, "H")).upper()
            if not re.match(rf"\s*#ifndef {guard}\n#define {guard}\n", text):
                problems.append(f"{path}: does not open with the guard {guard}")
    return problems, len(seen)


def main():
    if "--help" in sys.argv[1:]:
        print(__doc__)
        return 0
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    problems, count = check(root)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"layers: {count} files, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
