"""Context-parallel attention as diffusers' documentation tables it: time, memory, speed-up and efficiency.

``torchrun --nproc-per-node 2 -m benchmarks.table --peers`` times all ways to share the attention of FLUX and Wan
among the ranks, beside torch's attention, diffusers' context parallelism and a ring in torch.distributed. The rows
take turns, the slowest rank counts, medians are shown. No row is timed before its answers agree with torch's. On a
CPU models are scaled down to fewer heads and one layer; the tables say so. ``--combine`` puts runs on several numbers
of ranks together.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from . import plot, report, where
from .device import DEVICES
from .judge import TOLERANCE
from .measure import measure
from .provenance import provenance
from .rows import BACKENDS, rows_of
from .shapes import FLUX, FLUX_UNEVEN, WAN, scaled

SHAPES = {"1024x1024": FLUX, "1008x1008": FLUX_UNEVEN, "480p": WAN}


def shapes_of(args):
    names = args.shape or ([] if args.tokens else list(SHAPES))
    asked = [SHAPES[name] for name in names]
    return asked + [replace(FLUX, picture=f"{count} tokens", tokens=count) for count in args.tokens or []]


def scale(shape, args, device, world):
    """By default the device's number of heads, made a multiple of the ranks, so that all backends can run."""
    heads = args.heads or -(-device.heads.get(shape.model, shape.heads) // world) * world
    return scaled(shape, heads, args.layers or device.layers or shape.layers, args.dim or shape.dim)


def about_run(args, device, world):
    about = {
        "machine": device.machine(),
        "ranks": f"{world}, each on one {'thread' if device.kind == 'cpu' else 'GPU'}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "versions": f"torch {torch.__version__}",
        "isa": os.environ.get("CP_ATTN_ISA") or "the best one",
    }
    if args.peers:
        import diffusers

        about["versions"] += f", diffusers {diffusers.__version__} ({device.diffusers_patch})"
    command = f"torchrun --nproc-per-node {world} -m benchmarks.table {' '.join(sys.argv[1:])}"
    return provenance("table", **about) | {"command": command.strip()}


def run(args):
    """Measure on this job's ranks: (the run, as it is kept, whether a row of ours was wrong)."""
    device = DEVICES[args.device]()
    args.dtype = args.dtype or device.dtype
    dist.init_process_group(device.backend)
    world, rank = dist.get_world_size(), dist.get_rank()
    warnings.simplefilter("ignore", FutureWarning)  # of names in diffusers that torch will rename
    shapes = [scale(shape, args, device, world) for shape in shapes_of(args)]
    result, is_wrong = {"about": about_run(args, device, world), "rows": [], "where": []}, False
    count = len(shapes) * len(rows_of(args.backend, args.peers, device, world)) * (1 + args.steps)
    with tqdm(total=count, disable=rank != 0, leave=False) as progress:
        for shape in shapes:
            problem, rows, is_one_wrong = measure(shape, args, device, progress)
            result["rows"] += rows
            is_wrong = is_wrong or is_one_wrong
            for slow in ([None] if args.where else []) + ([args.slow] if args.slow else []):
                progress.set_description(f"{shape.name}, where")
                result["where"] += where.locate(rows, shape, problem, args, device, slow)
    dist.barrier()
    dist.destroy_process_group()
    return result, is_wrong


def slow_of(text):
    """RANK:MS"""
    rank, _, ms = text.partition(":")
    try:
        return int(rank), float(ms)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK:MILLISECONDS, for example 1:50") from None


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def tokens_of(text):
    """N,N,..."""
    return [positive(part) for part in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="benchmarks.table",
        usage="torchrun --nproc-per-node N -m benchmarks.table [options]\n"
        "       python -m benchmarks.table --combine FILE [FILE ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is run")
    add = what.add_argument
    add("--shape", choices=SHAPES, action="append", help="may be repeated; default: all three")
    add("--tokens", type=tokens_of, metavar="N,N,...", help="instead, or as well: FLUX with so many tokens")
    add("--backend", choices=BACKENDS, action="append", help="a row, by its name; may be repeated; default: all six")
    add("--peers", action="store_true", help="rows of torch, diffusers and torch.distributed beside ours")
    add("--backward", action="store_true", help="the gradients of q, k and v as well")
    add("--device", choices=DEVICES, default="cpu", help="default cpu")
    add("--dtype", choices=TOLERANCE, help="default float32; on cuda bfloat16")
    add("--heads", type=positive, help="default on a CPU 4 of FLUX's and 2 of Wan's, or one a rank; on cuda all")
    add("--dim", type=positive, help="head dim; default the model's, 128")
    add("--layers", type=positive, help="calls a step; default on a CPU 1, on cuda one for each layer of the model")
    add("--steps", type=positive, default=3, help="measured steps of each row, the rows taking turns; default 3")
    where_group = parser.add_argument_group("where the time goes")
    add = where_group.add_argument
    add("--where", action="store_true", help="waits, packing, transfer, compute, merge of each rank, on one host")
    add("--slow", type=slow_of, metavar="RANK:MS", help="the same with one rank that sleeps before each call")
    add("--cc", default=os.environ.get("CC", "cc"), help="C compiler for the schedule's counts; default $CC or cc")
    out = parser.add_argument_group("what becomes of it")
    add = out.add_argument
    add("--json", type=Path, metavar="FILE", help="keep the figures")
    add("--plot", type=Path, metavar="FILE", help="a PNG of time and memory against tokens and ranks")
    add("--markdown", type=Path, metavar="FILE", help="put the tables between the two marks of a page")
    add("--picture", type=Path, metavar="FILE", help="with --markdown: a picture that the page shows above the tables")
    add("--combine", type=Path, nargs="+", metavar="FILE", help="run nothing: take these JSON files together")
    args = parser.parse_args()
    args.backend = [name for name in BACKENDS if name in (args.backend or BACKENDS)]
    world = int(os.environ.get("WORLD_SIZE", 0))
    if not args.combine and world < 2:
        parser.error("start it with torchrun on 2 or more ranks, or give --combine")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    if args.slow and not args.combine and not 0 <= args.slow[0] < world:
        parser.error(f"--slow {args.slow[0]}:{args.slow[1]:g}: there are ranks 0 to {world - 1}")
    return args


def main():
    args = parse_arguments()
    if args.combine:
        runs, is_wrong = [one for file in args.combine for one in json.loads(file.read_text())["runs"]], False
    else:
        one, is_wrong = run(args)
        runs = [one]
    if args.combine or os.environ["RANK"] == "0":
        print("\n".join(report.lines_of(runs)))
        if args.json:
            args.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        if args.plot:
            plot.plot(args.plot, runs)
        if args.markdown:
            report.fill(args.markdown, runs, args.picture)
    if is_wrong:
        print("a row of cp_attn computes something else", file=sys.stderr)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
