"""One rank: models compiled with mode="reduce-overhead", which captures CUDA graphs. A JSON line for each model.

Usage: ranks_compiled.py VARIANT     VARIANT is a key of variants(world)
"""

import os
import sys
import traceback

import torch
from grid import variants
from launch import say
from tiny_models import make, tensors

import cp_attn

WORLD, CALLS = int(os.environ["WORLD_SIZE"]), 5


def to_gpu(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


@torch.no_grad()
def play(name, config):
    """Warm-up, recording, replays; with other numbers each time, against the model without ranks."""
    model, inputs = make(name)
    model = model.cuda()
    inputs = {key: to_gpu(x) for key, x in inputs.items()}
    first = next(key for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point())
    given = [inputs | {first: inputs[first] * (1 + 0.1 * call)} for call in range(CALLS)]
    want = [tensors(model(**x)) for x in given]
    cp_attn.enable_parallelism(model, cp_attn.ContextParallelConfig(timeout=60.0, **config))
    compiled = torch.compile(model, mode="reduce-overhead")
    for call in range(CALLS):
        torch.compiler.cudagraph_mark_step_begin()
        for mine, alone in zip(tensors(compiled(**given[call])), want[call], strict=True):
            torch.testing.assert_close(mine, alone, atol=1e-4, rtol=1e-4)


def main(variant):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for name in ("flux", "wan"):
        failed = None
        try:
            play(name, variants(WORLD)[variant])
        except Exception:
            failed = traceback.format_exc()
        say(case=name, failed=failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
