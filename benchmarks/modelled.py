"""What calls on several GPUs would take by published speeds, ours beside diffusers'. Nothing here is measured.

``python -m benchmarks.modelled`` walks the schedules of all ranks with the speeds of csrc/schedule/machine.c
(benchmarks/model_schedule.c), for NCCL and for windows between GPUs (ipc), with the heads in one chunk and in as many
as calls choose (csrc/schedule/choose.c). diffusers' sequence is what its own code asks for
(benchmarks/upstream_costs.py), by the same speeds. ``--check`` fails where docs/gpu-results.md has other tables.
"""

import argparse
import json
import math
import subprocess
import sys
import warnings
from dataclasses import dataclass

from . import core
from .gpu_costs import Case
from .provenance import ROOT
from .shapes import FLUX, WAN, cut

# Of torch's eager mode, assumed: what the host takes for an operator, and for a collective.
OPERATOR_S, COLLECTIVE_S = 6e-6, 30e-6
OURS = ("nccl", "ipc")
ONE, CHOSEN = 1, 0  # chunks of heads


@dataclass(frozen=True, eq=False)
class Machine:
    """`marks`: the project's own (floor, goal) for forward calls, times as fast as diffusers' eager ones."""

    name: str
    generation: int
    ranks: int
    shape: object
    unified: tuple
    marks: dict


MACHINES = (
    Machine("4 x H100", 90, 4, FLUX, (2, 2), {"ulysses": (1.3, 1.8), "ring": (2.5, 4), "unified": (2.0, 2.5)}),
    Machine("8 x H100", 90, 8, WAN, (2, 4), {"ulysses": (1.10, 1.18), "ring": (1.8, 2.3), "unified": (1.45, 1.65)}),
    Machine("4 x L20", 89, 4, FLUX, (2, 2), {"ulysses": (1.3, 1.8), "ring": (1.4, 2.0), "unified": (1.5, 1.9)}),
)
OPS = ("attention", "backward")

FLASH_3, FLASH_2 = "FlashAttention-3, arXiv 2407.08608", "FlashAttention-2, arXiv 2307.08691"
ASSUMED = "assumed"
# What model_schedule calls it: its name, the unit in which it is shown, and where H100's and L20's numbers are from.
SPEEDS = {
    "attend_ops": (
        "attention forward, TFLOP/s",
        1e12,
        f"published: {FLASH_3}, D 128; 73 % of the datasheet's peak, {FLASH_2}",
    ),
    "grad_ops": (
        "attention backward, TFLOP/s",
        1e12,
        f"published: {FLASH_3}, D 128; 63 % of the datasheet's peak, {FLASH_2}",
    ),
    "processors": ("processors", 1, "published: datasheets"),
    "tile_rows": ("rows of a tile", 1, "published: the kernels' sources"),
    "memory_bytes": ("memory, GB/s", 1e9, "published: datasheets"),
    "link_bytes": (
        "link each way, GB/s",
        1e9,
        "of 450 (NVLink 4) and 31.5 (PCIe 4.0 x16), published; the share that is reached is assumed",
    ),
    "link_s": ("until a message or signal is there, us", 1e-6, ASSUMED),
    "launch_s": ("between two kernels, us", 1e-6, ASSUMED),
    "enqueue_s": ("host, a launch of ours, us", 1e-6, ASSUMED),
}


def cases_of(machine, op):
    degrees = {"ulysses": (1, machine.ranks), "ring": (machine.ranks, 1), "unified": machine.unified}
    rows = cut(machine.shape.tokens, machine.ranks)
    for variant, (ring, ulysses) in degrees.items():
        yield Case(op, machine.shape.name, variant, ring, ulysses, machine.shape.heads, machine.shape.dim, rows)


