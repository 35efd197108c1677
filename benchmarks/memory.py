"""How much memory a call takes beyond its inputs and outputs, against the formula of its variant.

``python -m benchmarks.memory`` starts the ranks of each case as processes, lets them call forward and backward, and
asks the system what the third call and those after it took. ``--check`` fails above 1.2 times the formula.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tqdm import tqdm

from .provenance import ROOT, processor, provenance

MIB = 2**20
LIMIT = 1.2
CALLS = 3  # forward, then as many backward; the first two of each are not measured
SMALL_CALLS = 1000
GROWTH_LIMIT = MIB // 4  # of that many small calls: what Python and its allocator move by
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# name: ring and Ulysses degree for a number of ranks, the config's flag, how k and v are given.
VARIANTS = {
    "ring": (lambda world: (world, 1), None, "sharded"),
    "ulysses": (lambda world: (1, world), None, "sharded"),
    "unified": (lambda world: (2, world // 2), None, "sharded"),
    "ring_anything": (lambda world: (world, 1), "ring_anything", "sharded"),
    "ulysses_anything": (lambda world: (1, world), "ulysses_anything", "sharded"),
    "unified_anything": (lambda world: (2, world // 2), "unified_anything", "sharded"),
    "replicated": (lambda world: (world, 1), None, "replicated"),
}
RUNS = [
    ("ring", 2),
    ("ring", 4),
    ("ulysses", 2),
    ("ulysses", 4),
    ("unified", 4),
    ("ring_anything", 3),
    ("ulysses_anything", 3),
    ("unified_anything", 4),
    ("replicated", 2),
]
# Tokens, heads, head dim: those of an image and of a video, with fewer heads, since the time grows with them.
SHAPES = [(4608, 8, 128), (32760, 4, 32)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One start of the ranks."""

    variant: str
    world: int
    tokens: int
    heads: int
    dim: int
    dtype: str = "float32"
    small_calls: int = 0

    def small(self):
        """The same with few tokens, heads and dims."""
        return dataclasses.replace(self, tokens=64, heads=4, dim=32)

    @property
    def degrees(self):
        return VARIANTS[self.variant][0](self.world)

    @property
    def kv(self):
        return VARIANTS[self.variant][2]

    @property
    def lengths(self):
        """Rows of every rank: equal, or 4, 5, 6, ... parts where the variant takes any."""
        parts = [4 + r if self.variant.endswith("_anything") else 1 for r in range(self.world)]
        ends = [self.tokens * sum(parts[: r + 1]) // sum(parts) for r in range(self.world)]
        return [end - first for first, end in zip([0, *ends], ends, strict=False)]

    def config(self):
        from cp_attn import ContextParallelConfig

        ring, ulysses = self.degrees
        flag = VARIANTS[self.variant][1]
        flags = {flag: True} if flag else {}
        return ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, timeout=600.0, **flags)


# --- the formulas ---


def share(size, parts, index):
    """As tensor_split cuts."""
    return size // parts + (index < size % parts)


