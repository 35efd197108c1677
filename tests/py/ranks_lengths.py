"""One rank: the lengths that models say of their attention calls, as in a graph, beside those that the ranks have.

Usage: ranks_lengths.py CONFIG EVENNESS MODEL...     CONFIG is JSON, EVENNESS even or uneven
"""

import json
import sys
import traceback
import warnings

import torch
from launch import say
from ranks_models import difference
from tiny_models import make, tensors

import cp_attn
from cp_attn import _C, _lengths

attention = _C.attention
calls = []


def watched(q, k, v, context, **more):
    """Answer the call, whose lengths all ranks compare with their records, after a look what they are."""
    own = torch.tensor([[q.shape[1], k.shape[1]]])
    ranks = context.gather(own, 0).T.tolist()
    given = [more.get("seq_lens"), more.get("kv_lens")]
    calls.append("right" if given == ranks else "none" if given == [None, None] else f"{given}, not {ranks}")
    return attention(q, k, v, context, **more)


def play(name, config, uneven):
    model, inputs = make(name, uneven)
    alone = tensors(model(**inputs))
    cp_attn.enable_parallelism(model, config)
    calls.clear()
    worst = difference(tensors(model(**inputs)), alone)
    cp_attn.disable_parallelism(model)
    return dict(difference=worst, calls=sorted(set(calls)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore", "cp_attn: parameter 'timestep'")
    _lengths.is_captured = lambda x: True
    _C.attention = watched
    config, evenness, *names = sys.argv[1:]
    config = cp_attn.ContextParallelConfig(**json.loads(config), timeout=60.0)
    for name in names:
        try:
            say(model=name, failed=None, **play(name, config, evenness == "uneven"))
        except Exception:
            say(model=name, failed=traceback.format_exc()[-2500:])
