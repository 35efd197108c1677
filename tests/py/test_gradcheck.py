"""torch.autograd.gradcheck in float64 of whole inputs, the same on all ranks -> shard -> attention -> gather."""

import pytest
from thread_ranks import Ranks

torch = pytest.importorskip("torch")


import cp_attn  # noqa: E402

# name: (config, heads, rows of q, rows of k); what must not divide does not, and 3 rows on 4 ranks leave one empty.
VARIANTS = {
    "ring2": (dict(ring_degree=2), 2, 4, 6),
    "ring3": (dict(ring_degree=3), 2, 3, 6),
    "ring4": (dict(ring_degree=4), 2, 4, 8),
    "ulysses2": (dict(ulysses_degree=2), 2, 4, 6),
    "ulysses3": (dict(ulysses_degree=3), 6, 3, 6),
    "ulysses4": (dict(ulysses_degree=4), 4, 4, 8),
    "unified2x2": (dict(ring_degree=2, ulysses_degree=2), 2, 4, 8),
    "unified3x2": (dict(ring_degree=3, ulysses_degree=2), 2, 6, 12),
    "ring_anything2": (dict(ring_degree=2, ring_anything=True), 2, 5, 7),
    "ring_anything3": (dict(ring_degree=3, ring_anything=True), 2, 4, 7),
    "ring_anything4": (dict(ring_degree=4, ring_anything=True), 2, 5, 3),
    "ulysses_anything2": (dict(ulysses_degree=2, ulysses_anything=True), 3, 5, 7),
    "ulysses_anything3": (dict(ulysses_degree=3, ulysses_anything=True), 2, 4, 7),
    "ulysses_anything4": (dict(ulysses_degree=4, ulysses_anything=True), 6, 5, 3),
    "unified_anything2x2": (dict(ring_degree=2, ulysses_degree=2, unified_anything=True), 3, 5, 7),
    "unified_anything2x3": (dict(ring_degree=2, ulysses_degree=3, unified_anything=True), 4, 7, 5),
}
# The slow mode looks at every element of the Jacobian, the fast one at a random combination of them.
CASES = {
    "plain": dict(is_slow=True, B=1),
    "causal": dict(is_causal=True),
    "grouped": dict(kv_heads=1, scale=0.7),
    "mask": dict(mask=(1, 1, True, True)),
    "head mask": dict(mask=(2, True, 1, True), dtype=torch.float32),
    "bits": dict(mask=(2, 1, True, True), dtype=torch.bool),
    "cross": dict(is_cross=True, Dv=2, return_lse=True),
    "all": dict(is_cross=True, Dv=2, return_lse=True, kv_heads=1, is_causal=True, mask=(1, 1, True, True)),
}


class SumOverRanks(torch.autograd.Function):
    """The identity; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, context):
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.context.gather(grad[None].contiguous(), 0).sum(0), None


def whole_to_whole(context, q, k, v, **keywords):
    """Return what one process would compute from the whole tensors."""
    parts = [context.shard(SumOverRanks.apply(x, context), 1) for x in (q, k, v)]
    out = cp_attn.attention(*parts, context, **keywords)
    return tuple(context.gather(x, 1) for x in out) if keywords["return_lse"] else context.gather(out, 1)


def make(heads, rows, keys, B=2, kv_heads=None, Dv=3, is_cross=False, mask=None, dtype=torch.float64):
    """Return q, k, v that want gradients, and a mask over the whole that wants none."""
    generator = torch.Generator().manual_seed(12)
    keys, kv_heads = keys if is_cross else rows, kv_heads or heads
    shapes = (B, rows, heads, 3), (B, keys, kv_heads, 3), (B, keys, kv_heads, Dv)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    if mask is not None:
        sizes = [whole if size is True else size for size, whole in zip(mask, (B, heads, rows, keys), strict=True)]
        mask = torch.randn(sizes, generator=generator, dtype=torch.float64)
        # Bits: the first row sees no key at all.
        mask = (mask > 0) & (torch.arange(rows) > 0)[:, None] if dtype is torch.bool else mask.to(dtype)
    return tensors, mask


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant, case):
    config, heads, rows, keys = VARIANTS[variant]
    case = dict(CASES[case])
    is_slow, call = case.pop("is_slow", False), dict(enable_gqa="kv_heads" in case)
    for name, default in (("is_causal", False), ("scale", None), ("return_lse", False)):
        call[name] = case.pop(name, default)
    with Ranks(config.get("ring_degree", 1) * config.get("ulysses_degree", 1), **config) as ranks:

        def check(r):
            tensors, mask = make(heads, rows, keys, **case)
            return torch.autograd.gradcheck(
                lambda *x: whole_to_whole(ranks.contexts[r], *x, attn_mask=mask, **call),
                tensors,
                atol=1e-7,
                rtol=1e-5,
                fast_mode=not is_slow,
            )

        assert all(ranks.run(check))


def test_gradcheck_sees_a_missing_sum():
    """The check above can fail: without the sum over the ranks, keys lack what the other ranks' queries give them."""
    config, heads, rows, keys = VARIANTS["ring_anything3"]
    with Ranks(3, **config) as ranks:

        def check(r):
            tensors, _ = make(heads, rows, keys, B=1)
            context = ranks.contexts[r]

            def alone(*whole):
                return context.gather(cp_attn.attention(*(context.shard(x, 1) for x in whole), context), 1)

            return torch.autograd.gradcheck(alone, tensors, raise_exception=False)

        assert not any(ranks.run(check))
