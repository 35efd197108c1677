"""A call's backend on its way: through autograd and the compiler's operators, and past every rank."""

import numpy as np
import pytest
from thread_ranks import Ranks

torch = pytest.importorskip("torch")

import cp_attn  # noqa: E402
from cp_attn import _C, _ops, _torch  # noqa: E402


@pytest.fixture
def ranks():
    with Ranks(2, ring_degree=2) as opened:
        yield opened


def tensors(count, requires_grad=False):
    torch.manual_seed(1)
    return [torch.randn(1, 4, 2, 8).requires_grad_(requires_grad) for _ in range(count)]


@pytest.fixture
def seen(monkeypatch):
    """The backends that C functions were called with, by their names."""
    found = {"attention": set(), "_attention_backward": set()}

    class Spy:
        def __getattr__(self, name):
            return getattr(_C, name)

        def attention(self, *args, **keywords):
            found["attention"].add(keywords["backend"])
            return _C.attention(*args, **keywords)

        def _attention_backward(self, *args):
            found["_attention_backward"].add(args[-1])
            return _C._attention_backward(*args)

    for module in (_torch, _ops):
        monkeypatch.setattr(module, "_C", Spy())
    return found


def test_through_autograd(ranks, seen):
    def call(r):
        q, k, v = tensors(3, requires_grad=True)
        cp_attn.attention(q, k, v, ranks.contexts[r], backend="_native_math").sum().backward()
        return q.grad

    assert all(torch.isfinite(grad).all() for grad in ranks.run(call))
    assert seen == {"attention": {"_native_math"}, "_attention_backward": {"_native_math"}}


def test_through_the_operators(ranks, seen):
    flags = None, False, None, False, "_native_flash"

    def call(r):
        q, k, v = tensors(3, requires_grad=True)
        number = _ops.number(ranks.contexts[r])
        out, _ = _ops.attention(number, q, k, v, *flags, False, True)
        out.sum().backward()
        with torch.no_grad():
            in_order, _ = _ops.attention_in_order(number, q, k, v, *flags, False, False)
        return out.detach(), in_order, q.grad

    for out, in_order, grad in ranks.run(call):
        torch.testing.assert_close(out, in_order)
        assert torch.isfinite(grad).all()
    assert seen == {"attention": {"_native_flash"}, "_attention_backward": {"_native_flash"}}


def test_names_of_a_cpu_are_one_kernel(ranks):
    """To the last bit, so whichever a model has set."""
    q, k, v = (x.numpy() for x in tensors(3))
    for backend in _C._backends["cpu"]:
        outs = ranks.run(lambda r, b=backend: cp_attn.attention(q, k, v, ranks.contexts[r], backend=b))
        wants = ranks.run(lambda r: cp_attn.attention(q, k, v, ranks.contexts[r]))
        assert all(np.array_equal(a, b) for a, b in zip(outs, wants, strict=True))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_names_of_a_gpu_are_refused_on_a_cpu(ranks, requires_grad):
    """On all ranks, with those that would do; the context goes on."""
    for backend in _C._backends["cuda"]:
        if backend in _C._backends["cpu"]:
            continue

        def call(r, backend=backend):
            return cp_attn.attention(*tensors(3, requires_grad), ranks.contexts[r], backend=backend)

        for error in ranks.errors(call):
            if "sage" in backend and requires_grad:
                assert type(error) is _C.NotSupported and "has no gradient" in str(error)
            else:
                assert type(error) is ValueError
                assert f"'{backend}' cannot run on cpu; compatible ones are {', '.join(_C._backends['cpu'])}" in str(
                    error
                )
    ranks.run(lambda r: cp_attn.attention(*tensors(3), ranks.contexts[r]))
