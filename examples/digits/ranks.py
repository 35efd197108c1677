"""What training and drawing share when several ranks do it: their options, and a rank's part of the cores."""

import os

import torch

import cp_attn


def parse(parser):
    """Add the options of context parallelism, parse, and return the arguments and the config; None for one process."""
    group = parser.add_argument_group("context parallelism", "how the ranks that torchrun starts share each sequence")
    group.add_argument("--ring-degree", type=int, help="ranks in a ring")
    group.add_argument("--ulysses-degree", type=int, help="ranks in an all-to-all group")
    group.add_argument("--ring-anything", action="store_true", help="ring, any sequence length")
    group.add_argument("--ulysses-anything", action="store_true", help="Ulysses, any sequence length and head count")
    group.add_argument("--unified-anything", action="store_true", help="both, any sequence length and head count")
    args = parser.parse_args()
    if args.steps < 1:  # both programs have it
        parser.error(f"--steps is {args.steps}; at least one is needed")
    fields = ("ring_degree", "ulysses_degree", "ring_anything", "ulysses_anything", "unified_anything")
    flags = {field: getattr(args, field) for field in fields if getattr(args, field)}
    if "RANK" not in os.environ:
        if flags:
            launch = f"torchrun --nproc-per-node=N {parser.prog} ..., N = ring x ulysses degree"
            parser.error(f"the options of context parallelism need ranks: {launch}")
        return args, None
    if not flags:
        parser.error("torchrun started ranks, but neither --ring-degree nor --ulysses-degree says how to use them")
    try:
        return args, cp_attn.ContextParallelConfig(**flags)
    except ValueError as error:
        parser.error(str(error))


def take_share_of_cores():
    """Let torch use as many threads as this rank has cores of its own; torchrun would leave it one."""
    cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, cores // ranks))
