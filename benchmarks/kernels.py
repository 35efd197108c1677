"""How near the CPU kernels come to the core's peak, and how torch does in the same run.

``python -m benchmarks.kernels`` links benchmarks/bench_kernel.c with the C core, pins itself to one
core and alternates that program with torch's scaled_dot_product_attention on one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from .core import build
from .provenance import processor, provenance

# Rows, keys, dim: one rank of four of an image model with 4,608 tokens (the marks of the project),
# the same on one rank, a long sequence (throughput must not fall), and small dims.
SHAPES = [(1152, 4608, 128), (1152, 4608, 64), (4608, 4608, 128), (1152, 32760, 128), (1152, 4608, 72)]
DTYPES = ("float32", "bfloat16", "float16")


def run_ours(program, shape, dtype, sight, args):
    """Medians of one start of the program, a dict for each kernel."""
    rows, keys, dim = shape
    numbers = map(str, (rows, keys, args.heads, dim, dtype, args.repeats, args.panels, sight))
    command = [program, *numbers, *([args.kernel] if args.kernel else [])]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


class Torch:
    """torch's attention on the tensors of one shape, on one thread."""

    def __init__(self, shape, dtype, heads):
        import torch

        torch.set_num_threads(1)
        rows, keys, dim = shape
        generator = torch.Generator().manual_seed(1)
        # (1, heads, S, D) as models have it: a transposed view of (1, S, heads, D).
        self.q, self.k, self.v = (
            torch.randn(1, length, heads, dim, generator=generator).to(getattr(torch, dtype)).transpose(1, 2)
            for length in (rows, keys, keys)
        )
        self.leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        self.grad = torch.autograd.grad
        self.attend = torch.nn.functional.scaled_dot_product_attention
        self.operations = 4.0 * rows * keys * heads * dim
        self.inference_mode = torch.inference_mode
        self.gflops(1)
        self.backward(1)

    def gflops(self, repeats):
        """Median over `repeats`, of CPU time of this thread, as in bench_kernel.c."""
        times = []
        with self.inference_mode():
            for _ in range(repeats):
                start = time.thread_time()
                self.attend(self.q, self.k, self.v)
                times.append(time.thread_time() - start)
        return self.operations / statistics.median(times) * 1e-9

    def backward(self, repeats):
        """As gflops, of the gradients of q, k and v."""
        times = []
        out = self.attend(*self.leaves)
        for _ in range(repeats):
            start = time.thread_time()
            self.grad(out, self.leaves, self.q, retain_graph=True)
            times.append(time.thread_time() - start)
        return 2.5 * self.operations / statistics.median(times) * 1e-9


def measure(program, shape, dtype, args, progress):
    """Alternate both sides `args.rounds` times: a record for each kernel."""
    peer = Torch(shape, dtype, args.heads) if args.torch else None
    records, peers, peers_backward = defaultdict(list), [], []
    for _ in range(args.rounds):
        for sight in args.sight:
            for record in run_ours(program, shape, dtype, sight, args):
                records[record["kernel"], sight].append(record)
        if peer:
            peers.append(peer.gflops(args.repeats))
            peers_backward.append(peer.backward(args.repeats))
        progress.update()
    for (kernel, _), rounds in records.items():
        record = dict(rounds[0], rounds=args.rounds)
        for key in ("gflops", "backward"):
            dense = records.get((kernel, "all"), rounds)
            record[f"{key}_of_dense"] = statistics.median(b[key] / r[key] for b, r in zip(dense, rounds, strict=True))
        for key in ("gflops", "peak", "share", "pack", "finish", "backward", "times"):
            record[key] = statistics.median(r[key] for r in rounds)
        record["torch"] = statistics.median(peers) if peers else None
        record["ratio"] = record["gflops"] / record["torch"] if peers else None
        record["torch_backward"] = statistics.median(peers_backward) if peers else None
        record["ratio_backward"] = record["backward"] / record["torch_backward"] if peers else None
        yield record


def line_of(record):
    shape = f"{record['rows']} x {record['keys']} x {record['dim']}"
    if record["sight"] != "all":
        ratios = f"{record['gflops_of_dense']:6.2f} of dense  {record['backward_of_dense']:6.2f} of dense"
        return f"{shape:<19} {record['dtype']:<9} {record['kernel']:<11} {record['sight']:<8} a pair takes {ratios}"
    share = f"{record['share']:5.2f}" if record["peak"] else "    -"
    peer, back_peer = "       -      -", "       -      -"
    if record["torch"]:
        peer = f"{record['torch']:8.1f} {record['ratio']:6.2f}"
        back_peer = f"{record['torch_backward']:8.1f} {record['ratio_backward']:6.2f}"
    ours = f"{record['gflops']:8.1f} {share:>6} {peer}"
    back = f"{record['backward']:8.1f} {record['times']:6.2f} {back_peer}"
    return f"{shape:<19} {record['dtype']:<9} {record['kernel']:<11} {ours}  {back}"


HEADING = (
    f"{'rows x keys x dim':<19} {'dtype':<9} {'kernel':<11} {'forward':>8} {'/ peak':>6} {'torch':>8} {'ratio':>6}"
    f"  {'backward':>8} {'times':>6} {'torch':>8} {'ratio':>6}"
)


def shape_of(text):
    """ROWSxKEYSxDIM"""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxKEYSxDIM, for example 1152x4608x128")
    return tuple(map(int, parts))


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=shape_of, action="append", metavar="ROWSxKEYSxDIM", help="default: five shapes")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: float32 and bfloat16")
    parser.add_argument("--kernel", help="one kernel alone, by its name")
    parser.add_argument(
        "--panels",
        choices=("private", "shared"),
        default="private",
        help="where packed keys lie: as with one rank (default), or in shared memory as among several",
    )
    parser.add_argument(
        "--sight",
        choices=("all", "causal", "keys", "bool", "bias", "mask"),
        action="append",
        help="what queries see: all keys (default); those before them; three of four, by a mask with one row; by a "
        "bool mask with a row for each query; all with a float32 mask; those before them, by a bool mask. Beside `all` "
        "the time for each pair that is looked at is compared with it; torch's figures are always of `all`",
    )
    parser.add_argument("--heads", type=int, default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=3, help="times the two sides alternate; default 3")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each side in a round; default 5")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last one")
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"), help="compiler; default $CC or cc")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write one JSON line per row of the table")
    return parser.parse_args()


def main():
    args = parse_arguments()
    args.sight = args.sight or ["all"]
    program = build("bench_kernel", args.cc)
    os.sched_setaffinity(0, {args.core})  # the program inherits it
    about = provenance("kernels", machine=processor(), cores=os.cpu_count(), pinned_to=args.core, threads=1)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
    print(HEADING)
    cases = [(s, d) for d in args.dtype or DTYPES[:2] for s in args.shape or SHAPES]
    lines = []
    with tqdm(total=len(cases) * args.rounds, leave=False) as progress:
        for shape, dtype in cases:
            progress.set_description(f"{dtype} {'x'.join(map(str, shape))}")
            for record in measure(program, shape, dtype, args, progress):
                tqdm.write(line_of(record))
                lines.append(json.dumps({**record, **about}))
    if args.json:
        args.json.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
