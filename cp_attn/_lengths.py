"""The lengths that all ranks have of a model's queries and keys, as the model's streams tell them.

A call that is captured in a CUDA graph has to say them where they may differ. No other call does: what a model attends
to may be none of its streams (keys kept from an earlier forward), and where their rows look like a stream's on one rank
alone the ranks would promise different lengths, and a model that works would raise. In a graph nothing is lost: without
lengths such a call is refused, and wrong ones are refused by all ranks.
"""

from itertools import combinations

import torch

from ._torch import part


def arguments(q, k, context, streams):
    """Return `seq_lens` and `kv_lens` for a call of attention that is captured; nothing where they are not known.

    `streams` are those of the model's forward, or None where lengths may not differ.
    """
    if streams is None or not is_captured(q):
        return {}
    known = _known(*streams.sizes(), context.world_size)
    found = [_like(x.shape[1], context.rank, known) for x in (q, k)]
    return {} if None in found else dict(zip(("seq_lens", "kv_lens"), found, strict=True))


def is_captured(x):
    """Return whether what is enqueued now for a tensor becomes part of a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _known(cut, whole, world):
    """Return the ranks' lengths, a tuple, of each choice of one to four streams joined, all cut or all whole."""
    shares = {tuple([part(size, rank, world)[1] for rank in range(world)]) for size in cut}
    return _sums(shares) | _sums({(size,) * world for size in whole})


def _sums(streams):
    choices = [chosen for count in range(1, 5) for chosen in combinations(streams, count)]
    return {tuple(map(sum, zip(*chosen, strict=True))) for chosen in choices}


def _like(rows, rank, known):
    """Return the lengths of which this rank has `rows`, if no others have as many on any rank: so all say the same."""
    for lengths in known:
        if lengths[rank] == rows and not any(_meet(lengths, others) for others in known - {lengths}):
            return list(lengths)
    return None


def _meet(lengths, others):
    return any(a == b for a, b in zip(lengths, others, strict=True))
