"""The two movements at the border of a parallel region. Hooks call these, and nothing else moves a hidden state.

Lengths follow `tensor_split`: with q, m = divmod(size, world) the first m ranks hold q + 1 rows, the others q.
"""

import torch


def part(size, rank, world):
    """Return the first row and the number of rows that a rank holds of `size`."""
    quotient, more = divmod(size, world)
    return rank * quotient + min(rank, more), quotient + (rank < more)


def split(context, x, dim):
    """Return the rank's part of a whole tensor, a view. Its gradient is the part's, in zeros."""
    first, count = part(x.shape[dim], context.rank, context.world_size)
    return x.narrow(dim, first, count)


def gather(context, x, dim):
    """Return the whole of a tensor of which every rank holds a part; the parts may have any sizes."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Gather.apply(x, context, dim)
    return context.gather(x, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context, dim):
        return context.gather(x.detach(), dim)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("gradients through a model with context parallelism are not implemented")
