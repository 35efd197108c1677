"""One rank of diffusers' context-parallel attention without peers, by its own code.

Collectives are copies on the rank's own device: an all-to-all gives back what it was given, an all-gather repeats it.
That moves as many bytes as the rank would receive and asks less of the host than a process group does.
"""

import contextlib
from unittest import mock

import torch
from diffusers.models import attention_dispatch

from .upstream_costs import parallel_config


def _gather(world):
    return lambda x, gather_dim, group: x.repeat(world)


def _exchange(x, output_splits, input_splits, group):
    return x.clone()


def _flash_on_cpu(query, key, value, dropout_p, is_causal, return_debug_mask, scale):
    """As torch's op for GPUs answers."""
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    return *made, *[None] * 7


def bare(q, k, v):
    """Return torch's own attention op on tensors as models have them, and nothing around it."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    return op(
        query=q.transpose(1, 2),
        key=k.transpose(1, 2),
        value=v.transpose(1, 2),
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        scale=None,
    )


@contextlib.contextmanager
def rank(ring, ulysses, is_on_cpu):
    """Yield diffusers' config of rank 0 of that many ranks, who are not there."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        collectives = {"all_gather_tensor": _gather(ring), "all_to_all_single": _exchange}
        stack.enter_context(mock.patch.multiple(attention_dispatch.funcol, **collectives))
        if is_on_cpu:
            name = "_scaled_dot_product_flash_attention"
            stack.enter_context(mock.patch.object(torch.ops.aten, name, _flash_on_cpu))
        yield stack.enter_context(parallel_config(ring, ulysses, False)) if ring * ulysses > 1 else None


def attend(q, k, v, config):
    """The whole operation, with diffusers' backend `_native_flash`."""
    return attention_dispatch._native_flash_attention(q, k, v, _parallel_config=config)


def exchange(q, k, v, config):
    """Ulysses without the attention: what is done to q, k, v before it and to its answer."""
    arguments = (None, 0.0, False, None, False, False, lambda ctx, q, *rest, **more: q, None, config)
    return attention_dispatch.TemplatedUlyssesAttention.apply(q, k, v, *arguments)


def merge(q, outs, lses, config):
    """The ring without the attention, whose answers are given; its keys are one row, which costs next to nothing."""
    answers = iter(zip(outs, lses, strict=True))
    arguments = (None, 0.0, False, None, False, False, lambda *rest, **more: next(answers), None, config)
    return attention_dispatch.TemplatedRingAttention.apply(q, q[:, :1], q[:, :1], *arguments)
