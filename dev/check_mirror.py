#!/usr/bin/env python3
"""Checks that each csrc/**/X.c outside py/ has its tests/c/test_X.c, or is listed here with a reason.

Usage: check_mirror.py [--help] [ROOT]     ROOT is the source tree, by default the one around this script
"""

import sys
from pathlib import Path

# X: where X.c is tested instead
TESTED_ELSEWHERE = {
    "last_error": "test_status",
    "mask_axis": "test_agree: the axes are read from records",
    "builder": "test_schedule and test_verify: every schedule is built with it",
    "machine": "test_cost: numbers, and test_choose asks for them",
    "walk": "test_verify and test_cost, which walk with it",
    "schedule_create": "test_schedule and test_verify: all schedules are made by it",
    "run_order": "test_run_copies, and the simulated GPUs under ThreadSanitizer",
    "write": "test_verify and test_run: what the writers share",
    "write_gather": "test_verify and test_context",
    "write_pull": "test_verify and test_run",
    "write_pull_forward": "test_verify and test_run",
    "write_pull_backward": "test_verify and test_run",
    "write_replicated": "test_verify and test_run",
    "write_exchange": "test_verify and test_run",
    "write_exchange_group": "test_verify and test_run",
    "write_exchange_ring": "test_verify and test_run",
    "write_exchange_forward": "test_verify and test_run",
    "write_exchange_backward": "test_verify and test_run",
    "meet_fork": "test_meet",
    "meet_guests": "test_meet and test_meet_hosts",
    "meet_tcp": "test_meet_hosts",
    "meet_until": "test_meet and test_meet_hosts",
    "meet_wire": "test_meet",
    "side": "test_context, tests/simgpu: memory that is lent",
    "join": "tests/py: processes that meet",
    "ground_host": "tests/py: processes that meet",
    "ground_hosts": "test_hosts.py: processes of two hosts that meet",
    "kernel_cpu": "test_kernel walks its list",
    "attend_generic": "test_kernel walks all kernels",
    "attend": "test_kernel walks all kernels",
    "grad": "test_kernel walks all kernels",
    "grad_generic": "test_kernel",
    "verify_access": "test_verify",
    "verify_at": "test_verify",
    "verify_attention": "test_verify",
    "verify_buffer": "test_verify",
    "verify_content": "test_verify",
    "verify_meaning": "test_verify",
    "verify_message": "test_verify",
    "verify_name": "test_verify",
    "verify_pool": "test_verify",
    "verify_run": "test_verify",
    "verify_step": "test_verify",
}

# A kernel's ISA files share the test of their stem, which walks all kernels that this CPU can run.
ISA_SUFFIXES = ("_avx2", "_avx512", "_avx512bf16")


def check(root):
    problems = []
    sources = {f.stem: f for f in sorted((root / "csrc").rglob("*.c")) if f.relative_to(root).parts[1] != "py"}
    plain = {stem.removesuffix(suffix) for stem in sources for suffix in ("", *ISA_SUFFIXES)}
    for stem, file in sources.items():
        isa = next((s for s in ISA_SUFFIXES if stem.endswith(s)), "")
        test = root / "tests" / "c" / f"test_{stem.removesuffix(isa)}.c"
        if stem.removesuffix(isa) not in TESTED_ELSEWHERE and not test.is_file():
            problems.append(f"{file.relative_to(root)}: no {test.relative_to(root)}")
        if stem in TESTED_ELSEWHERE and test.is_file():
            problems.append(f"{file.relative_to(root)}: has a test and is listed all the same")
    problems += [f"{stem}: listed, but there is no such file" for stem in TESTED_ELSEWHERE if stem not in plain]
    return problems, len(sources)


def main():
    if "--help" in sys.argv[1:]:
        print(__doc__)
        return 0
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    problems, count = check(root)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"mirror: {count} sources, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
