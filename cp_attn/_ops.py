"""The calls of a context as operators of torch, for its compiler, which cannot look into a C function.

Only compiled code comes here: an operator costs more than the call itself. A context is passed as its number.

The order of the calls must be the same on all ranks. Operators with `_in_order` in their name have an effect in the
eyes of the compiler, so that it keeps them as written. The others, for code with gradients, are ordered by what they
compute from each other alone, since checkpoints admit no effects (torch 2.13); where the compiler of one rank changed
the order of two different calls, the ranks would not agree and all raise.
"""

import itertools
import weakref

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from . import _C

_numbers = itertools.count()
_contexts = weakref.WeakValueDictionary()


def number(context):
    """Return a new number for a context, by which operators find it while it lives."""
    found = next(_numbers)
    _contexts[found] = context
    return found


def _context(found):
    context = _contexts.get(found)
    if context is None:
        raise RuntimeError("the context that this code was compiled for is gone; call enable_parallelism again")
    context._mark_compiled()
    return context


def _attention(context, q, k, v, mask, is_causal, scale, enable_gqa, backend, return_lse, is_recorded):
    """Return the output of `cp_attn.attention` and its LSE, which is empty where it is neither wanted nor saved."""
    with_lse = return_lse or is_recorded
    found = _C.attention(
        q,
        k,
        v,
        _context(context),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        backend=backend,
        return_lse=with_lse,
    )
    return found if with_lse else (found, _new_lse(q, (0,)))


def _fake_attention(context, q, k, v, mask, is_causal, scale, enable_gqa, backend, return_lse, is_recorded):
    return q.new_empty(*q.shape[:3], v.shape[3]), _new_lse(q, q.shape[:3] if return_lse or is_recorded else (0,))


def _new_lse(q, shape):
    return q.new_empty(shape, dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)


def _attention_backward(context, q, k, v, out, lse, dout, dlse, mask, is_causal, scale, enable_gqa, backend):
    """Return the gradients of q, k and v."""
    return _C._attention_backward(
        _context(context), q, k, v, out, lse, dout, dlse, mask, is_causal, scale, enable_gqa, "sharded", backend
    )


def _fake_attention_backward(context, q, k, v, *more):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _gather(context, x, dim, size):
    """Return the whole of `x`, which has `size` rows where that is known."""
    whole = _context(context).gather(x, dim)
    if size is not None and whole.shape[dim] != size:
        raise RuntimeError(f"dim {dim} of a gathered tensor has {whole.shape[dim]} rows; it was compiled for {size}")
    return whole


def _fake_gather(context, x, dim, size):
    # Lengths that other ranks alone know are left open.
    return _resized(x, dim, torch.library.get_ctx().new_dynamic_size() if size is None else size)


def _reduce_scatter(context, x, dim, rows):
    """Return the rank's `rows` of the sum of all ranks' `x`."""
    return _context(context)._reduce_scatter(x, dim, rows)


def _fake_reduce_scatter(context, x, dim, rows):
    return _resized(x, dim, rows)


def _resized(x, dim, size):
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _operator(name, function, fake, schema):
    operator = torch.library.custom_op(f"cp_attn::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


def _operator_in_order(name, *more):
    operator = _operator(f"{name}_in_order", *more)
    _register_effectful_op(getattr(torch.ops.cp_attn, f"{name}_in_order").default, _EffectType.ORDERED)
    return operator


_QKV = "SymInt context, Tensor q, Tensor k, Tensor v"
_FLAGS = "Tensor? mask, bool is_causal, float? scale, bool enable_gqa, str backend"
_ATTENTION = (
    "attention",
    _attention,
    _fake_attention,
    f"({_QKV}, {_FLAGS}, bool return_lse, bool is_recorded) -> (Tensor, Tensor)",
)
_GATHER = ("gather", _gather, _fake_gather, "(SymInt context, Tensor x, int dim, SymInt? size) -> Tensor")

attention = _operator(*_ATTENTION)
attention_in_order = _operator_in_order(*_ATTENTION)
attention_backward = _operator(
    "attention_backward",
    _attention_backward,
    _fake_attention_backward,
    f"({_QKV}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, {_FLAGS}) -> (Tensor, Tensor, Tensor)",
)
gather = _operator(*_GATHER)
gather_in_order = _operator_in_order(*_GATHER)
reduce_scatter = _operator(
    "reduce_scatter",
    _reduce_scatter,
    _fake_reduce_scatter,
    "(SymInt context, Tensor x, int dim, SymInt rows) -> Tensor",
)


def _save_attention(ctx, inputs, output):
    ctx.context, q, k, v, mask, *ctx.flags, ctx.return_lse, _ = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def _attention_gradient(ctx, dout, dlse):
    *saved, mask = ctx.saved_tensors
    # As in `_torch.py`, the call alone decides whether the LSE has a gradient.
    dlse = dlse if ctx.return_lse else None
    return None, *attention_backward(ctx.context, *saved, dout, dlse, mask, *ctx.flags), *[None] * 7


def _save_gather(ctx, inputs, output):
    ctx.context, x, ctx.dim, _ = inputs
    ctx.rows = x.shape[ctx.dim]


def _gather_gradient(ctx, grad):
    return None, reduce_scatter(ctx.context, grad, ctx.dim, ctx.rows), None, None


attention.register_autograd(_attention_gradient, setup_context=_save_attention)
gather.register_autograd(_gather_gradient, setup_context=_save_gather)
