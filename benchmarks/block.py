"""What parallelism costs a whole block of FLUX that has few tokens.

``torchrun --nproc-per-node 2 -m benchmarks.block`` alternates FLUX's transformer with one double block: unsplit on one
core, once with all tokens and once with one rank's share of them, and split among the ranks by
`cp_attn.enable_parallelism`. What every rank does alike (the embedding of the time, the modulation) is not divided by
the ranks; a share of the tokens on one core has it too, and so is what the split block is to be held against.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
from tqdm import tqdm

import cp_attn

from .device import Cpu
from .judge import gathered
from .provenance import provenance
from .rows import config_of

LIMIT = 1.05  # of the share's time on one core
TOLERANCE = 1e-4  # of the largest element: the rounding of float32, in another order


def flux(heads):
    """FLUX.1's transformer, as wide as `heads` of its 24 make it, with one double block and random weights."""
    torch.manual_seed(0)
    sizes = dict(num_layers=1, num_single_layers=0, num_attention_heads=heads, attention_head_dim=128)
    return diffusers.FluxTransformer2DModel(**sizes, guidance_embeds=True).eval()


def inputs_of(tokens, text):
    """A picture and a text that have `tokens` rows together."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*size):
        return torch.randn(size, generator=generator)

    picture = tokens - text
    return dict(
        hidden_states=randn(1, picture, 64),
        encoder_hidden_states=randn(1, text, 4096),
        pooled_projections=randn(1, 768),
        img_ids=randn(picture, 3),
        txt_ids=randn(text, 3),
        timestep=torch.tensor([0.7]),
        guidance=torch.tensor([3.5]),
        return_dict=False,
    )


class Sides:
    """The same model, unsplit and split, on every rank."""

    def __init__(self, heads, backend, tokens, world):
        text = tokens // 4
        self.device, self.world = Cpu(), world
        self.config = config_of(cp_attn.ContextParallelConfig, backend, world)
        self.alone, self.split = flux(heads), flux(heads)
        self.all, self.share = inputs_of(tokens, text), inputs_of(tokens // world, text // world)
        cp_attn.enable_parallelism(self.split, self.config)

    @torch.no_grad()
    def error(self):
        """How far the split model's answer is from the unsplit one's, relative to its largest element."""
        wanted, got = self.alone(**self.all)[0], self.split(**self.all)[0]
        return max(gathered(((got - wanted).abs().max() / wanted.abs().max()).item()))

    @torch.no_grad()
    def seconds(self, name):
        """Of one side; the slowest rank counts. One rank computes what is unsplit, the others sleep."""
        dist.barrier()
        taken = 0.0
        if name == "split":
            taken = self.device.seconds(lambda: self.split(**self.all))
        elif dist.get_rank() == 0:
            taken = self.device.seconds(lambda: self.alone(**(self.all if name == "whole" else self.share)))
        return max(gathered(taken))

    def close(self):
        cp_attn.disable_parallelism(self.split)


def measure(heads, backend, args, progress):
    """One row: medians of the three sides, in milliseconds."""
    sides = Sides(heads, backend, args.tokens, dist.get_world_size())
    error, names = sides.error(), ("whole", "share", "split")
    taken = {name: [] for name in names}
    for name in names:
        sides.seconds(name)
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(sides.seconds(name))
            progress.update()
    sides.close()
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()}
    ratios = sorted(split / share for split, share in zip(taken["split"], taken["share"], strict=True))
    facts = {"heads": heads, "backend": backend, "tokens": args.tokens, "error": error}
    return facts | ms | {"of_share": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}


def lines_of(rows, world):
    yield f"| heads | | unsplit, ms | / {world} | a share, ms | split, ms | split / share | spread |"
    yield "|---:|---|---:|---:|---:|---:|---:|---|"
    for row in rows:
        yield (
            f"| {row['heads']} | {row['backend']} | {row['whole']:.2f} | {row['whole'] / world:.2f} | "
            f"{row['share']:.2f} | {row['split']:.2f} | {row['of_share']:.2f} | "
            f"{row['least']:.2f} to {row['most']:.2f} |"
        )


def problems(rows, is_checked):
    for row in rows:
        name = f"{row['backend']}, {row['heads']} heads"
        if row["error"] > TOLERANCE:
            yield f"{name}: wrong by {row['error']:.1e}"
        if is_checked and row["of_share"] > LIMIT:
            yield f"{name}: {row['of_share']:.2f} of a share's time, limit {LIMIT}"


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="benchmarks.block",
        usage="torchrun --nproc-per-node N -m benchmarks.block [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=256, help="picture and text together, a quarter of them text; default 256")
    add("--heads", type=int, action="append", help="how wide the model is; may be repeated; default 4, and FLUX's 24")
    add("--backend", choices=("ring", "ulysses"), action="append", help="may be repeated; default both")
    add("--rounds", type=int, default=15, help="times all sides alternate; default 15")
    add("--check", action="store_true", help=f"fail where a median is above {LIMIT} of the share's")
    add("--json", type=Path, metavar="FILE", help="also write one JSON line per row of the table")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 0))
    if world < 2:
        parser.error("start it with torchrun on 2 or more ranks")
    if args.tokens < 4 * world or args.tokens % (4 * world) != 0:
        parser.error(f"--tokens {args.tokens}: a quarter is text, so {world} ranks need a multiple of {4 * world}")
    return args


def main():
    args = parse_arguments()
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    jobs = [(heads, backend) for heads in args.heads or (4, 24) for backend in args.backend or ("ring", "ulysses")]
    about = provenance("block", machine=Cpu().machine(), versions=f"torch {torch.__version__}")
    about["command"] = f"torchrun --nproc-per-node {world} -m benchmarks.block {' '.join(sys.argv[1:])}".strip()
    with tqdm(total=len(jobs) * args.rounds * 3, disable=rank != 0, leave=False) as progress:
        rows = [measure(*job, args, progress) for job in jobs]
    dist.destroy_process_group()
    if rank == 0:
        print(*(f"{key}: {value}" for key, value in about.items()), "", *lines_of(rows, world), sep="\n")
        if args.json:
            args.json.write_text("".join(json.dumps(row | about) + "\n" for row in rows))
    bad = list(problems(rows, args.check))
    if bad and rank == 0:
        print("\n".join(bad), file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