def walk_ours(jobs):
    """{(machine, case, transport, chunks): what model_schedule prints}"""
    lines = []
    for machine, case, transport, chunks in jobs:
        words = [machine.generation, transport, chunks, case.op, case.ring, case.ulysses, "even", case.heads, case.dim]
        lines.append(" ".join(map(str, [*words, *case.rows])))
    program = core.build("model_schedule", "cc")
    done = subprocess.run([program], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    return dict(zip(jobs, map(json.loads, done.stdout.splitlines()), strict=True))


def attention_s(case, speeds):
    """Of diffusers: a launch for each block of the ring, in whole waves of tiles, as ours."""
    rows, heads = case.rows[0] * case.ulysses, case.heads // case.ulysses
    is_backward = case.op == "backward"
    ops = (10 if is_backward else 4) * rows * rows * heads * case.dim
    tiles = math.ceil(rows / speeds["tile_rows"]) * heads
    waves = math.ceil(tiles / speeds["processors"]) * speeds["processors"] / tiles
    return case.ring * (ops / speeds["grad_ops" if is_backward else "attend_ops"] * waves + speeds["launch_s"])


def time_theirs(case, speeds):
    """Seconds of diffusers' call: its device's, one operator after the other, or its host's, whichever is longer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that torch will rename
        from . import upstream_costs

        count = upstream_costs.count(case, "flash")
    moved = 2 * count["written_bytes"] / speeds["memory_bytes"] + count["other"] * speeds["launch_s"]
    sent = count["sent_bytes"] / speeds["link_bytes"] + count["exchanges"] * speeds["link_s"]
    host = (count["attention"] + count["other"]) * OPERATOR_S + count["exchanges"] * COLLECTIVE_S
    return max(attention_s(case, speeds) + moved + sent, host)


def rows_of(machine, op, walked):
    for case in cases_of(machine, op):
        speeds = walked[machine, case, "nccl", ONE]
        theirs_us = time_theirs(case, speeds) * 1e6
        cells = [f"{case.variant}, {case.ring} x {case.ulysses}", f"{theirs_us:.0f}"]
        fastest = math.inf
        for transport in OURS:
            one, chosen = (walked[machine, case, transport, chunks] for chunks in (ONE, CHOSEN))
            cells += [f"{one['total_us']:.0f}", f"{chosen['total_us']:.0f} ({chosen['chunks']})"]
            fastest = min(fastest, chosen["total_us"])
        cells += [f"{walked[machine, case, 'in-place', ONE]['total_us']:.0f}", f"{theirs_us / fastest:.2f}"]
        if op == "attention":
            floor, goal = machine.marks[case.variant]
            cells.append(f"{floor:g} ({goal:g})")
        yield cells


def speeds_table(walked):
    """Lines of Markdown: each speed for NCCL, and for ipc where it is another."""
    machines = {machine.generation: (machine, case) for machine in MACHINES for case in cases_of(machine, OPS[0])}
    yield "| speed | H100 | L20 | from |"
    yield "|---|---:|---:|---|"
    for key, (name, unit, source) in SPEEDS.items():
        cells = []
        for pair in machines.values():
            both = [f"{walked[(*pair, transport, ONE)][key] / unit:g}" for transport in OURS]
            cells.append(both[0] if both[0] == both[1] else f"{both[0]}, ipc {both[1]}")
        yield f"| {name} | {' | '.join(cells)} | {source} |"
    for name, seconds in (
        ("host, an operator of torch's, us", OPERATOR_S),
        ("host, a collective of torch's, us", COLLECTIVE_S),
    ):
        yield f"| {name} | {seconds * 1e6:g} | {seconds * 1e6:g} | {ASSUMED} |"
    yield ""


def tables(walked):
    """Lines of Markdown."""
    yield from speeds_table(walked)
    for op, title in zip(OPS, ("Forward", "Backward"), strict=True):
        for machine in MACHINES:
            shape = machine.shape
            yield f"Modelled, {title.lower()}, {shape.name}, S {shape.tokens:,}, {machine.name}, microseconds:"
            yield ""
            names = ["variant", "diffusers", "NCCL", "in chunks", "ipc", "in chunks", "in place", "times as fast"]
            names += ["floor (goal)"] if op == "attention" else []
            yield "| " + " | ".join(names) + " |"
            yield "|---|" + "---:|" * (len(names) - 1)
            for cells in rows_of(machine, op, walked):
                yield "| " + " | ".join(cells) + " |"
            yield ""


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modelled", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where docs/gpu-results.md has another table")
    args = parser.parse_args()
    import diffusers
    import torch

    print(f"versions: diffusers {diffusers.__version__}, torch {torch.__version__.split('+')[0]}; no GPU is used\n")
    pairs = [(machine, case) for op in OPS for machine in MACHINES for case in cases_of(machine, op)]
    jobs = [(*pair, transport, chunks) for pair in pairs for transport in OURS for chunks in (ONE, CHOSEN)]
    walked = walk_ours(jobs + [(*pair, "in-place", ONE) for pair in pairs])
    lines = list(tables(walked))
    print("\n".join(lines))
    document = (ROOT / "docs" / "gpu-results.md").read_text()
    missing = [line for line in lines if line not in document.splitlines()]
    if args.check and missing:
        print("not in docs/gpu-results.md:", *missing, sep="\n", file=sys.stderr)
    return int(args.check and bool(missing))


if __name__ == "__main__":
    sys.exit(main())
