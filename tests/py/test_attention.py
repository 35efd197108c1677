"""attention, its gradient, shard and gather against float64; the mean probes can be checked by hand."""

import collections
import itertools
import math

import numpy as np
import pytest
from launch import launch, say
from thread_ranks import Ranks, cut, oracle

import cp_attn
from cp_attn import _C

EVEN = {
    "ring2": (2, dict(ring_degree=2)),
    "ring3": (3, dict(ring_degree=3)),
    "ring3 allgather": (3, dict(ring_degree=3, rotate_method="allgather")),
    "ring3 alltoall": (3, dict(ring_degree=3, rotate_method="alltoall")),
    "ulysses2": (2, dict(ulysses_degree=2)),
    "ulysses3": (3, dict(ulysses_degree=3)),
    "unified2x2": (4, dict(ring_degree=2, ulysses_degree=2)),
}
ANYTHING = {
    "ring_anything2": (2, dict(ring_degree=2, ring_anything=True)),
    "ring_anything3": (3, dict(ring_degree=3, ring_anything=True)),
    "ulysses_anything2": (2, dict(ulysses_degree=2, ulysses_anything=True)),
    "ulysses_anything3": (3, dict(ulysses_degree=3, ulysses_anything=True)),
    "unified_anything2x2": (4, dict(ring_degree=2, ulysses_degree=2, unified_anything=True)),
}
every = pytest.mark.parametrize("variant", [*EVEN, *ANYTHING])
anything = pytest.mark.parametrize("variant", ANYTHING)


def start(variant):
    world, config = (EVEN | ANYTHING)[variant]
    return Ranks(world, **config)


def lengths_for(variant, world):
    """Return lists of local lengths: even ones, and whatever else the variant allows."""
    even = [[4] * world, [1] * world]
    return even + (
        [[3, 0, *[2] * (world - 2)], list(range(1, world + 1)), [0] * (world - 1) + [5]] if variant in ANYTHING else []
    )


def make(rng, B, s, t, H, Hkv, D, Dv, dtype="float64"):
    shapes = (B, s, H, D), (B, t, Hkv, D), (B, t, Hkv, Dv)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(ranks, q, k, v, lengths, kv_lengths=None, tolerance=1e-12, **keywords):
    """Compare every rank's rows and LSE with the oracle; masks over the whole sequence."""
    kv_lengths = kv_lengths or lengths
    wanted = {name: keywords[name] for name in ("is_causal", "scale", "mask") if name in keywords}
    want, want_lse = oracle(q, k, v, **wanted)
    if "mask" in keywords:
        keywords["attn_mask"] = keywords.pop("mask")
    got = ranks.attention(cut(q, lengths), cut(k, kv_lengths), cut(v, kv_lengths), return_lse=True, **keywords)
    out, lse = (np.concatenate(parts, 1) for parts in zip(*got, strict=True))
    assert out.shape == want.shape and out.dtype == q.dtype
    assert lse.shape == want_lse.shape and lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)


# --- against the oracle ---


@every
def test_dense(variant):
    rng = np.random.default_rng(1)
    with start(variant) as ranks:
        for lengths in lengths_for(variant, ranks.world):
            s = sum(lengths)
            for B, D, Dv in ((1, 8, 8), (2, 3, 5), (1, 65, 65), (3, 1, 1)):
                check(ranks, *make(rng, B, s, s, 6, 6, D, Dv), lengths)


@every
@pytest.mark.parametrize("dtype,tolerance", [("float64", 1e-13), ("float32", 5e-6), ("float16", 4e-3)])
def test_dtypes(variant, dtype, tolerance):
    rng = np.random.default_rng(2)
    with start(variant) as ranks:
        s = 5 * ranks.world
        check(ranks, *make(rng, 2, s, s, 6, 6, 64, 64, dtype), [5] * ranks.world, tolerance=tolerance)


@every
def test_layouts(variant):
    """Strides of every kind are read in place."""
    rng = np.random.default_rng(3)
    with start(variant) as ranks:
        s = 4 * ranks.world
        q, k, v = make(rng, 2, s, s, 6, 6, 8, 8)
        lengths = [4] * ranks.world
        want = ranks.attention(*(cut(x, lengths) for x in (q, k, v)))
        layouts = [
            lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
            lambda x: np.asfortranarray(x),
            lambda x: np.repeat(x, 2, axis=3)[..., ::2],
            lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        ]
        for a, b, c in itertools.product(layouts, repeat=3):
            got = ranks.attention(*(cut(f(x), lengths) for f, x in ((a, q), (b, k), (c, v))))
            assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))
        assert all(x.flags.c_contiguous for x in got)


