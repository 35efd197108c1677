"""The two movements at the border of a parallel region. Hooks call these, and nothing else moves a hidden state.

Lengths follow `tensor_split`: with q, m = divmod(size, world) the first m ranks hold q + 1 rows, the others q.

Gradients keep one invariant: that of a split tensor is its own slice's, and that of a tensor which every rank holds
whole is the sum over the ranks of what each of them holds. So each movement's gradient is the other's with a sum, and
a gradient that arrives from a loss that all ranks compute alike is divided by their number first.
"""

import torch
from torch.autograd.function import once_differentiable

from .._torch import part


def split(context, x, dim):
    """Return the rank's part of a whole tensor, a view. Its gradient is the part's, in zeros."""
    first, count = part(x.shape[dim], context.rank, context.world_size)
    return x.narrow(dim, first, count)


def gather(context, x, dim):
    """Return the whole of a tensor of which every rank holds a part; the parts may have any sizes.

    Its gradient is the part's rows of the sum of all ranks' gradients.
    """
    return _Gather.apply(x, context, dim) if _is_recorded(x) else context.gather(x, dim)


def leave(context, x):
    """Return a value that leaves the model whole on every rank, so that every rank's loss counts it."""
    return _Leave.apply(x, context.world_size) if isinstance(x, torch.Tensor) and _is_recorded(x) else x


def _is_recorded(x):
    return torch.is_grad_enabled() and x.requires_grad


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