def formula(case, rank, direction):
    """The bytes that the variant may take on a rank: products, to be added up.

    q, k, v, out and the gradient of out count in the call's dtype, states, sums and slots in float32. A slot has a
    block's dk and dv for the heads that the rank computes.
    """
    ring, ulysses = case.degrees
    own, dim, size = case.lengths[rank], case.dim, BYTES[case.dtype]
    group = sum(case.lengths[rank // ulysses * ulysses :][:ulysses])
    heads = share(case.heads, ulysses, rank % ulysses)
    keys = case.tokens if case.kv == "replicated" else own
    longest = max(case.lengths)
    state = (group, heads, dim + 2, 4)
    if direction == "forward" and case.kv == "replicated":
        return [(keys, case.heads, 2 * dim, size), state]
    if direction == "forward" and ulysses == 1:
        # Own k and v, two remote blocks, the state.
        return [(own, case.heads, 2 * dim, size), (2, longest, case.heads, 2 * dim, size), state]
    if direction == "forward":
        # Two halves of a window, each with q, k, v of the own rows and out for the own heads.
        return [(2, own, case.heads, 3 * dim, size), (2, group, heads, dim, size)]
    sums = [(group, heads, dim, 4), (keys, case.heads, 2 * dim, 4)]
    if case.kv == "replicated":
        return sums
    # dq; dk and dv; two slots; q, k, v and the gradient of out.
    return [*sums, (2, longest, heads, 2 * dim, 4), (own, case.heads, 4 * dim, size)]


def mark_c15(case, rank):
    """Two blocks of k and v, and the state."""
    longest, own = max(case.lengths), case.lengths[rank]
    return [(2, longest, case.heads, 2 * case.dim, BYTES[case.dtype]), (own, case.heads, case.dim + 2, 4)]


def text_of(terms):
    return " + ".join("*".join(map(str, term)) for term in terms)


def bytes_of(terms):
    return sum(map(math.prod, terms))


# --- a rank ---


def value_of(path, name):
    """A line `name: n kB` of a file in /proc/self, in bytes."""
    for line in Path("/proc/self", path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/{path} has no line {name}")


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def windows():
    """Bytes of windows that are mapped and in memory here, everybody's; bytes of the own window, read or not."""
    mapped, own, is_window = 0, set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # the head of a mapping
            is_window = "memfd:cp_attn window" in line
            if is_window and "w" in words[1]:  # only the owner may write
                own.add(int(words[4]))
        elif is_window and words[0] == "Rss:":
            mapped += int(words[1]) * 1024
    files = [os.stat(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    return mapped, sum(file.st_blocks * 512 for file in files if file.st_ino in own)


def extra(before, outputs):
    """Bytes since `reset_peak` beyond `before` and the outputs: private memory at its peak, and the own window.

    The peak counts peers' windows as well, as far as this rank has read them; they are their owners'.
    """
    peak = value_of("status", "VmHWM")  # first: looking at the rest takes memory, too
    mapped, own = windows()
    return peak - mapped - before - outputs + own


class Rank:
    """The tensors of one rank, and its calls; a call returns the bytes of what it made."""

    def __init__(self, case, rank):
        import numpy as np

        rows = case.lengths[rank]
        keys = case.tokens if case.kv == "replicated" else rows
        numbers = np.random.default_rng(rank).standard_normal(4099, dtype="float32")

        def draw(length):
            x = np.resize(numbers, (1, length, case.heads, case.dim))  # memory does not depend on them
            if case.dtype == "bfloat16":
                import torch

                return torch.from_numpy(x).bfloat16()
            return x.astype(case.dtype, copy=False)

        self.kv = case.kv
        self.q, self.k, self.v, self.dout = draw(rows), draw(keys), draw(keys), draw(rows)
        self.out = self.lse = None

    def forward(self, context):
        from cp_attn import attention

        self.out = self.lse = None  # so that there is one of each at a time
        self.out, self.lse = attention(self.q, self.k, self.v, context, return_lse=True, kv=self.kv)
        return self.out.nbytes + self.lse.nbytes

    def backward(self, context):
        from cp_attn import _C

        inputs = self.q, self.k, self.v, self.out, self.lse, self.dout
        grads = _C._attention_backward(context, *inputs, None, None, False, None, False, self.kv, "native")
        return sum(grad.nbytes for grad in grads)


def measure(call, context, before):
    """Call CALLS times; what those from the third on took, by the system and by the library's own count."""
    from cp_attn import _C

    call(context)
    call(context)
    reset_peak()
    blocks = _C._mem_stats()[1]
    for _ in range(CALLS - 2):
        outputs = call(context)
    taken = extra(before, outputs)
    return {"extra": taken, "counted": sum(context._memory()), "blocks": _C._mem_stats()[1] - blocks}


def growth(rank, context, calls):
    """Bytes that calls forward and backward add after the first tenth of them."""
    extra(0, 0)  # what Python needs to look stays with it
    taken = []
    for count in (calls // 10, calls - calls // 10):
        for _ in range(count):
            rank.forward(context)
            rank.backward(context)
        reset_peak()
        taken.append(extra(0, 0))
    return taken[1] - taken[0]


def run_rank(case, index, key):
    """Measure as one rank; the answer is one line of JSON."""
    from cp_attn import _C

    def context_of(name):
        return _C.Context(case.config(), rank=index, world=case.world, key=f"{key} {name}")

    # Small calls first, which bring in the code.
    small = Rank(case.small(), index)
    with context_of("small") as context:
        grown = growth(small, context, max(case.small_calls, 10))
    del small
    rank = Rank(case, index)
    before = value_of("smaps_rollup", "Rss")
    with context_of("measured") as context:
        forward = measure(rank.forward, context, before)
        held = before + rank.out.nbytes + rank.lse.nbytes
        backward = measure(rank.backward, context, held)
    print(json.dumps({"forward": forward, "backward": backward, "growth": grown}))


# --- all ranks ---


def start(case, timeout):
    """Run the ranks of a case to their end: their answers, in order."""
    key, deadline = f"benchmarks.memory {uuid.uuid4().hex}", time.monotonic() + timeout
    # What is freed goes back to the system at once, or the allocator's stock would count as in use.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--rank"]
    files = [(tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")) for _ in range(case.world)]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps([dataclasses.asdict(case), index, key])],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        for index, (out, err) in enumerate(files)
    ]
    try:
        for rank in ranks:
            rank.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    answers = []
    for index, (rank, (out, err)) in enumerate(zip(ranks, files, strict=True)):
        out.seek(0)
        err.seek(0)
        if rank.returncode:
            raise RuntimeError(f"{case}: rank {index} ended with {rank.returncode}\n{err.read()[-3000:]}")
        answers.append(json.loads(out.read()))
    return answers


def rows_of(case, answers):
    """A row of the table for each direction: of the rank with the highest ratio."""
    for direction in ("forward", "backward"):
        rows = []
        for rank, answer in enumerate(answers):
            terms = formula(case, rank, direction)
            row = answer[direction] | {"direction": direction, "rank": rank, "formula": bytes_of(terms)}
            row |= {"ratio": row["extra"] / row["formula"], "arithmetic": text_of(terms), "c15": None}
            row["growth"] = answer["growth"]
            if direction == "forward" and case.degrees[1] == 1 and case.kv == "sharded":
                row["c15"] = row["extra"] / bytes_of(mark_c15(case, rank))
            rows.append(row)
        yield dataclasses.asdict(case) | max(rows, key=lambda row: row["ratio"])


HEADING = (
    f"{'variant':<16} {'ranks':>5} {'tokens':>6} {'heads':>5} {'dim':>3} {'dtype':<8} {'direction':<9} {'rank':>4} "
    f"{'extra MiB':>9} {'counted':>8} {'formula':>8} {'ratio':>5}  formula in bytes"
)


def line_of(row):
    return (
        f"{row['variant']:<16} {row['world']:>5} {row['tokens']:>6} {row['heads']:>5} {row['dim']:>3} "
        f"{row['dtype']:<8} {row['direction']:<9} {row['rank']:>4} {row['extra'] / MIB:>9.1f} "
        f"{row['counted'] / MIB:>8.1f} {row['formula'] / MIB:>8.1f} {row['ratio']:>5.2f}  {row['arithmetic']}"
    )


def falls_with_ranks(rows):
    """Extra bytes times ranks, 4 ranks over 2: 1.00 where memory falls as 1 / ranks."""
    found = {(row["variant"], row["tokens"], row["direction"], row["world"]): row["extra"] for row in rows}
    for variant, tokens, direction, world in found:
        more = found.get((variant, tokens, direction, 4))
        if world == 2 and more is not None:
            yield f"{variant} {tokens} {direction} {2 * more / found[variant, tokens, direction, 2]:.2f}"


def shape_of(text):
    """TOKENSxHEADSxDIM"""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKENSxHEADSxDIM, for example 4608x24x128")
    return tuple(map(int, parts))


def run_of(text):
    """VARIANT:RANKS"""
    name, _, world = text.partition(":")
    if name not in VARIANTS or not world.isdigit() or int(world) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not VARIANT:RANKS; variants: {', '.join(VARIANTS)}")
    return name, int(world)


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--run", type=run_of, action="append", metavar="VARIANT:RANKS", help="default: nine, of all variants")
    shapes = " and ".join("x".join(map(str, shape)) for shape in SHAPES)
    add("--shape", type=shape_of, action="append", metavar="TOKENSxHEADSxDIM", help=f"default: {shapes}")
    add("--dtype", choices=BYTES, default="float32", help="bfloat16 needs torch; default float32")
    add("--small-calls", type=int, default=SMALL_CALLS, help=f"calls whose memory must not grow; default {SMALL_CALLS}")
    add("--timeout", type=float, default=1800.0, help="seconds for one case; default 1800")
    add("--check", action="store_true", help=f"fail where a ratio is above {LIMIT}, or memory grows")
    add("--json", type=Path, metavar="FILE", help="also write one JSON line per row of the table")
    add("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def print_table(args):
    """Run all cases; their rows."""
    shapes, runs, rows = args.shape or SHAPES, args.run or RUNS, []
    cases = [Case(*run, *shape, args.dtype, args.small_calls) for shape in shapes for run in runs]
    print(HEADING)
    for case in tqdm(cases, leave=False):
        for row in rows_of(case, start(case, args.timeout)):
            tqdm.write(line_of(row))
            rows.append(row)
    return rows


def main():
    args = parse_arguments()
    if args.rank:
        case, index, key = json.loads(args.rank)
        run_rank(Case(**case), index, key)
        return 0
    machine = f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}"
    about = provenance("memory", machine=machine, isa=os.environ.get("CP_ATTN_ISA") or "the best one")
    print("\n".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
    rows = print_table(args)
    worst = max(row["ratio"] for row in rows)
    marks = [row["c15"] for row in rows if row["c15"] is not None]
    print(f"\nhighest ratio: {worst:.2f}; limit {LIMIT}")
    if marks:
        print(f"ring forward over two blocks of k and v and the state (C15): at most {max(marks):.2f}; limit {LIMIT}")
    for line in falls_with_ranks(rows):
        print(f"times ranks, 4 ranks over 2: {line}")
    print(f"blocks allocated by measured calls: {sum(row['blocks'] for row in rows)}")
    grown = max(row["growth"] for row in rows)
    if args.small_calls:
        print(f"{args.small_calls} small calls forward and backward added at most {grown / 1024:.0f} KiB to a rank")
    if args.json:
        args.json.write_text("".join(json.dumps({**row, **about}) + "\n" for row in rows))
    is_fine = max(worst, *marks) <= LIMIT if marks else worst <= LIMIT
    is_fine = is_fine and grown <= GROWTH_LIMIT and not any(row["blocks"] for row in rows)
    return int(args.check and not is_fine)


if __name__ == "__main__":
    sys.exit(main())
