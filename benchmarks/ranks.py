"""What is lost by sharing one attention among ranks, and among threads of a rank.

``python -m benchmarks.ranks`` alternates the same whole calls of the C core on one rank, on several, and with several
threads, and prints the share of the ideal time that each keeps.
"""

import argparse
import json
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from .core import build, call_us
from .provenance import processor, provenance

ONE = {"ring": 1, "ulysses": 1, "threads": 1}


class Row(NamedTuple):
    """A ratio: time of `other` over time of `own`, times `factor`."""

    mark: str  # of the project's list; "": none
    what: str
    own: dict
    other: dict
    factor: float
    floor: float
    goal: float


def rows(cores):
    """Return the ratios; ideal is 1 for each, on a machine with `cores` free cores."""
    rank, used = 1 / 2, 1 / min(4, cores)
    ring, ulysses = ONE | {"ring": 2}, ONE | {"ulysses": 2}
    uneven = {"uneven": 1}
    return [
        Row("C7", "ring, 2 ranks / one", ring, ONE, rank, 0.92, 0.98),
        Row("C8", "Ulysses, 2 ranks / one", ulysses, ONE, rank, 0.92, 0.98),
        Row("C9", "unified 2 x 2 / one rank", ONE | {"ring": 2, "ulysses": 2}, ONE, used, 0.88, 0.96),
        Row("C10", "ring_anything, 4 : 5 / even", ring | uneven, ring, 10 / 9, 0.95, 0.99),
        Row("C10", "ulysses_anything, 4 : 5 / even", ulysses | uneven, ulysses, 1.0, 0.95, 0.99),
        Row("", "one rank, 2 threads / ring, 2 ranks", ONE | {"threads": 2}, ring, 1.0, 0.95, 1.0),
        Row("", "ring, 4 ranks / one", ONE | {"ring": 4}, ONE, used, 0.88, 0.96),
        Row("", "ring, 6 ranks / one", ONE | {"ring": 6}, ONE, 1 / min(6, cores), 0.88, 0.96),
    ]


def measure(program, table, args):
    """Alternate all jobs `args.rounds` times: (op, job as text) to its microseconds, one median a round."""
    taken = defaultdict(list)
    jobs = {json.dumps(job): job for row in table for job in (row.own, row.other)}
    shape = {"tokens": args.tokens, "heads": args.heads, "dim": args.dim, "batch": 1, "batches": args.repeats}
    with tqdm(total=args.rounds * len(jobs) * len(args.op), leave=False) as progress:
        for _ in range(args.rounds):
            for op in args.op:
                for name, job in jobs.items():
                    progress.set_description(f"{op} {name}")
                    times = call_us(program, args.timeout, op=op, **job, **shape)
                    taken[op, name].append(statistics.median(times))
                    progress.update()
    return taken


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=4608, help="of the whole; default 4608, FLUX at 1024 x 1024")
    add("--heads", type=int, default=24, help="default 24")
    add("--dim", type=int, default=128, help="default 128")
    add(
        "--op",
        choices=("attention", "attention_backward"),
        action="append",
        help="default: attention, and then its backward",
    )
    add("--rounds", type=int, default=5, help="times all jobs alternate; default 5")
    add("--repeats", type=int, default=2, help="calls of each in a round; default 2")
    add("--timeout", type=float, default=600.0, help="seconds for one job; default 600")
    add("--cc", default=os.environ.get("CC", "cc"), help="compiler; default $CC or cc")
    add("--check", action="store_true", help="fail where a median is more than 3 %% below its floor")
    add("--json", type=Path, metavar="FILE", help="also write one JSON line per row of the table")
    return parser.parse_args()


def main():
    args = parse_arguments()
    args.op = args.op or ["attention", "attention_backward"]
    cores = len(os.sched_getaffinity(0))
    about = provenance("ranks", machine=processor(), cores=cores)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
    table = rows(cores)
    taken = measure(build("bench_call", args.cc), table, args)
    lines, missed = [], []
    print("| | of the ideal | | floor | goal | median | spread |\n|---|---|---|---:|---:|---:|---|")
    for op in args.op:
        for row in table:
            own, other = (taken[op, json.dumps(job)] for job in (row.own, row.other))
            shares = [row.factor * b / a for a, b in zip(own, other, strict=True)]
            share = statistics.median(shares)
            spread = f"{min(shares):.2f} to {max(shares):.2f}"
            print(f"| {row.mark} | {row.what} | {op} | {row.floor:.2f} | {row.goal:.2f} | {share:.2f} | {spread} |")
            line = row._asdict() | {"op": op, "share": share, "us": statistics.median(own), "shares": shares}
            lines.append(json.dumps(line | about | {"tokens": args.tokens, "heads": args.heads, "dim": args.dim}))
            if share < row.floor - 0.03:
                missed.append(f"{row.what}, {op}: {share:.2f}, floor {row.floor:.2f}")
    if args.json:
        args.json.write_text("".join(line + "\n" for line in lines))
    if args.check and missed:
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
