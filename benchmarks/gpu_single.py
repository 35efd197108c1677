"""One GPU: what a rank's call takes of it beside torch's bare kernel and diffusers' own code, with no peer there.

``python -m benchmarks.gpu_single`` plays rank 0 of four of FLUX.1-dev at 1024 x 1024. What a rank would receive is
copied from what it sends, on both sides, so both do the same work and have the same answer, which is compared first.
Without a GPU it says so and ends with code 3; ``--simulated`` plays all of it on the simulated GPU, untimed.
"""

import argparse
import json
import platform
import sys
import types
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import gate, upstream_rank
from .gpu_library import Rank
from .gpu_machines import Gpu, Simulated, medians
from .provenance import processor, provenance

WORLD = 4
NO_GPU = 3  # the exit code
ERRORS = {"float32": 1e-4, "bfloat16": 2.0**-6, "float16": 2.0**-9}  # between two sides, by numbers of about 1
Shape = namedtuple("Shape", "batch rows heads dim")
FLUX = Shape(1, (64 * 64 + 512) // WORLD, 24, 128)
TINY = Shape(1, 8, 4, 16)


@dataclass
class Row:
    """`ratio` is theirs over ours, or for what should be small ours over theirs. None: not measured."""

    name: str
    unit: str
    ours: float | None
    theirs: float | None
    floor: float
    goal: float
    is_small: bool = False
    note: str = ""

    @property
    def ratio(self):
        if not self.ours or not self.theirs:
            return None
        return self.ours / self.theirs if self.is_small else self.theirs / self.ours

    @property
    def is_below(self):
        return self.ratio is not None and (self.ratio > self.floor if self.is_small else self.ratio < self.floor)

    def line(self):
        show = [f"{x:.4g} {self.unit}" if x is not None else "-" for x in (self.ours, self.theirs)]
        ratio = f"{self.ratio:.2f}" if self.ratio is not None else "-"
        marks = [f"{'<= ' if self.is_small else ''}{mark:g}" for mark in (self.floor, self.goal)]
        return f"| {' | '.join([self.name, *show, ratio, *marks, self.note])} |"


def random(shape, dtype, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(count)]


def compare(name, ours, theirs, dtype):
    """Refuse to time two sides that do not compute the same."""
    error = (ours.double() - theirs.double()).abs().max().item()
    if not error <= ERRORS[dtype]:
        raise SystemExit(
            f"{name}: the two sides are {error:.3g} apart, more than {ERRORS[dtype]:.3g}: nothing was timed"
        )


class Bench:
    """Both sides of one case: `ours()` and `theirs()` enqueue it."""

    def __init__(self, machine, args):
        self.machine, self.args = machine, args

    def inputs(self, tensors):
        return [[put(x) for x in tensors] for put in (self.machine.ours, self.machine.theirs)]

    def call(self, rank, blocks):
        """Return what enqueues a call of `rank`, and the block of its answer."""
        machine, out = self.machine, self.machine.ours(torch.zeros(blocks[0].shape, dtype=blocks[0].dtype))
        addresses = [machine.address(x) for x in (*blocks, out)]
        return lambda: rank.run(*addresses, machine.stream()), out

    def rank(self, ring, ulysses, **more):
        return Rank(self.machine.library, ring, ulysses, self.args.shape, self.args.dtype, **more)

    def upstream(self, ring, ulysses):
        return upstream_rank.rank(ring, ulysses, isinstance(self.machine, Simulated))

    def time(self, ours, theirs):
        return medians(self.machine.ms, (ours, theirs), self.args.rounds)

    def attention(self):
        """As called without a second rank, on the tokens of all."""
        shape = self.args.shape._replace(rows=WORLD * self.args.shape.rows, heads=self.args.shape.heads // WORLD)
        blocks, tensors = self.inputs(random(shape, self.args.dtype, 3))
        call = (self.machine.library, 1, 1, shape, self.args.dtype)
        with Rank(*call) as rank, self.upstream(1, 1):
            ours, out = self.call(rank, blocks)
            ours()
            bare = upstream_rank.bare(*tensors)[0].transpose(1, 2)
            compare("attention", self.machine.get(out), self.machine.get(bare), self.args.dtype)
            times = self.time(ours, lambda: upstream_rank.bare(*tensors))
            return [Row("attention as called, beside the bare kernel", "ms", *times, 0.98, 1.0, note=rank.kernel)]

    def whole(self, name, ring, ulysses):
        """Return the rows of a whole operation: its time where a mark asks for it, the host's, memory."""
        machine, rows = self.machine, []
        blocks, tensors = self.inputs(random(self.args.shape, self.args.dtype, 3))
        with self.rank(ring, ulysses) as rank, self.upstream(ring, ulysses) as config:
            ours, out = self.call(rank, blocks)
            theirs = lambda: upstream_rank.attend(*tensors, config)  # noqa: E731
            ours()
            compare(name, machine.get(out), machine.get(theirs()), self.args.dtype)
            if name == "ring":
                rows.append(Row("ring of 4, whole operation", "ms", *self.time(ours, theirs), 2.5, 3.5))
            own, other = medians(machine.host_us, (ours, theirs), self.args.rounds)
            own = own + self.args.beside_us if own is not None else None
            marks = (15, 30) if name == "ring" else (8, 15)
            note = f"ours with {self.args.beside_us:.1f} us for the gate and Python" if machine.is_timed else ""
            rows.append(Row(f"host time to enqueue, {name}", "us", own, other, *marks, note=note))
            if name == "ring":
                taken = [machine.transient_bytes(side) for side in (ours, theirs)]
                if taken[0] is not None:
                    taken = [(taken[0] + rank.workspace_bytes) / 2**20, taken[1] / 2**20]
                rows.append(Row("transient bytes, ring of 4", "MiB", *taken, 0.40, 0.32, is_small=True))
        return rows

    def exchange(self):
        blocks, tensors = self.inputs(random(self.args.shape, self.args.dtype, 3))
        with self.rank(1, WORLD, without_attention=True) as rank, self.upstream(1, WORLD) as config:
            ours, _ = self.call(rank, blocks)
            times = self.time(ours, lambda: upstream_rank.exchange(*tensors, config))
        return [Row("Ulysses of 4, data path", "ms", *times, 2, 4)]

    def merge(self):
        shape, machine = self.args.shape, self.machine
        outs, lses = random(shape, self.args.dtype, WORLD), random(shape[:3], "float32", WORLD, seed=2)
        (our_outs, their_outs), (our_lses, their_lses) = self.inputs(outs), self.inputs(lses)
        out = machine.ours(torch.zeros(shape, dtype=outs[0].dtype))
        with self.rank(WORLD, 1) as rank, self.upstream(WORLD, 1) as config:
            addresses = [[machine.address(x) for x in group] for group in (our_outs, our_lses)]
            ours = lambda: rank.merge(*addresses, machine.address(out), machine.stream())  # noqa: E731
            theirs = lambda: upstream_rank.merge(their_outs[0], their_outs, their_lses, config)  # noqa: E731
            ours()
            compare("merge", machine.get(out), machine.get(theirs()), self.args.dtype)
            return [Row("merge of 4 blocks", "ms", *self.time(ours, theirs), 6, 10)]

    def rows(self):
        yield from self.attention()
        yield from self.exchange()
        yield from self.merge()
        yield from self.whole("ring", WORLD, 1)
        yield from self.whole("Ulysses", 1, WORLD)
        note = "not there: parts of a call have no context to be captured in"
        yield Row("graph replay, host time of eager over it", "us", None, None, 3, 6, note=note)


def gate_and_python_us():
    """Microseconds of the host that a call takes beside what bench_gpu.c does, as benchmarks.gate measures them."""
    args = types.SimpleNamespace(calls=500, rows=4, heads=2, dim=8, timeout=300.0)
    exchange = gate.core_us(gate.build("cc"), "agree", WORLD, args)
    return exchange + gate.python_us(args)["torch"][1]


def shape_of(text):
    numbers = tuple(map(int, text.split("x")))
    if len(numbers) != 3 or min(numbers) < 1 or numbers[1] % WORLD:
        raise argparse.ArgumentTypeError(f"{text}: ROWSxHEADSxDIM is needed, heads divisible by {WORLD}")
    return Shape(1, *numbers)


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_single", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--shape", type=shape_of, help="ROWSxHEADSxDIM of the rank; default FLUX's 1152x24x128, simulated 8x4x16")
    add("--dtype", choices=ERRORS, help="default bfloat16, simulated float32")
    add("--rounds", type=int, default=30, help="measurements of each side, in turns; default 30")
    add("--simulated", action="store_true", help="play everything without a GPU, untimed")
    add("--check", action="store_true", help="fail where a ratio is on the wrong side of its floor")
    add("--json", type=Path, metavar="FILE", help="also write one JSON line per row")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if not args.simulated and not torch.cuda.is_available():
        print("no GPU on this machine: nothing was measured (--simulated plays all but the times)")
        return NO_GPU
    args.shape = args.shape or (TINY if args.simulated else FLUX)
    args.dtype = args.dtype or ("float32" if args.simulated else "bfloat16")
    machine = Simulated() if args.simulated else Gpu()
    args.beside_us = gate_and_python_us() if machine.is_timed else 0.0
    args.rounds = args.rounds if machine.is_timed else 1
    about = provenance(
        "gpu_single",
        machine=f"{machine.name}; {processor()}, Linux {platform.release()}",
        versions=f"torch {torch.__version__.split('+')[0]}",
        shape=f"{'x'.join(map(str, args.shape))} (batch, rows, heads, dim) {args.dtype}, {WORLD} ranks",
    )
    print("\n".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
    print("| one GPU, rank 0 of 4 | cp_attn | torch, diffusers | ratio | floor | goal | |")
    print("|---|---:|---:|---:|---:|---:|---|")
    rows = []
    for row in Bench(machine, args).rows():
        rows.append(row)
        print(row.line(), flush=True)
    print("\nthe answers of both sides agree" + ("" if machine.is_timed else "; nothing was timed"))
    if args.json:
        lines = (json.dumps(asdict(row) | {"ratio": row.ratio} | about) + "\n" for row in rows)
        args.json.write_text("".join(lines))
    return int(args.check and any(row.is_below for row in rows))


if __name__ == "__main__":
    sys.exit(main())
