"""JAX arrays in and out, as a process of its own: JAX starts threads and warns of every fork after that.

`test_dlpack.py` runs it. JAX arrays are read-only and may be bfloat16; the answer is a JAX array again.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from thread_ranks import Ranks, oracle

from cp_attn import _C

jax.config.update("jax_enable_x64", True)
SHAPE = (2, 6, 4, 8)
# what a result may be away from float64
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 3e-3, "bfloat16": 3e-2}


def numbers(dtype, *shape):
    return [jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype) for seed in range(3)]


def halves(x):
    return [x[:, : SHAPE[1] // 2], x[:, SHAPE[1] // 2 :]]


def attend(ranks, q, k, v, **keywords):
    return ranks.attention(halves(q), halves(k), halves(v), **keywords)


def wide(x):
    return np.asarray(x).astype(np.float64)


def main():
    for config in ({"ring_degree": 2}, {"ulysses_degree": 2}):
        with Ranks(2, **config) as ranks:
            for dtype, tolerance in TOLERANCE.items():
                q, k, v = numbers(dtype, *SHAPE)
                want = oracle(*map(wide, (q, k, v)))
                outs, lses = zip(*attend(ranks, q, k, v, return_lse=True), strict=True)
                assert all(isinstance(x, jax.Array) and x.dtype == q.dtype for x in outs)
                assert all(isinstance(x, jax.Array) for x in lses)
                for got, expected in ((outs, want[0]), (lses, want[1])):
                    whole = jnp.concatenate(got, 1)
                    np.testing.assert_allclose(wide(whole), expected, atol=tolerance * 8, rtol=0)
            mask = jax.random.bernoulli(jax.random.key(9), 0.7, (2, 1, 3, 6)).at[..., 0].set(True)
            q, k, v = numbers("float32", *SHAPE)
            got = attend(ranks, q, k, v, attn_mask=mask)
            same = attend(ranks, *map(np.array, (q, k, v)), attn_mask=np.array(mask))
            assert all(np.array_equal(a, b) for a, b in zip(got, same, strict=True))
            nothing = jnp.zeros((2, 0, 4, 8), jnp.float32)
            assert ranks.attention([nothing] * 2, [nothing] * 2, [nothing] * 2)[1].shape == nothing.shape
            for caught in ranks.errors(lambda r: _C.attention(*[jnp.ones(SHAPE, "int32")] * 3, ranks.contexts[r])):
                assert type(caught) is TypeError and "int32" in str(caught), caught
            for x in (q, q.astype("bfloat16"), q.astype(bool), q.astype("int8")):
                for whole in ranks.run(lambda r, x=x: ranks.contexts[r].gather(halves(x)[r], 1)):
                    assert isinstance(whole, jax.Array) and whole.dtype == x.dtype and bool(jnp.array_equal(whole, x))
                for r, part in enumerate(ranks.run(lambda r, x=x: ranks.contexts[r].shard(x, 1))):
                    assert isinstance(part, jax.Array) and bool(jnp.array_equal(part, halves(x)[r]))

    live = _C._mem_stats()[0]
    with Ranks(2, ring_degree=2) as ranks:
        q, k, v = numbers("float32", *SHAPE)
        for _ in range(20):
            attend(ranks, q, k, v)
    assert _C._mem_stats()[0] == live, "answers are kept after JAX has given them up"
    print("jax arrays: all as they should be")


if __name__ == "__main__":
    main()
