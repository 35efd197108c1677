"""Direct calls under torch's modes: autocast, no_grad, inference_mode, checkpoints. All answer as one process does."""

import pytest
from thread_ranks import Ranks

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cp_attn  # noqa: E402

VARIANTS = {
    "ring3": dict(ring_degree=3),
    "ulysses2": dict(ulysses_degree=2),
    "unified2x2": dict(ring_degree=2, ulysses_degree=2),
    "ring_anything4": dict(ring_degree=4, ring_anything=True),
    "ulysses_anything3": dict(ulysses_degree=3, ulysses_anything=True),
    "unified_anything2x2": dict(ring_degree=2, ulysses_degree=2, unified_anything=True),
}
every = pytest.mark.parametrize("variant", VARIANTS)
BF16 = torch.finfo(torch.bfloat16).eps


@pytest.fixture
def ranks(variant):
    config = VARIANTS[variant]
    with Ranks(config.get("ring_degree", 1) * config.get("ulysses_degree", 1), **config) as ranks:
        yield ranks


def rows_of(ranks):
    return 12 if "anything" not in repr(ranks.config).replace("anything=False", "") else 13


class Layer(nn.Module):
    """Attention between linear layers, with a residual."""

    def __init__(self, dtype):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 3 * 16), nn.Linear(16, 16)
        generator = torch.Generator().manual_seed(1)  # of its own: threads share torch's
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)
        self.to(dtype)

    def forward(self, x, attend):
        q, k, v = self.enter(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return x + self.leave(attend(q, k, v).flatten(2)).tanh()


def single(q, k, v):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def trained(layer, x, attend, around=lambda function, *args: function(*args)):
    """Return the output of a layer and the gradients of a loss whose parts the ranks add up."""
    out = around(layer, x, attend)
    out.double().pow(2).sum().backward()
    return out.detach(), [p.grad for p in layer.parameters()]


def on_ranks(ranks, dtype, x, around=lambda function, *args: function(*args)):
    """Return the gathered output and the ranks' summed gradients."""

    def run(r):
        context = ranks.contexts[r]
        own = context.shard(x, 1).requires_grad_()
        out, grads = trained(Layer(dtype), own, lambda *a: cp_attn.attention(*a, context), around)
        return context.gather(out, 1), [*grads, context.gather(own.grad, 1) / ranks.world]

    both = ranks.run(run)
    assert all(out.equal(both[0][0]) for out, _ in both)
    return both[0][0], [sum(parts) for parts in zip(*(grads for _, grads in both), strict=True)]


def on_one(dtype, x, around=lambda function, *args: function(*args)):
    x = x.clone().requires_grad_()
    out, grads = trained(Layer(dtype), x, single, around)
    return out, [*grads, x.grad]


def hidden(ranks, dtype):
    return torch.randn(2, rows_of(ranks), 16, generator=torch.Generator().manual_seed(2), dtype=dtype)


def worst(a, b):
    """Return the largest difference, relative to the largest value."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def in_autocast(function, *args):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*args)


@every
def test_autocast(ranks):
    """Linear layers hand over bfloat16; the answer is as far from float64 as one process's."""
    x = hidden(ranks, torch.float32)
    exact = on_one(torch.float64, x.double())
    alone, together = on_one(torch.float32, x, in_autocast), on_ranks(ranks, torch.float32, x, in_autocast)
    assert together[0].dtype == alone[0].dtype
    for mine, theirs, truth in zip(*([out, *grads] for out, grads in (together, alone, exact)), strict=True):
        assert mine.dtype == torch.float32 and worst(theirs, truth) > 0
        assert worst(mine, truth) <= 2 * worst(theirs, truth) + BF16


@every
def test_autocast_of_tensors_that_need_none(ranks):
    """float32 handed over directly, which torch's own attention would round: within that rounding, and never worse."""
    q, k, v = torch.randn(3, 2, rows_of(ranks), 6, 8, generator=torch.Generator().manual_seed(3))
    exact = single(q.double(), k.double(), v.double())

    def run(r):
        context = ranks.contexts[r]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return context.gather(cp_attn.attention(*(context.shard(x, 1) for x in (q, k, v)), context), 1)

    for out in ranks.run(run):
        assert worst(out, exact) <= worst(in_autocast(single, q, k, v), exact) + BF16


@every
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded(ranks, mode):
    """Inputs that ask for gradients do not get any, and the numbers are those of a recorded call."""
    q, k, v = (torch.randn(2, rows_of(ranks), 6, 8) for _ in range(3))

    def run(r):
        context = ranks.contexts[r]
        own = [context.shard(x, 1).requires_grad_() for x in (q, k, v)]
        recorded = cp_attn.attention(*own, context, return_lse=True)
        assert all(x.grad_fn is not None for x in recorded)
        with mode():
            out = cp_attn.attention(*own, context, return_lse=True)
            inner = [context.shard(x, 1) for x in (q, k, v)]  # made inside: inference tensors
            again = cp_attn.attention(*inner, context, return_lse=True)
            whole = context.gather(out[0], 1)
        for a, b, c in zip(out, again, recorded, strict=True):
            assert a.grad_fn is None and not a.requires_grad and not b.requires_grad
            assert a.equal(c) and b.equal(c)
        assert not whole.requires_grad
        return cp_attn.attention(*own, context)  # and the mode is over

    assert all(out.requires_grad for out in ranks.run(run))


@every
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(ranks, use_reentrant):
    """What is computed again in the backward exchanges once more, in the same order on all ranks."""
    x = hidden(ranks, torch.float64)

    def around(function, *args):
        # Threads share torch's random numbers, which nothing here draws.
        return checkpoint(function, *args, use_reentrant=use_reentrant, preserve_rng_state=False)

    out, grads = on_ranks(ranks, torch.float64, x, around)
    want, wanted = on_one(torch.float64, x)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every
def test_autocast_and_checkpoint(ranks):
    """What is computed again is computed under the same autocast: gradients are those without checkpoints, exactly."""
    x = hidden(ranks, torch.float32)

    def both(function, *args):
        return in_autocast(lambda *a: checkpoint(function, *a, use_reentrant=False, preserve_rng_state=False), *args)

    _, plain = on_ranks(ranks, torch.float32, x, in_autocast)
    _, again = on_ranks(ranks, torch.float32, x, both)
    assert all(a.equal(b) for a, b in zip(plain, again, strict=True))
