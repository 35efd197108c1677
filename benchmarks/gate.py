"""What a call costs before and beside the arithmetic: the gate by the number of ranks, and Python over the C core.

``python -m benchmarks.gate`` builds the C core with benchmarks/bench_gate.c, times an exchange of records and a tiny
attention among processes, and alternates the same tiny attention from Python with the C core alone.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from .provenance import processor, provenance

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"
FLAGS = "-std=c11 -O2 -D_GNU_SOURCE -pthread".split()
LIMIT_US = 20.0  # C16: attention() over the C core, a call
BATCH = 50
RANKS = 2  # of the calls from Python
WORLDS = (1, 2, 4, 6)


def build(cc):
    """Compile the program with the static library of the C core; its path."""
    tests = ROOT / "tests" / "c"
    make = ["make", "-s", "-C", str(tests), "MODE=plain", f"VENV_PYTHON={sys.executable}", "library"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    BUILD.mkdir(parents=True, exist_ok=True)
    program, source = BUILD / "bench_gate", ROOT / "benchmarks" / "bench_gate.c"
    library = ROOT / "build" / "c" / "plain" / "libcp.a"
    subprocess.run([cc, *FLAGS, f"-I{ROOT / 'csrc'}", source, library, "-lm", "-o", program], check=True)
    return program


def core_us(program, op, world, args):
    """One start of the program: microseconds a call."""
    numbers = map(str, (world, args.calls, args.rows, args.heads, args.dim))
    done = subprocess.run([program, op, *numbers], check=True, capture_output=True, text=True, timeout=args.timeout)
    return json.loads(done.stdout)["us"]


def batches_us(call, calls):
    """Median over batches of 50 calls, in microseconds a call."""
    for _ in range(calls // 10 + 2):
        call()
    times = []
    for _ in range(calls // BATCH):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - start) / BATCH)
    return statistics.median(times) * 1e6


def run_rank(job, rank):
    """One of two ranks: the tiny attention from NumPy, and from torch without and with gradients; prints medians."""
    import numpy as np
    import torch

    import cp_attn
    from cp_attn import _C

    torch.set_num_threads(1)
    config = cp_attn.ContextParallelConfig(ring_degree=RANKS, timeout=60.0)
    context = _C.Context(config, rank=rank, world=RANKS, key=job["key"])
    arrays = [np.random.default_rng(1).standard_normal(job["shape"]).astype(np.float32) for _ in range(3)]
    tensors = [torch.from_numpy(x) for x in arrays]
    leaves = [x.clone().requires_grad_() for x in tensors]
    inputs = {"NumPy": arrays, "torch": tensors, "torch, gradients recorded": leaves}
    us = {name: batches_us(lambda x=x: cp_attn.attention(*x, context), job["calls"]) for name, x in inputs.items()}
    if rank == 0:
        print(json.dumps(us))


def python_us(args):
    """Start two ranks; {name: microseconds a call}."""
    job = dict(key=f"gate {uuid.uuid4().hex}", shape=(1, args.rows, args.heads, args.dim), calls=args.calls)
    command = [sys.executable, "-m", "benchmarks.gate", "--rank"]
    ranks = [
        subprocess.Popen([*command, json.dumps([job, rank])], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=args.timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; it says why above")
    return json.loads(outputs[0])


def measure(program, args):
    """Alternate all sides `args.rounds` times: rows of (what, ranks, microseconds)."""
    taken = defaultdict(list)
    for _ in tqdm(range(args.rounds), leave=False):
        for world in args.world or WORLDS:
            for op in ("agree", "attention"):
                taken[f"C core, {op}", world].append(core_us(program, op, world, args))
        core = core_us(program, "attention", RANKS, args)
        for name, us in python_us(args).items():
            taken[f"attention(), {name}", RANKS].append(us)
            taken[f"attention() over the C core, {name}", RANKS].append(us - core)
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
    rows = measure(build(args.cc), args)
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
