"""What a call asks of each GPU, ours beside diffusers': launches, bytes, exchanges, waits of the host, memory.

``python -m benchmarks.gpu_costs`` plays warm calls of FLUX's and Wan's shapes with our CUDA path on simulated GPUs
(tests/simgpu/count_costs.c) and with diffusers' own code on meta tensors (benchmarks/upstream_costs.py). Nothing is
computed and nothing timed, so it takes seconds anywhere. ``--check`` fails where a warm call of ours waits on the host
for the device or allocates.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import warnings
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path

from .provenance import ROOT, processor, provenance
from .shapes import FLUX, FLUX_UNEVEN, WAN, WAN_UNEVEN, cut

MIB = 1 << 20

# `unified` is (ring, ulysses); of the `uneven` shape ranks cannot have equal shares.
Model = namedtuple("Model", "even uneven ranks unified")
MODELS = {"flux": Model(FLUX, FLUX_UNEVEN, 4, (2, 2)), "wan": Model(WAN, WAN_UNEVEN, 8, (2, 4))}
BACKENDS = ("_native_flash", "flash")  # of diffusers
OURS = "cp_attn"
WRITTEN = {f"{kind}_bytes" for kind in ("attend", "finish", "delta", "grad", "copy", "add", "zero")}


@dataclass(frozen=True)
class Case:
    """One call: `op` is "attention" or "backward", `rows` those of each rank."""

    op: str
    shape: str
    variant: str
    ring: int
    ulysses: int
    heads: int
    dim: int
    rows: tuple
    dtype: str = "bfloat16"

    @property
    def is_anything(self):
        return self.variant.endswith("anything")

    def line(self):
        """As count_costs.c reads it."""
        variant = "anything" if self.is_anything else "even"
        numbers = [1, self.heads, self.dim, *self.rows]
        return " ".join(map(str, [self.op, self.ring, self.ulysses, variant, self.dtype, *numbers]))


def cases_of(model, op):
    """All variants at the even length; forward, those that take any at the uneven one too."""
    ring, ulysses = (model.ranks, 1), (1, model.ranks)
    calls = [(model.even, "ring", ring), (model.even, "ulysses", ulysses), (model.even, "unified", model.unified)]
    for shape in (model.even, model.uneven) if op == "attention" else (model.even,):
        calls += [(shape, "ring_anything", ring), (shape, "ulysses_anything", ulysses)]
    for shape, variant, degrees in calls:
        rows = cut(shape.tokens, model.ranks)
        yield Case(op, f"{shape.name}, S {shape.tokens:,}", variant, *degrees, shape.heads, shape.dim, rows)


def count_ours(cases, timeout):
    """What count_costs.c says of each case."""
    tests = ROOT / "tests" / "simgpu"
    make = ["make", "-s", "-j2", "-C", str(tests), "MODE=plain", "CC=gcc", "CXX=g++", "TESTS="]
    make += [f"VENV_PYTHON={sys.executable}", "all"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [ROOT / "build" / "simgpu" / "plain" / "count_costs"],
        input="".join(case.line() + "\n" for case in cases),
        env=os.environ | {"CP_TEST_DEADLINE": str(timeout)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"count_costs failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def row_of_ours(case, count):
    """Our counts by the names that both sides have. Beyond q, k, v and out a backward needs the lse of the forward."""
    attention = count["attend"] + count["grad"]
    return count | {
        "attention": attention,
        "other": count["launches"] + count["copies"] + count["memsets"] - attention,
        "written_bytes": sum(value for name, value in count.items() if name in WRITTEN),
        "exchanges": count["groups"],
        "host_exchanges": count["exchanges"],
        "transient_bytes": count["workspace_bytes"],
        "kept_bytes": 4 * case.rows[0] * case.heads if case.op == "backward" else 0,
    }


def count_theirs(case, backend):
    """diffusers' counts; None where it has no such call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that torch will rename
        from . import upstream_costs

        count = upstream_costs.count(case, backend)
    return count and count | {"host_exchanges": 0}


def rows_of(cases, backends, timeout):
    """A row for each case and side."""
    for case, ours in zip(cases, count_ours(cases, timeout), strict=True):
        theirs = {f"diffusers, `{backend}`": count_theirs(case, backend) for backend in backends}
        for side, count in (theirs | {OURS: row_of_ours(case, ours)}).items():
            yield asdict(case) | {"side": side, "has_call": count is not None} | (count or {})


def mib(name):
    return lambda row: f"{row[name] / MIB:.2f}"


COLUMNS = {
    "attention launches": lambda row: row["attention"],
    "other launches": lambda row: row["other"],
    "written MiB": mib("written_bytes"),
    "exchanges": lambda row: row["exchanges"],
    "sent MiB": mib("sent_bytes"),
    "transient MiB": mib("transient_bytes"),
    "host waits": lambda row: row["host_waits"],
    "host exchanges": lambda row: row["host_exchanges"],
}
BACKWARD_COLUMNS = COLUMNS | {"kept MiB": mib("kept_bytes")}


def print_table(rows):
    """Markdown. The first line of a variant has its name, ring degree and Ulysses degree."""
    columns, last = BACKWARD_COLUMNS if rows[0]["op"] == "backward" else COLUMNS, None
    print("| variant | side |", " | ".join(columns), "|")
    print("|---|---|" + "---:|" * len(columns))
    for row in rows:
        if row["has_call"]:
            name = f"{row['variant']}, {row['ring']} x {row['ulysses']}"
            cells = [name if name != last else "", row["side"], *(cell(row) for cell in columns.values())]
            print("|", " | ".join(map(str, cells)), "|")
            last = name
    print()


def print_tables(rows):
    titles = {"attention": "Forward", "backward": "Backward"}
    for op, shape in dict.fromkeys((row["op"], row["shape"]) for row in rows):
        print(f"{titles[op]}, {shape}:\n")
        print_table([row for row in rows if (row["op"], row["shape"]) == (op, shape)])


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_costs", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, action="append", help="may be repeated; default: all")
    add("--op", choices=("attention", "backward"), action="append", help="may be repeated; default: both")
    add("--backend", choices=BACKENDS, action="append", help="of diffusers; default: both")
    add("--timeout", type=int, default=300, help="seconds for our side; default 300")
    add("--check", action="store_true", help="fail where a warm call of ours waits for the device or allocates")
    add("--json", type=Path, metavar="FILE", help="also write one JSON line per row, with all counts")
    return parser.parse_args()


def main():
    args = parse_arguments()
    import diffusers
    import torch

    machine = f"{processor()}, Linux {platform.release()}; no GPU is used"
    about = provenance(
        "gpu_costs",
        machine=machine,
        versions=f"diffusers {diffusers.__version__}, torch {torch.__version__.split('+')[0]}",
    )
    print("\n".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
    ops, names = args.op or ("attention", "backward"), args.model or MODELS
    cases = [case for op in ops for name in names for case in cases_of(MODELS[name], op)]
    rows = list(rows_of(cases, args.backend or BACKENDS, args.timeout))
    print_tables(rows)
    ours = [row for row in rows if row["side"] == OURS]
    waits = sum(row["host_waits"] for row in ours)
    allocations = sum(row["allocations"] + row["host_allocations"] for row in ours)
    print(f"{OURS}: {waits} host waits for the device, {allocations} allocations in {len(ours)} warm calls")
    if args.json:
        args.json.write_text("".join(json.dumps({**row, **about}) + "\n" for row in rows))
    return int(args.check and waits + allocations > 0)


if __name__ == "__main__":
    sys.exit(main())
