"""One rank: models compiled with mode="reduce-overhead", which captures CUDA graphs, and uneven ones, captured as they
are. A JSON line for each model.

Usage: ranks_compiled.py VARIANT     VARIANT is a key of variants(world)
"""

import os
import sys
import traceback

import torch
from grid import variants
from launch import say
from ranks_graphs import capture
from tiny_models import make, tensors

import cp_attn

WORLD, CALLS = int(os.environ["WORLD_SIZE"]), 5


def to_gpu(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


@torch.no_grad()
def play(name, config):
    """Warm-up, recording, replays; with other numbers each time, against the model without ranks."""
    model, given, want = prepared(name, False)
    cp_attn.enable_parallelism(model, cp_attn.ContextParallelConfig(timeout=60.0, **config))
    compiled = torch.compile(model, mode="reduce-overhead")
    for call in range(CALLS):
        torch.compiler.cudagraph_mark_step_begin()
        compare(compiled(**given[call]), want[call])


@torch.no_grad()
def play_uneven(name, config):
    """A capture of the whole forward, launched with other numbers."""
    model, given, want = prepared(name, True)
    cp_attn.enable_parallelism(model, cp_attn.ContextParallelConfig(timeout=60.0, **config))
    inputs = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in given[0].items()}
    graph, outs = capture(lambda: model(**inputs))
    for call in range(CALLS):
        for key, x in given[call].items():
            if isinstance(x, torch.Tensor):
                inputs[key].copy_(x)
        graph.replay()
        compare(outs, want[call])


def prepared(name, uneven):
    """Return a model, inputs for some calls, and what it answers to them alone."""
    model, inputs = make(name, uneven)
    model = model.cuda()
    inputs = {key: to_gpu(x) for key, x in inputs.items()}
    first = next(key for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point())
    given = [inputs | {first: inputs[first] * (1 + 0.1 * call)} for call in range(CALLS)]
    return model, given, [tensors(model(**x)) for x in given]


def compare(outputs, want):
    for mine, alone in zip(tensors(outputs), want, strict=True):
        torch.testing.assert_close(mine, alone, atol=1e-4, rtol=1e-4)


def main(variant):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    function = play_uneven if "anything" in variant else play
    for name in ("flux", "wan"):
        failed = None
        try:
            function(name, variants(WORLD)[variant])
        except Exception:
            failed = traceback.format_exc()
        say(case=name, failed=failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
