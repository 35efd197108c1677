"""What runs under valgrind: thread ranks, then a rank whose peer is a process outside, through calls right and wrong.

NumPy only: what torch does costs minutes under valgrind, and no line of the extension is reached by torch alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "py"))
from thread_ranks import Ranks, oracle  # noqa: E402

import cp_attn  # noqa: E402
from cp_attn import _C  # noqa: E402

VARIANTS = (
    (2, dict(ring_degree=2)),
    (2, dict(ulysses_degree=2)),
    (3, dict(ring_degree=3, ring_anything=True)),
    (3, dict(ulysses_degree=3, ulysses_anything=True)),
    (4, dict(ring_degree=2, ulysses_degree=2, unified_anything=True)),
)
CALLS = (
    dict(),
    dict(is_causal=True, scale=0.3),
    dict(kv_heads=2, mask="bool"),
    dict(mask="add", dtype="float64"),
    dict(dtype="float16", kv="replicated"),
)
ROUNDS = 2  # with new signatures, then with known ones
TOLERANCE = {"float16": 1e-2, "float32": 1e-5, "float64": 1e-12}


def lengths(context):
    """Return the rows of every rank: 5 each, or 3, 4, 5, ... where the variant takes any."""
    config, world = context.config, context.world_size
    is_any = config.ring_anything or config.ulysses_anything or config.unified_anything
    return [3 + rank if is_any else 5 for rank in range(world)]


def attend(context, mask=None, kv_heads=6, dtype="float32", kv="sharded", **keywords):
    """Call forward, backward, gather and shard, and look at every number that comes out."""
    rng, rows = np.random.default_rng(1), lengths(context)
    first, s = sum(rows[: context.rank]), sum(rows)
    own = slice(first, first + rows[context.rank])
    q, k, v, dout = (rng.standard_normal((2, s, heads, 8)).astype(dtype) for heads in (6, kv_heads, kv_heads, 6))
    bits = rng.random((1, 1, s, s)) < 0.7
    whole = {None: None, "bool": bits, "add": np.where(bits, 0.5, -1e4).astype(dtype)}[mask]
    want, _ = oracle(q, k, v, whole, **keywords)
    keys = slice(None) if kv == "replicated" else own
    mine = q[:, own], k[:, keys], v[:, keys]
    keywords = dict(keywords, attn_mask=whole, enable_gqa=True, kv=kv)
    out, lse = cp_attn.attention(*mine, context, return_lse=True, **keywords)
    assert np.abs(out - want[:, own]).max() < TOLERANCE[dtype]
    flags = *map(keywords.get, ("is_causal", "scale")), True, kv, "native"
    grads = _C._attention_backward(context, *mine, out, lse, dout[:, own], lse, whole, *flags)
    assert all(np.isfinite(grad).all() for grad in grads) and np.isfinite(lse).all()
    assert np.array_equal(context.gather(out, 1)[:, own], out)
    assert np.isfinite(context.shard(q[..., ::2].transpose(0, 1, 3, 2), 1)).all()
    assert np.isfinite(context._reduce_scatter(q, 1, rows[context.rank])).all()
    assert np.array_equal(np.from_dlpack(context.gather(Foreign(lse), 1))[:, own], lse)


def wrong(context):
    """Call with what is refused: on all ranks, on the last rank alone, and as another call than the others'."""
    x, is_last = np.ones((1, 5, 6, 8), np.float32), context.rank == context.world_size - 1
    calls = (
        lambda: cp_attn.attention(x, x, "v", context),
        lambda: cp_attn.attention(x, x, x[..., None], context),
        lambda: cp_attn.attention(x, x, x, context, attn_mask=np.ones((1, 3), bool), seq_lens=[5, "5"]),
        lambda: cp_attn.attention(x, x, x, context, scale=float("nan")),
        lambda: cp_attn.attention(x, Foreign(), x, context),
        lambda: context.gather(x, 9),
        lambda: context.shard(x, "dim"),
        lambda: context.agree(KeyError("of a rank alone")),
    )
    for call in calls:
        raises((TypeError, ValueError, KeyError, IndexError), call)
        raises((TypeError, ValueError, KeyError, IndexError), call if is_last else lambda: context.agree())
    raises(ValueError, lambda: context.agree(None, "last" if is_last else "first"))


class Foreign:
    """An array of a library that the extension does not know; or none, whose reading raises."""

    def __init__(self, array=None):
        self.array = array

    def __dlpack__(self, **keywords):
        if self.array is None:
            raise ValueError("no array today")
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return (1, 0)


def raises(kinds, call):
    try:
        call()
    except kinds:
        return
    raise AssertionError(f"no {kinds}")


def play(context):
    """Make a rank's calls, which are those of every rank."""
    for _ in range(ROUNDS):
        for call in CALLS:
            attend(context, **call)
        wrong(context)
    context.close()
    raises(RuntimeError, context.agree)


def thread_ranks():
    for isa in ("", "generic"):
        os.environ["CP_ATTN_ISA"] = isa
        for world, config in VARIANTS:
            with Ranks(world, timeout=300.0, **config) as ranks:
                ranks.run(lambda rank, ranks=ranks: play(ranks.contexts[rank]))


def without_memory():
    """Every allocation of a first call fails once; then a rank is gone."""
    x, failed = np.ones((1, 4, 6, 8), np.float32), True
    count = 0
    while failed:
        with Ranks(2, timeout=300.0, ring_degree=2) as ranks:
            _C._mem_fail_after(count)
            failed = any(ranks.errors(lambda rank, ranks=ranks: cp_attn.attention(x, x, x, ranks.contexts[rank])))
            _C._mem_fail_after(-1)
            count += 1
            if not failed:
                ranks.contexts[1].close()
                raises(cp_attn.CommError, lambda ranks=ranks: cp_attn.attention(x, x, x, ranks.contexts[0]))
    assert count > 2


def process_rank(rank, key):
    config = cp_attn.ContextParallelConfig(ring_degree=2, ring_anything=True, timeout=300.0)
    play(_C.Context(config, rank=rank, world=2, key=key))


def main():
    if len(sys.argv) > 1:
        return process_rank(1, sys.argv[1])
    thread_ranks()
    without_memory()
    key = f"valgrind {os.getpid()}"
    peer = subprocess.Popen([sys.executable, __file__, key])
    process_rank(0, key)
    assert peer.wait() == 0
    print("played to the end")


if __name__ == "__main__":
    main()
