"""Gradients for torch: the C functions of a tensor that asks for one come here."""

import torch
from torch.autograd.function import once_differentiable

from . import _C, _contexts


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context, mask, is_causal, scale, enable_gqa, return_lse, kv, backend, lengths):
        out, lse = _C.attention(
            q,
            k,
            v,
            context,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=True,
            kv=kv,
            backend=backend,
            **lengths,
        )
        # A mask of another array library cannot be saved.
        saved = mask if isinstance(mask, torch.Tensor) else None
        ctx.save_for_backward(q, k, v, out, lse, saved)
        ctx.foreign_mask = None if mask is saved else mask
        ctx.call = (context, is_causal, scale, enable_gqa, kv, backend)
        ctx.return_lse = return_lse
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        # Whether the LSE has a gradient is decided by the call, as on every other rank, and not by what a rank's loss
        # makes of it: autograd fills in zeros.
        dlse = dlse if ctx.return_lse else None
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            # Changed in place since, on this rank perhaps alone: the others are on their way to the exchange.
            ctx.call[0].agree(error)
            raise
        grads = _AttentionGrad.apply(dout, dlse, *saved, ctx.foreign_mask, ctx.call)
        grads = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*grads, *[None] * 9)


class _AttentionGrad(torch.autograd.Function):
    """The gradient as a function of everything that it depends on, so that nobody gets a second one unawares."""

    @staticmethod
    def forward(ctx, dout, dlse, q, k, v, out, lse, mask, foreign_mask, call):
        context, *rest = call
        mask = foreign_mask if mask is None else mask
        return _C._attention_backward(context, q, k, v, out, lse, dout, dlse, mask, *rest)

    @staticmethod
    def backward(ctx, *grads):
        raise _C.NotSupported("cp_attn.attention can be differentiated once, not twice")


def attention(
    q,
    k,
    v,
    context_or_config,
    *,
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kv="sharded",
    seq_lens=None,
    kv_lens=None,
    dropout_p=0.0,
    backend="native",
):
    """Compute `cp_attn.attention` so that autograd records it."""
    context = context_or_config
    if not isinstance(context, _C.Context):
        context = _contexts.context_for(context)
    lengths = {"seq_lens": seq_lens, "kv_lens": kv_lens, "dropout_p": dropout_p}
    flags = is_causal, scale, enable_gqa, return_lse, kv, backend
    return _Attention.apply(q, k, v, context, attn_mask, *flags, lengths)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context, dim):
        share = context.shard(x, dim)
        ctx.shape, ctx.dim = x.shape, dim
        ctx.first, _ = part(x.shape[dim], context.rank, context.world_size)
        return share

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.shape)
        whole.narrow(ctx.dim, ctx.first, grad.shape[ctx.dim]).copy_(grad)
        return whole, None, None


def part(size, rank, world):
    """Return the first row and the number of rows that a rank holds of `size`, cut as `tensor_split` cuts."""
    quotient, more = size // world, size % world  # divmod is not known to the compiler of torch
    return rank * quotient + min(rank, more), quotient + (1 if rank < more else 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context, dim):
        whole, ctx.first = context._gather_at(x, dim)
        ctx.dim, ctx.count = dim, x.shape[dim]
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.narrow(ctx.dim, ctx.first, ctx.count), None, None


def shard(context, x, dim):
    """Return `context.shard(x, dim)`, recorded: the gradient is the slice's, in zeros."""
    return _Shard.apply(x, context, dim)


def gather(context, x, dim):
    """Return `context.gather(x, dim)`, recorded: the gradient is the rank's own slice."""
    return _Gather.apply(x, context, dim)
