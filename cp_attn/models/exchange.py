"""The movements at the border of a parallel region, and attention inside it. Nothing else moves a hidden state.

Lengths follow `tensor_split`: with q, m = divmod(size, world) the first m ranks hold q + 1 rows, the others q.

Gradients keep one invariant: that of a split tensor is its own slice's, and that of a tensor which every rank holds
whole is the sum over the ranks of what each of them holds. So each movement's gradient is the other's with a sum, and
a gradient that arrives from a loss that all ranks compute alike is divided by their number first.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from .. import _C, _lengths, _ops
from .._torch import part


class Exchange:
    """What the ranks of one context do together. While compiling, torch sees operators in the place of C calls."""

    def __init__(self, context):
        self.context, self.rank, self.world = context, context.rank, context.world_size
        self._number = _ops.number(context)

    def split(self, x, dim):
        """Return the rank's part of a whole tensor, a view. Its gradient is the part's, in zeros."""
        first, count = part(x.shape[dim], self.rank, self.world)
        return x.narrow(dim, first, count)

    def gather(self, x, dim, size_of):
        """Return the whole of a tensor of which every rank holds a part; the parts may have any sizes.

        Its gradient is the part's rows of the sum of all ranks' gradients. `size_of` is a hint for the compiler: the
        size of the whole for the rows of the part, None where it is not known.
        """
        if is_compiling():
            gather = _ops.gather if _is_recorded(x) else _ops.gather_in_order
            return gather(self._number, x, dim, size_of(x.shape[dim]))
        return _Gather.apply(x, self.context, dim) if _is_recorded(x) else self.context.gather(x, dim)

    def leave(self, x):
        """Return a value that leaves the model whole on every rank, so that every rank's loss counts it."""
        return _Leave.apply(x, self.world) if isinstance(x, torch.Tensor) and _is_recorded(x) else x

    def attend(self, q, k, v, mask, is_causal, scale, enable_gqa, return_lse, backend, streams=None):
        """Return the attention of the rank's queries to all keys, with its LSE if wanted, by a kernel of `backend`.

        `streams` are the model's, where the ranks' lengths may differ.
        """
        if torch.is_autocast_enabled(q.device.type):
            q, k, v, mask = (_autocast(x) for x in (q, k, v, mask))
        if is_compiling():
            is_recorded = _is_recorded(q, k, v)
            attention = _ops.attention if is_recorded else _ops.attention_in_order
            flags = mask, is_causal, scale, enable_gqa, backend
            found = attention(self._number, q, k, v, *flags, return_lse, is_recorded)
            return found if return_lse else found[0]
        return _C.attention(
            q,
            k,
            v,
            self.context,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            backend=backend,
            **_lengths.arguments(q, k, self.context, streams),
        )


def _autocast(x):
    """Cast as torch casts what its own attention gets."""
    if x is None or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _is_recorded(*tensors):
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context, dim):
        ctx.context, ctx.dim, ctx.rows = context, dim, x.shape[dim]
        return context.gather(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.context._reduce_scatter(grad, ctx.dim, ctx.rows), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        return x.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.world, None
