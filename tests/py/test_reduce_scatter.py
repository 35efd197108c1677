"""The gradient of a gather: every rank gets its own rows of the sum of what all ranks have."""

import numpy as np
import pytest
from thread_ranks import Ranks, cut

from cp_attn import _C

WORLDS = {
    "ring2": (2, dict(ring_degree=2)),
    "ulysses3": (3, dict(ulysses_degree=3)),
    "unified2x2": (4, dict(ring_degree=2, ulysses_degree=2)),
}


def start(name="ring2"):
    world, config = WORLDS[name]
    return Ranks(world, **config)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_equal_to_numpy(name, dtype):
    rng = np.random.default_rng(1)
    with start(name) as ranks:
        for lengths in ([2, 3, 1, 4], [0, 5, 0, 2], [3, 0, 0, 0]):
            lengths = lengths[: ranks.world]
            for dim in (0, 1, -1):
                shape = [4, 3, 2]
                shape[dim] = sum(lengths)
                given = [rng.integers(-8, 8, shape).astype(dtype) for _ in lengths]
                want = cut(sum(x.astype("float64") for x in given), lengths, dim)
                got = ranks.run(
                    lambda r, given=given, dim=dim, lengths=lengths: ranks.contexts[r]._reduce_scatter(
                        given[r], dim, lengths[r]
                    )
                )
                for a, b in zip(got, want, strict=True):
                    assert a.dtype == dtype and a.shape == b.shape and np.array_equal(a, b)


def test_sums_are_kept_in_more_bits_and_in_one_order():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(2)
    with start("ulysses3") as ranks:
        for dtype in (torch.bfloat16, torch.float16):
            given = [torch.randn(2, 7, 5, generator=generator).to(dtype) for _ in range(3)]
            want = ((given[0].float() + given[1].float()) + given[2].float()).to(dtype)
            for _ in range(5):
                got = ranks.run(lambda r, given=given: ranks.contexts[r]._reduce_scatter(given[r], 1, (3, 0, 4)[r]))
                assert torch.equal(torch.cat(got, 1), want)


def test_any_strides():
    torch = pytest.importorskip("torch")
    with start() as ranks:
        x = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
        for view in (x.permute(2, 1, 0), x[::2, :, 1:4], x[:1].expand(3, 6, 5), torch.ones(()).expand(2, 6, 2)):
            got = ranks.run(lambda r, view=view: ranks.contexts[r]._reduce_scatter(view * (r + 1), 1, 3))
            assert torch.equal(torch.cat(got, 1), 3 * view)
            got = ranks.run(lambda r, view=view: ranks.contexts[r]._reduce_scatter(view, 1, 3))
            assert torch.equal(torch.cat(got, 1), 2 * view)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (lambda r: (np.ones((2, 6)), 1, 3 + r), ValueError, ["6 rows", "dim 1", "7 together"]),
        (lambda r: (np.ones((2, 6)), 1, -1 if r else 7), ValueError, ["rank 1", "rows=-1"]),
        (lambda r: (np.ones((2, 6)), 1, 2**70), ValueError, ["rows="]),
        (lambda r: (np.ones((2, 6)), 1, "3"), TypeError, ["str"]),
        (lambda r: (np.ones((2, 6)), 2, 3), ValueError, ["dim=2"]),
        (lambda r: (np.ones((2, 6), "int32"), 1, 3), TypeError, ["int32", "float32"]),
        (lambda r: (np.ones((2, 6 + r)), 1, 3), ValueError, ["rank 1", "shape"]),
        (lambda r: (np.ones((2, 6), "float32" if r else "float64"), 1, 3), TypeError, ["rank 1", "dtype"]),
        (lambda r: (np.ones((2, 6)), 1), TypeError, ["'rows'"]),
    ],
)
def test_errors(arguments, error, words):
    """Found before data moves, on all ranks, and the context stays usable."""
    with start() as ranks:
        for caught in ranks.errors(lambda r: ranks.contexts[r]._reduce_scatter(*arguments(r))):
            assert isinstance(caught, error)
            assert any(all(w in text for w in words) for text in (str(caught), f"rank 1: {caught}")), caught
        got = ranks.run(lambda r: ranks.contexts[r]._reduce_scatter(np.ones((2, 6)), 1, 3))
        assert all(np.array_equal(x, np.full((2, 3), 2.0)) for x in got)


def test_a_steady_call_allocates_nothing():
    with start("unified2x2") as ranks:
        x = np.ones((2, 8, 3), np.float32)

        def call(r):
            for _ in range(5):
                ranks.contexts[r]._reduce_scatter(x, 1, 2)

        ranks.run(call)
        before = _C._mem_stats()
        ranks.run(call)
        assert _C._mem_stats() == before
