"""What a call costs before and beside the arithmetic: the gate by the number of ranks, and Python over the C core.

``python -m benchmarks.gate`` builds the C core with benchmarks/bench_call.c, times an exchange of records and a tiny
attention among processes, and splits the same tiny attention from Python into the C core and the rest.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from .core import ROOT, build, call_us
from .provenance import processor, provenance

LIMIT_US = 20.0  # C16: attention() over the C core, a call
BATCH = 50
RANKS = 2  # of the calls from Python
WORLDS = (1, 2, 4, 6)


def core_us(program, op, world, args):
    """One start of the program: microseconds a call."""
    shape = {"ring": world, "tokens": world * args.rows, "heads": args.heads, "dim": args.dim}
    return statistics.median(call_us(program, args.timeout, op=op, batches=args.calls // BATCH, batch=BATCH, **shape))


def batches(call, calls):
    """Call in batches of 50 after a warm-up: (start, end) of each, in seconds of the monotonic clock."""
    for _ in range(calls // 10 + 2):
        call()
    marks = [time.monotonic()]
    for _ in range(calls // BATCH):
        for _ in range(BATCH):
            call()
        marks.append(time.monotonic())
    return list(itertools.pairwise(marks))


def run_rank(job, rank):
    """One of two ranks: the tiny attention from NumPy, from torch, and with gradients; prints its batches."""
    import numpy as np
    import torch

    import cp_attn
    from cp_attn import _C

    torch.set_num_threads(1)
    config = cp_attn.ContextParallelConfig(ring_degree=RANKS, timeout=60.0)
    arrays = [np.random.default_rng(1).standard_normal(job["shape"]).astype(np.float32) for _ in range(3)]
    tensors = [torch.from_numpy(x) for x in arrays]
    leaves = [x.clone().requires_grad_() for x in tensors]
    inputs = {"NumPy": arrays, "torch": tensors, "torch, gradients recorded": leaves}
    with _C.Context(config, rank=rank, world=RANKS, key=job["key"]) as context:
        times = {name: batches(lambda x=x: cp_attn.attention(*x, context), job["calls"]) for name, x in inputs.items()}
    print(json.dumps({"pid": os.getpid(), "batches": times}))


def over_core_us(rank, spans):
    """{name: (us a call, us a call outside the C core)} of one rank: medians over its batches.

    The C core's part is the spans of the calls in the trace, from the gate to the last step, waits included.
    """
    calls = [s for s in spans if s["pid"] == rank["pid"] and s["name"] == "attention"]
    result = {}
    for name, times in rank["batches"].items():
        whole, outside = [], []
        for start, end in times:
            core = sum(s["dur"] for s in calls if start * 1e6 <= s["ts"] < end * 1e6)
            whole.append((end - start) * 1e6 / BATCH)
            outside.append(((end - start) * 1e6 - core) / BATCH)
        result[name] = statistics.median(whole), statistics.median(outside)
    return result


def python_us(args):
    """Start two ranks; {name: (us a call, us a call outside the C core)}, of the slower one."""
    job = dict(key=f"gate {uuid.uuid4().hex}", shape=(1, args.rows, args.heads, args.dim), calls=args.calls)
    command = [sys.executable, "-m", "benchmarks.gate", "--rank"]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        environ = {**os.environ, "CP_ATTN_TRACE": str(trace)}
        ranks = [
            subprocess.Popen(
                [*command, json.dumps([job, rank])], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [rank.communicate(timeout=args.timeout)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed; it says why above")
        # The array of a trace stays open.
        spans = [entry for entry in json.loads(trace.read_text().rstrip(",\n") + "]") if entry["ph"] == "X"]
    each = [over_core_us(json.loads(output), spans) for output in outputs]
    return {name: max((one[name] for one in each), key=lambda us: us[1]) for name in each[0]}


def measure(program, args):
    """Alternate all sides `args.rounds` times: rows of (what, ranks, microseconds)."""
    taken = defaultdict(list)
    for _ in tqdm(range(args.rounds), leave=False):
        for world in args.world or WORLDS:
            for op in ("agree", "attention"):
                taken[f"C core, {op}", world].append(core_us(program, op, world, args))
        for name, (whole, outside) in python_us(args).items():
            taken[f"attention(), {name}", RANKS].append(whole)
            taken[f"attention() over the C core, {name}", RANKS].append(outside)
    return [
        {"what": what, "world": world, "us": statistics.median(us), "least": min(us), "most": max(us)}
        for (what, world), us in taken.items()
    ]


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    add = parser.add_argument
    add("--world", type=int, action="append", help="ranks of the C core; may be repeated; default 1, 2, 4, 6")
    add("--calls", type=int, default=2000, help="calls of one measurement; default 2000")
    add("--rounds", type=int, default=5, help="measurements of each kind, alternating; default 5")
    add("--rows", type=int, default=4, help="rows a rank; default 4")
    add("--heads", type=int, default=2, help="default 2")
    add("--dim", type=int, default=8, help="head dim; default 8")
    add("--cc", default=os.environ.get("CC", "cc"), help="C compiler; default cc")
    add("--timeout", type=float, default=300.0, help="seconds for one measurement; default 300")
    add(
        "--check", action="store_true", help=f"fail where attention() takes over {LIMIT_US:.0f} us more than the C core"
    )
    add("--json", type=Path, metavar="FILE", help="also write one JSON line per row of the table")
    add("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.rank:
        run_rank(*json.loads(args.rank))
        return 0
    machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"
    about = provenance("gate", machine=machine)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
    rows = measure(build("bench_call", args.cc), args)
    print(f"{'what':<44} {'ranks':>5} {'us a call':>10}   {'least':>8} {'most':>8}")
    for row in sorted(rows, key=lambda row: (row["what"], row["world"])):
        print(f"{row['what']:<44} {row['world']:>5} {row['us']:>10.2f}   {row['least']:>8.2f} {row['most']:>8.2f}")
    if args.json:
        args.json.write_text("".join(json.dumps({**row, **about}) + "\n" for row in rows))
    over = {
        row["what"]: row["us"] for row in rows if "over the C core" in row["what"] and "gradients" not in row["what"]
    }
    worst = max(over, key=over.get)
    print(f"\nattention() over the C core (C16): at most {over[worst]:.1f} us ({worst}); limit {LIMIT_US:.0f}")
    return int(args.check and over[worst] > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
