"""Attention kernels of Python packages, by diffusers' names: what each takes, and how it is called.

The core asks for blocks whose rows see all keys, or the diagonal of equal lengths, and merges what comes back by its
logarithm of the row's sum; tensors are (B, rows, heads, D), that logarithm is (B, rows, heads), natural, with the scale
included. All functions are called as diffusers 0.42.1 calls them, and nothing is computed on another stream.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import _C

_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class _Package:
    """What a backend's package takes. Masks are for none of them."""

    load: Callable  # () -> (forward, backward or None)
    answer: Callable  # (forward, scale, is_causal, q, k, v) -> (out, lse)
    gradient: Callable | None  # (backward, scale, is_causal, q, k, v, dout, out, lse) -> (dq, dk, dv)
    most_dim: int
    multiple: int  # of which the head dim is one
    generations: Callable  # whether a GPU is of one that it runs on
    takes_groups: bool = True
    dtypes: tuple = _HALVES

    def refusal(self, dtype, head_dim, value_dim, heads, kv_heads, has_mask, generation):
        """Return why it cannot answer such a call, or None."""
        rules = (
            (has_mask, "it takes no attn_mask"),
            (dtype not in self.dtypes, f"it takes {' and '.join(self.dtypes)}, not {dtype}"),
            (head_dim != value_dim, f"it needs values of the head dim, {head_dim}, not {value_dim}"),
            (
                head_dim > self.most_dim or head_dim % self.multiple,
                f"it takes head dims up to {self.most_dim} that {self.multiple} divides, not {head_dim}",
            ),
            (heads != kv_heads and not self.takes_groups, f"it needs a key head for each of the {heads} query heads"),
            (not self.generations(generation), f"it does not run on a GPU of sm_{generation}"),
        )
        return next((reason for holds, reason in rules if holds), None)


def check(backend, dtype, head_dim, value_dim, heads, kv_heads, has_mask, is_backward, generation):
    """Refuse a call that the backend's package does not take, or a package that is not there."""
    if is_backward:
        check_gradient(backend)
    reason = TABLE[backend].refusal(dtype, head_dim, value_dim, heads, kv_heads, has_mask, generation)
    if reason:
        raise _C.NotSupported(f"backend {backend!r} cannot answer this call: {reason}; 'native' can")
    _functions(backend)


def check_gradient(backend):
    """Refuse gradients of a backend that has none."""
    if TABLE[backend].gradient is None:
        having = [name for name, package in TABLE.items() if package.gradient]
        raise _C.NotSupported(f"backend {backend!r} has no gradient; 'native' has one, and so have {', '.join(having)}")


def answer(backend, scale, is_causal, q, k, v):
    """Return (out, lse) of a block."""
    forward, _ = _functions(backend)
    return TABLE[backend].answer(forward, scale, is_causal, *map(_readable, (q, k, v)))


def gradient(backend, scale, is_causal, q, k, v, dout, out, lse):
    """Return (dq, dk, dv) of a block; `out` is of use for its product with `dout` alone, `lse` is over all keys."""
    _, backward = _functions(backend)
    return TABLE[backend].gradient(backward, scale, is_causal, *map(_readable, (q, k, v, dout, out)), lse)


@functools.cache
def _functions(backend):
    try:
        return TABLE[backend].load()
    except Exception as error:
        raise ImportError(f"backend {backend!r} cannot be loaded: {error}; 'native' needs no package") from error