@every
def test_masks(variant):
    rng = np.random.default_rng(4)
    with start(variant) as ranks:
        for lengths in lengths_for(variant, ranks.world):
            s, B, H = sum(lengths), 2, 6
            q, k, v = make(rng, B, s, s, H, H, 8, 8)
            want = {}
            for shape in ((B, H, s, s), (1, 1, s, s), (B, 1, s, s), (B, 1, 1, s), (1, H, 1, s)):
                want[shape] = rng.random(shape) > 0.4
            for shape, mask in want.items():
                check(ranks, q, k, v, lengths, mask=mask)
                check(ranks, q, k, v, lengths, mask=rng.standard_normal(shape))
                check(ranks, q, k, v, lengths, mask=rng.standard_normal(shape).astype(np.float32))
                # The rank's own rows, the rank's own keys, or both.
                rows = [mask] * ranks.world if shape[2] == 1 else cut(mask, lengths, 2)
                got = ranks.attention(*(cut(x, lengths) for x in (q, k, v)), attn_mask=rows)
                np.testing.assert_allclose(np.concatenate(got, 1), oracle(q, k, v, mask)[0], atol=1e-12)


@every
def test_masks_of_fewer_dimensions(variant):
    rng = np.random.default_rng(5)
    with start(variant) as ranks:
        lengths = lengths_for(variant, ranks.world)[-1]
        s = sum(lengths)
        q, k, v = make(rng, 2, s, s, 6, 6, 8, 8)
        parts = [cut(x, lengths) for x in (q, k, v)]
        for mask in (
            rng.random((2, s, s)) > 0.4,
            rng.random((1, s)) > 0.4,
            rng.random((2, s)) > 0.4,
            rng.random(s) > 0.4,
        ):
            full = mask[:, None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
            got = np.concatenate(ranks.attention(*parts, attn_mask=mask), 1)
            np.testing.assert_allclose(got, oracle(q, k, v, full)[0], atol=1e-12)
            if mask.ndim < 3:
                got = np.concatenate(ranks.attention(*parts, attn_mask=cut(mask, lengths, -1)), 1)
                np.testing.assert_allclose(got, oracle(q, k, v, full)[0], atol=1e-12)


@every
def test_causal_and_grouped_heads(variant):
    rng = np.random.default_rng(6)
    with start(variant) as ranks:
        for lengths in lengths_for(variant, ranks.world):
            s = sum(lengths)
            for Hkv in (1, 2, 3, 6):
                check(ranks, *make(rng, 2, s, s, 6, Hkv, 8, 8), lengths, is_causal=True, enable_gqa=True)
                check(ranks, *make(rng, 1, s, s, 6, Hkv, 8, 8), lengths, enable_gqa=True, scale=0.3)


@every
def test_cross_attention(variant):
    rng = np.random.default_rng(7)
    with start(variant) as ranks:
        lengths = lengths_for(variant, ranks.world)[-1]
        kv_lengths = [2 * n for n in lengths] if variant in EVEN else [n + r for r, n in enumerate(lengths)]
        q, k, v = make(rng, 2, sum(lengths), sum(kv_lengths), 6, 6, 8, 8)
        check(ranks, q, k, v, lengths, kv_lengths)
        check(ranks, q, k, v, lengths, kv_lengths, seq_lens=tuple(lengths), kv_lens=tuple(kv_lengths))


@every
def test_replicated_keys(variant):
    """Any query lengths, in every variant."""
    rng = np.random.default_rng(8)
    with start(variant) as ranks:
        for lengths in ([2] * ranks.world, list(range(ranks.world))):
            q, k, v = make(rng, 2, sum(lengths), 3, 6, 6, 8, 8)
            got = ranks.attention(
                cut(q, lengths), [k] * ranks.world, [v] * ranks.world, kv="replicated", seq_lens=tuple(lengths)
            )
            np.testing.assert_allclose(np.concatenate(got, 1), oracle(q, k, v)[0], atol=1e-12)


# --- probes whose answers can be worked out by hand ---


def probe(values, lengths, **keywords):
    """Return q = 0, k = 0 and these values (B, s): every row is the mean of what it may see."""
    values = np.asarray(values, np.float32)
    values = np.atleast_2d(values)
    zeros = np.zeros((*values.shape, 6, 1), np.float32)
    return [cut(x, lengths) for x in (zeros, zeros, np.broadcast_to(values[:, :, None, None], zeros.shape))]


def rows(parts, head=0):
    return np.concatenate(parts, 1)[:, :, head, 0]


@anything
def test_uneven_means(variant):  # SHP-1, SHP-3, HNG-3
    with start(variant) as ranks:
        pad = [0] * (ranks.world - 2)
        assert np.allclose(rows(ranks.attention(*probe([1, 1, 1, 2, 2], [3, 2, *pad]))), 1.4)
        got = ranks.attention(*probe([1, 2, 2, 2, 2], [1, 4, *pad]), return_lse=True)
        assert np.allclose(rows([out for out, _ in got]), 1.8)
        assert all(np.allclose(lse, math.log(5)) for _, lse in got)
        for lengths in ([4, 0, *pad], [0, 4, *pad], [*pad, 3, 1], [0, 0, *pad]):
            out = ranks.attention(*probe([1, 2, 4, 8][: sum(lengths)], lengths))
            assert [x.shape[1] for x in out] == lengths and np.allclose(rows(out), 3.75)


@every
def test_batches_do_not_mix(variant):  # SHP-2
    with start(variant) as ranks:
        s = 2 * ranks.world
        values = [[10 * b + i for i in range(s)] for b in range(2)]
        out = rows(ranks.attention(*probe(values, [2] * ranks.world)))
        assert np.allclose(out, np.mean(values, 1)[:, None])


def test_messages_of_two_ranks_do_not_swap():  # HNG-6
    with start("ring2") as ranks:
        assert np.allclose(rows(ranks.attention(*probe([1, 3], [1, 1]))), 2)
    with start("ring3") as ranks:  # HNG-5
        assert np.allclose(rows(ranks.attention(*probe([1, 2, 6], [1, 1, 1]))), 3)


@anything
def test_lengths_that_a_rank_cannot_tell_apart(variant):  # HNG-1
    with start(variant) as ranks:
        pad = [1] * (ranks.world - 2)
        for _ in range(20):
            for lengths in ([2, 2], [2, 3], [3, 2], [2, 2], [3, 3], [2, 3]):
                lengths = [*lengths, *pad]
                values = [2**i for i in range(sum(lengths))]
                assert np.allclose(rows(ranks.attention(*probe(values, lengths))), np.mean(values))


def test_large_scores():  # NUM-1
    with start("ring2") as ranks:
        for k in ([0, 200], [200, 0], [0, -200]):
            q = [np.ones((1, 1, 1, 1), np.float32)] * 2
            keys = cut(np.float32(k).reshape(1, 2, 1, 1), [1, 1])
            values = cut(np.float32([1, 3]).reshape(1, 2, 1, 1), [1, 1])
            for out, lse in ranks.attention(q, keys, values, scale=1.0, return_lse=True):
                assert (out.item(), lse.item()) == ((3.0, 200.0) if k == [0, 200] else (1.0, float(max(k))))


@every
def test_lse_has_one_shape(variant):  # DT-2, NUM-6
    with start(variant) as ranks:
        for s in (1, 3, 33):
            x = [np.zeros((2, s, 6, 2), np.float32)] * ranks.world
            for out, lse in ranks.attention(x, x, x, return_lse=True):
                assert out.shape == (2, s, 6, 2) and lse.shape == (2, s, 6)
                assert np.allclose(lse, math.log(s * ranks.world), atol=1e-6)


@every
def test_each_head_meets_its_own_keys(variant):  # GQA-1, GQA-2, GQA-5
    with start(variant) as ranks:
        for Hkv in (3, 1, 6, 3):
            q = [np.zeros((1, 2, 6, 1), np.float32)] * ranks.world
            k = [np.zeros((1, 2, Hkv, 1), np.float32)] * ranks.world
            v = [np.broadcast_to(np.arange(1, Hkv + 1, dtype=np.float32)[:, None], k[0].shape)] * ranks.world
            out = np.concatenate(ranks.attention(q, k, v, enable_gqa=True), 1)
            assert np.allclose(out[0, :, :, 0], np.repeat(np.arange(1, Hkv + 1), 6 // Hkv))


@pytest.mark.parametrize("variant", ["ulysses_anything2", "ulysses_anything3", "unified_anything2x2"])
@pytest.mark.parametrize("H", [1, 2, 3, 4, 5, 7])
def test_any_number_of_heads(variant, H):  # SRC-3
    with start(variant) as ranks:
        x = [np.zeros((1, 2, H, 1), np.float32)] * ranks.world
        v = [np.broadcast_to(np.arange(H, dtype=np.float32)[:, None], x[0].shape)] * ranks.world
        out = np.concatenate(ranks.attention(x, x, v), 1)
        assert np.allclose(out[0, :, :, 0], np.arange(H))


@every
def test_each_block_meets_its_own_mask(variant):  # MSK-2, MSK-8, MSK-10, SRC-2
    with start(variant) as ranks:
        s = 2 * ranks.world
        lengths, values = [2] * ranks.world, [2.0**i for i in range(s)]
        bits = np.ones((2, s), bool)
        bits[0, -1] = bits[1, 1] = False
        want = [np.mean(np.array(values)[row]) for row in bits]
        out = rows(ranks.attention(*probe([values] * 2, lengths), attn_mask=cut(bits, lengths)))
        assert np.allclose(out, np.array(want)[:, None])
        bits[:] = True
        bits[:, 2:4] = False  # all keys of rank 1
        out = rows(ranks.attention(*probe([values] * 2, lengths), attn_mask=bits))
        assert np.allclose(out, np.mean(np.array(values)[bits[0]]))
        nothing = np.ones((1, 1, s, s), bool)
        nothing[:, :, 0] = False
        got = ranks.attention(*probe(values, lengths), attn_mask=nothing, return_lse=True)
        out, lse = (np.concatenate(x, 1) for x in zip(*got, strict=True))
        assert np.all(out[0, 0] == 0) and np.all(lse[0, 0] == -np.inf)
        assert np.allclose(out[0, 1:], np.mean(values)) and np.allclose(lse[0, 1:], math.log(s))


@every
def test_causal_means(variant):  # CAU-1, CAU-2, CAU-4, CAU-7
    with start(variant) as ranks:
        for lengths in lengths_for(variant, ranks.world):
            values = [2.0**i for i in range(sum(lengths))]
            means = np.cumsum(values) / np.arange(1, len(values) + 1)
            for is_causal in (False, True, False):
                out = rows(ranks.attention(*probe(values, lengths), is_causal=is_causal))
                assert np.allclose(out, means if is_causal else np.mean(values))


# --- shard and gather ---


@every
def test_shard_and_gather(variant):
    rng = np.random.default_rng(9)
    with start(variant) as ranks:
        for dtype in (
            "float16",
            "float32",
            "float64",
            "bool",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "complex64",
            "complex128",
        ):
            x = (rng.standard_normal((3, 7, 2, 5)) * 10).astype(dtype)
            for dim in range(-4, 4):
                want = np.array_split(x, ranks.world, dim)
                for view in (
                    x,
                    x.copy().transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0),
                    np.repeat(x, 2, -1)[..., ::2],
                ):
                    parts = ranks.run(lambda r, x=view, dim=dim: ranks.contexts[r].shard(x, dim))
                    assert all(np.array_equal(p, w) and p.flags.c_contiguous for p, w in zip(parts, want, strict=True))
                odd = [part.transpose(3, 0, 2, 1).copy().transpose(1, 3, 2, 0) for part in parts]
                for given in (parts, odd):
                    wholes = ranks.run(lambda r, given=given, dim=dim: ranks.contexts[r].gather(given[r], dim))
                    assert all(np.array_equal(whole, x) and whole.dtype == x.dtype for whole in wholes)


def test_gather_of_any_lengths():
    with start("ring3") as ranks:
        for lengths in ([0, 0, 0], [1, 0, 4], [5, 1, 0]):
            x = np.arange(sum(lengths) * 6.0).reshape(2, -1, 3)
            parts = cut(x, lengths)
            assert all(np.array_equal(x, w) for w in ranks.run(lambda r, p=parts: ranks.contexts[r].gather(p[r], 1)))
        scalar_like = np.arange(3)
        assert ranks.run(lambda r: ranks.contexts[r].gather(scalar_like[r : r + 1], 0))[1].tolist() == [0, 1, 2]


class Index:
    """What is used as an int."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, np.array, Index])
def test_whole_numbers_of_other_kinds(kind):
    rng = np.random.default_rng(12)
    with start("ring_anything3") as ranks:
        lengths = [3, 1, 2]
        lens = tuple(kind(n) for n in lengths)
        check(ranks, *make(rng, 2, 6, 6, 2, 2, 4, 4), lengths, seq_lens=lens)
        for sequence in (np.array, collections.deque, bytes, lambda n: pytest.importorskip("torch").tensor(n)):
            check(ranks, *make(rng, 2, 6, 6, 2, 2, 4, 4), lengths, seq_lens=sequence(lengths), kv_lens=lens)
        x = rng.standard_normal((2, 7, 3))
        for dim in (0, 1, 2) if kind is np.uint16 else (-2, 1):
            parts = ranks.run(lambda r, dim=dim: ranks.contexts[r].shard(x, kind(dim)))
            assert all(np.array_equal(p, w) for p, w in zip(parts, np.array_split(x, 3, dim), strict=True))
            for whole in ranks.run(lambda r, parts=parts, dim=dim: ranks.contexts[r].gather(parts[r], kind(dim))):
                assert np.array_equal(whole, x)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [3.4e38, -3.4e38, 1e-45, 1e-300, 0.0, np.float32(0.25), 1])
def test_scales_at_the_edge(dtype, scale):
    """Whatever float32 holds is computed with; what it rounds to 0 is 0."""
    rng = np.random.default_rng(13)
    for variant in ("ring2", "ulysses2"):
        with start(variant) as ranks:
            q, k, v = make(rng, 1, 8, 8, 2, 2, 4, 4, dtype)
            if abs(scale) > 1:
                q, k = q.clip(-0.9, 0.9), np.zeros_like(k)
            check(ranks, q, k, v, [4, 4], tolerance=4e-3 if dtype == "float16" else 1e-5, scale=scale)


# --- gradients ---


def grads(function, tensors, upstream):
    torch = pytest.importorskip("torch")
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, upstream)
    return [x.grad for x in tensors]


def plain(q, k, v, mask=None, is_causal=False, scale=None):
    """The oracle in torch, for autograd."""
    torch = pytest.importorskip("torch")
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if is_causal:
        ahead = torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None]
        scores = scores.masked_fill(ahead, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v), lse.transpose(1, 2)


@every
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"Hkv": 2}, {"mask": True}, {"scale": 0.3, "Hkv": 3}])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients(variant, keywords, with_lse):  # AG-1 to AG-10
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(10)
    keywords = dict(keywords)
    Hkv = keywords.pop("Hkv", 6)
    with start(variant) as ranks:
        lengths = lengths_for(variant, ranks.world)[-2]
        s = sum(lengths)
        shapes = (2, s, 6, 8), (2, s, Hkv, 8), (2, s, Hkv, 5), (2, s, 6, 5), (2, s, 6)
        q, k, v, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        if keywords.pop("mask", None):
            keywords["mask"] = torch.rand((2, 1, s, s), generator=generator) > 0.4
            keywords["mask"][:, :, :, 0] = True
        upstream = (dout, dlse) if with_lse else (dout,)
        want = grads(lambda *x: plain(*x, **keywords)[: len(upstream)], (q, k, v), upstream)
        keywords["attn_mask"] = keywords.pop("mask", None)
        parts = [torch.split(x, lengths, 1) for x in (q, k, v)]
        upstream = [torch.split(x, lengths, 1) for x in upstream]

        def rank_grads(r):
            def call(*x):
                return cp_attn.attention(*x, ranks.contexts[r], enable_gqa=True, return_lse=with_lse, **keywords)

            return grads(call, [x[r] for x in parts], tuple(x[r] for x in upstream))

        got = [torch.cat(x, 1) for x in zip(*ranks.run(rank_grads), strict=True)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradients_are_asked_for_one_by_one():
    torch = pytest.importorskip("torch")
    with start("ring2") as ranks:
        q, k, v = (torch.randn(1, 2, 2, 4, dtype=torch.float64) for _ in range(3))

        def call(r):
            own = k.clone().requires_grad_()
            out = cp_attn.attention(q, own, v, ranks.contexts[r])
            assert out.requires_grad and out.grad_fn is not None
            with torch.no_grad():
                assert not cp_attn.attention(q, own, v, ranks.contexts[r]).requires_grad
            out.sum().backward()
            for power in (1, 2):
                loss = (cp_attn.attention(q, own, v, ranks.contexts[r]) ** power).sum()
                (grad,) = torch.autograd.grad(loss, own, create_graph=True)
                with pytest.raises(NotImplementedError, match="once"):
                    grad.sum().backward()
            return own.grad

        both = ranks.run(call)
        assert all(torch.isfinite(g).all() for g in both)
        mask = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        for own in (k, k.clone().requires_grad_()):
            for caught in ranks.errors(lambda r, k=own: cp_attn.attention(q, k, v, ranks.contexts[r], attn_mask=mask)):
                assert isinstance(caught, NotImplementedError) and "attn_mask" in str(caught)
        assert all(torch.isfinite(g).all() for g in ranks.run(call))


def test_an_input_changed_before_its_gradient():
    """On one rank; the others do not wait for it, and the context can be used."""
    torch = pytest.importorskip("torch")
    with start("ring3") as ranks:

        def call(r, changed=None):
            q, k, v = (torch.ones(1, 2, 2, 4, requires_grad=True) for _ in range(3))
            twice = 2 * k
            out = cp_attn.attention(q, twice, v, ranks.contexts[r])
            if r == changed:
                twice.add_(1)
            out.sum().backward()
            return k.grad

        for changed in range(3):
            caught = ranks.errors(lambda r, changed=changed: call(r, changed))
            assert all(type(e) is RuntimeError and "modified by an inplace operation" in str(e) for e in caught), caught
            assert all(f"rank {changed}" in str(e) for r, e in enumerate(caught) if r != changed), caught
        assert all(torch.isfinite(g).all() for g in ranks.run(call))


def test_gradients_of_shard_and_gather():
    torch = pytest.importorskip("torch")
    with start("ring3") as ranks:
        x = torch.randn(2, 7, 3)
        weight = torch.randn(2, 7, 3)

        def call(r):
            whole = x.clone().requires_grad_()
            ctx = ranks.contexts[r]
            part = ctx.shard(whole, np.int64(1))
            again = ctx.gather(part, dim=np.int8(-2))
            assert torch.equal(again, x)
            (again * weight).sum().backward()
            return whole.grad

        got = ranks.run(call)
        assert torch.equal(sum(got), weight)
        for r, part in enumerate(torch.tensor_split(torch.arange(7), 3)):
            rest = [i for i in range(7) if i not in part]
            assert torch.equal(got[r][:, part], weight[:, part]) and not got[r][:, rest].any()


# --- steady state, and processes ---


@every
def test_a_steady_call_allocates_nothing(variant):
    live = _C._mem_stats()[0]
    with start(variant) as ranks:
        x = [np.ones((1, 4, 6, 8), np.float32)] * ranks.world
        for _ in range(3):
            ranks.attention(x, x, x, return_lse=True)
        before = _C._mem_stats()
        for _ in range(20):
            ranks.attention(x, x, x, return_lse=True)
        assert _C._mem_stats() == before
    assert _C._mem_stats()[0] == live


def test_ranks_as_processes():
    """A config in the place of a context, torch and NumPy, in processes that a launcher started."""
    for rank in launch("test_attention.py", 3, timeout=120):
        assert rank.code == 0, rank.err
        assert rank.line(done=True)


def main():
    import torch

    config = cp_attn.ContextParallelConfig(ring_degree=3, ring_anything=True)
    lengths = [3, 0, 4]
    rank = cp_attn._contexts.context_for(config).rank
    rng = np.random.default_rng(11)
    q, k, v = make(rng, 2, 7, 7, 2, 2, 8, 8)
    want = cut(oracle(q, k, v)[0], lengths)[rank]
    own = [cut(x, lengths)[rank] for x in (q, k, v)]
    np.testing.assert_allclose(cp_attn.attention(*own, config), want, atol=1e-12)
    out = cp_attn.attention(*map(torch.tensor, own), config)
    np.testing.assert_allclose(out.numpy(), want, atol=1e-12)
    cp_attn.close(config)
    say(done=True)


if __name__ == "__main__":
    main()
