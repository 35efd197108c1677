"""What a steady-state call costs, counted: instructions, reads and writes of memory, allocations, memory held.

``python -m benchmarks.counted --check`` runs calls of one rank in the C core under callgrind, with the AVX2 kernels,
and compares with benchmarks/counted.json. Counts do not depend on what else the machine does.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tqdm import tqdm

from .core import build, call
from .provenance import provenance

RECORD = Path(__file__).with_suffix(".json")
ALLOWED = 0.02  # of what was recorded; allocations: none
# `agree` is the gate alone, `tiny` a call without arithmetic to speak of; the others cross tiles, blocks and odd dims.
CASES = {
    "agree": {"op": "agree"},
    "tiny": {"op": "attention", "tokens": 4, "heads": 2, "dim": 8},
    "tiny backward": {"op": "attention_backward", "tokens": 4, "heads": 2, "dim": 8},
    "D 64": {"op": "attention", "tokens": 300, "heads": 1, "dim": 64},
    "D 64 backward": {"op": "attention_backward", "tokens": 300, "heads": 1, "dim": 64},
    "D 72": {"op": "attention", "tokens": 250, "heads": 1, "dim": 72},
    "D 128": {"op": "attention", "tokens": 300, "heads": 1, "dim": 128},
    "D 128 backward": {"op": "attention_backward", "tokens": 300, "heads": 1, "dim": 128},
}
FEW, MANY = 1, {"agree": 501, "tiny": 201, "tiny backward": 201}  # calls of two runs, which differ by whole calls


def events(program, batches, job):
    """One run under callgrind: (events by name, what bench_call prints)."""
    with tempfile.NamedTemporaryFile() as file:
        tool = ["valgrind", "--tool=callgrind", "--cache-sim=yes", f"--callgrind-out-file={file.name}"]
        told = call(program, 600, tool, {"CP_ATTN_ISA": "avx2"}, batch=1, batches=batches, **job)
        text = Path(file.name).read_text()
    names = re.search(r"^events: (.*)$", text, re.MULTILINE)[1].split()
    sums = re.search(r"^(?:totals|summary): (.*)$", text, re.MULTILINE)[1].split()
    return dict(zip(names, map(int, sums), strict=False)), told


def count(program, case):
    """Return the counts of one call."""
    calls = MANY.get(case, 2)
    (few, _), (many, told) = (events(program, batches, CASES[case]) for batches in (FEW, calls))
    calls -= FEW
    return {
        "instructions": (many["Ir"] - few["Ir"]) / calls,
        "reads": (many["Dr"] - few["Dr"]) / calls,
        "writes": (many["Dw"] - few["Dw"]) / calls,
        "allocations": told["allocations"],
        "bytes held": told["workspace_bytes"] + told["window_bytes"],
    }


def differences(case, found, recorded):
    """Yield a sentence for each count that has moved."""
    for name, value in found.items():
        before = recorded[name]
        if abs(value - before) > ALLOWED * before:
            change = f"{value / before - 1:+.1%}" if before else "new"
            yield f"{case}: {value:,.0f} {name}, recorded {before:,.0f} ({change})"


def compiler(cc):
    """Return what decides the counts: the compiler and its version."""
    version = subprocess.run(
        [cc, "-dumpfullversion", "-dumpversion"], check=True, capture_output=True, text=True
    ).stdout
    return f"{'clang' if 'clang' in cc else 'gcc'} {version.split()[0]}"


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counted", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail where a count is more than 2 %% from the recorded one"
    )
    parser.add_argument("--record", action="store_true", help="write counted.json anew for this compiler")
    parser.add_argument("--cc", default=os.environ.get("CC", "gcc"), help="compiler; default $CC or gcc")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed; on Debian: apt-get install valgrind")
    key, record = compiler(args.cc), json.loads(RECORD.read_text())
    print("\n".join(f"{k}: {v}" for k, v in (provenance("counted") | {"compiler": key}).items()), end="\n\n")
    program = build("bench_call", args.cc)
    found = {case: count(program, case) for case in tqdm(CASES, leave=False)}
    print("| a call of one rank | instructions | reads | writes | allocations | bytes held |")
    print("|---|---:|---:|---:|---:|---:|")
    for case, counts in found.items():
        print(f"| {case} | " + " | ".join(f"{value:,.0f}" for value in counts.values()) + " |")
    if args.record:
        RECORD.write_text(json.dumps(record | {key: found}, indent=1, sort_keys=True) + "\n")
    elif args.check:
        if key not in record:
            known = ", ".join(record) or "none"
            raise SystemExit(f"counted.json has no record of {key} (it has: {known}); --record adds one")
        moved = [line for case, counts in found.items() for line in differences(case, counts, record[key][case])]
        if moved:
            raise SystemExit("\n".join([*moved, "where that is meant: python -m benchmarks.counted --record"]))


if __name__ == "__main__":
    main()