def _readable(x):
    """Return x, or a copy where its rows are no whole 16-byte words of their own, as these kernels read them."""
    strides = [stride * x.itemsize for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    is_readable = x.stride(-1) == 1 and not any(number % 16 for number in (x.data_ptr(), *strides)) and all(strides)
    return x if is_readable else x.clone(memory_format=torch.contiguous_format)


# --- where functions are ---


def _of_module(module, forward, backward=None):
    def load():
        found = importlib.import_module(module)
        return getattr(found, forward), backward and getattr(found, backward)

    return load


def _of_hub(backend, wrapped=True):
    """Load a kernel of the hub as diffusers does, which keeps it for itself too and decides whom to trust."""

    def load():
        from diffusers.models import attention_dispatch as diffusers

        name = diffusers.AttentionBackendName(backend)
        diffusers._check_attention_backend_requirements(name)
        diffusers._maybe_download_kernel_for_backend(name)
        found = diffusers._HUB_KERNELS_REGISTRY[name]
        return (found.wrapped_forward_fn, found.wrapped_backward_fn) if wrapped else (found.kernel_fn, None)

    return load


# --- how they are called ---

_WINDOW = -1, -1
_SOFTCAP = 0.0


def _lengths(x):
    """Return the offsets of sequences of one length that lie one behind the other, and that length."""
    batch, rows = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows, rows


def _varlen(q, k):
    """Return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    (starts_q, rows), (starts_k, keys) = _lengths(q), _lengths(k)
    return starts_q, starts_k, rows, keys


def _packed(*tensors):
    return [x.flatten(0, 1) for x in tensors]


def _unpacked_lse(lse, q):
    """(heads, B * rows) -> (B, rows, heads)."""
    return lse.view(q.shape[2], *q.shape[:2]).permute(1, 2, 0)


def _packed_lse(lse):
    return lse.permute(2, 0, 1).flatten(1).contiguous()


def _head_first(lse):
    """(B, rows, heads) -> (B, heads, rows), packed, as kernels read it."""
    return lse.transpose(1, 2).contiguous()


def _is_deterministic():
    return torch.are_deterministic_algorithms_enabled()


def _flash_2(forward, scale, is_causal, q, k, v):
    out, lse, *_ = forward(q, k, v, 0.0, scale, is_causal, *_WINDOW, _SOFTCAP, None, False)
    return out, lse.transpose(1, 2)


def _flash_2_gradient(backward, scale, is_causal, q, k, v, dout, out, lse):
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flags = 0.0, scale, is_causal, *_WINDOW, _SOFTCAP, None, _is_deterministic(), None
    backward(dout, q, k, v, out, _head_first(lse), *grads, *flags)
    return tuple(grads)


def _flash_2_varlen(forward, scale, is_causal, q, k, v):
    flags = 0.0, scale, is_causal, *_WINDOW, _SOFTCAP, None, False
    out, lse, *_ = forward(*_packed(q, k, v), *_varlen(q, k), *flags)
    return out.view(q.shape), _unpacked_lse(lse, q)


def _flash_2_varlen_gradient(backward, scale, is_causal, q, k, v, dout, out, lse):
    packed = _packed(dout, q, k, v, out)
    grads = [torch.empty_like(x) for x in packed[1:4]]
    flags = 0.0, scale, is_causal, *_WINDOW, _SOFTCAP, None, _is_deterministic(), None
    backward(*packed, _packed_lse(lse), *grads, *_varlen(q, k), *flags)
    return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


def _flash_3_forward(forward, scale, is_causal, qkv, lengths):
    starts_q, starts_k, rows, keys = lengths
    # Behind q, k, v: k_new, v_new, qv, out; cu_seqlens of q, k and k_new; seqused of q and k; the longest of both;
    # page_table, kv_batch_idx, leftpad_k, rotary cos, sin and seqlens, and the descaling of q, k and v.
    rest = (*[None] * 4, starts_q, starts_k, None, *[None] * 2, rows, keys, *[None] * 9)
    return forward(
        *qkv,
        *rest,
        scale,
        causal=is_causal,
        window_size_left=_WINDOW[0],
        window_size_right=_WINDOW[1],
        attention_chunk=0,
        softcap=_SOFTCAP,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    )


def _flash_3(forward, scale, is_causal, q, k, v):
    out, lse, *_ = _flash_3_forward(forward, scale, is_causal, (q, k, v), [None] * 4)
    return out, lse.transpose(1, 2)


def _flash_3_varlen(forward, scale, is_causal, q, k, v):
    out, lse, *_ = _flash_3_forward(forward, scale, is_causal, _packed(q, k, v), _varlen(q, k))
    return out.view(q.shape), _unpacked_lse(lse, q)


def _flash_3_backward(backward, scale, is_causal, tensors, lse, lengths):
    """`tensors` are dout, q, k, v, out."""
    starts_q, starts_k, rows, keys = lengths
    grads = [torch.empty_like(x) for x in tensors[1:4]]
    flags = scale, is_causal, *_WINDOW, _SOFTCAP, _is_deterministic(), 0
    backward(*tensors, lse, starts_q, starts_k, None, None, rows, keys, *grads, *flags)
    return grads


def _flash_3_gradient(backward, scale, is_causal, q, k, v, dout, out, lse):
    return tuple(_flash_3_backward(backward, scale, is_causal, (dout, q, k, v, out), _head_first(lse), [None] * 4))


def _flash_3_varlen_gradient(backward, scale, is_causal, q, k, v, dout, out, lse):
    packed = _packed(dout, q, k, v, out)
    grads = _flash_3_backward(backward, scale, is_causal, packed, _packed_lse(lse), _varlen(q, k))
    return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


def _sage(forward, scale, is_causal, q, k, v):
    # Its kernels have the logarithm to base 2; sageattn turns it into the natural one, and adds back what it took from
    # the keys (sageattention/core.py, 2.1.1 to 2.2.0).
    out, lse, *_ = forward(q=q, k=k, v=v, tensor_layout="NHD", is_causal=is_causal, sm_scale=scale, return_lse=True)
    return out, lse.transpose(1, 2)


# --- the table ---


def _from_ampere(generation):
    return generation >= 80


def _hopper(generation):
    return generation == 90


def _known_to_sage(generation):
    return generation in (80, 86, 89, 90, 120, 121)


_FLASH_2 = functools.partial(
    _Package, answer=_flash_2, gradient=_flash_2_gradient, most_dim=256, multiple=8, generations=_from_ampere
)
_FLASH_3 = functools.partial(
    _Package, answer=_flash_3, gradient=_flash_3_gradient, most_dim=256, multiple=8, generations=_hopper
)
# Grouped heads with an lse are right in it since September 2025 only, and it does not say of when it is.
_SAGE = functools.partial(
    _Package,
    answer=_sage,
    gradient=None,
    most_dim=128,
    multiple=8,
    generations=_known_to_sage,
    takes_groups=False,
)

TABLE = {
    "flash": _FLASH_2(
        _of_module("flash_attn.flash_attn_interface", "_wrapped_flash_attn_forward", "_wrapped_flash_attn_backward")
    ),
    "flash_hub": _FLASH_2(_of_hub("flash_hub")),
    "flash_varlen_hub": _FLASH_2(
        _of_hub("flash_varlen_hub"), answer=_flash_2_varlen, gradient=_flash_2_varlen_gradient
    ),
    "_flash_3_hub": _FLASH_3(_of_hub("_flash_3_hub")),
    "_flash_3_varlen_hub": _FLASH_3(
        _of_hub("_flash_3_varlen_hub"), answer=_flash_3_varlen, gradient=_flash_3_varlen_gradient
    ),
    "sage": _SAGE(_of_module("sageattention", "sageattn")),
    "sage_hub": _SAGE(_of_hub("sage_hub", wrapped=False)),
}
