"""Stand-ins for packages of attention kernels: functions of the same signatures that torch computes on the CPU.

They answer as the packages do, by their documentation and sources: flash-attn 2.8 (flash_attn_interface.py), its
version for Hopper (hopper/flash_attn_interface.py), sageattention 2.2 (core.py). What those would refuse or misread is
an assertion here.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
from sim_tensor import SimTensor, empty

CALLS = []  # (name of the function, is causal) of every call

LN_2 = 0.6931471805599453


def plain(x):
    return x.as_subclass(torch.Tensor)


def check(*tensors, most_dim=256):
    for x in tensors:
        assert type(x) is SimTensor and not x.requires_grad
        assert x.dtype in (torch.float16, torch.bfloat16) and x.dtype == tensors[0].dtype
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0 and x.shape[-1] <= most_dim
        assert x.data_ptr() % 16 == 0 and not any(
            s * 2 % 16 for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1
        )


def scores(q, k, scale, causal):
    """Return (B, H, rows, keys) in float64; causal is aligned at the last row and the last key."""
    q, k = (plain(x).double().transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.transpose(2, 3) * scale
    if causal:
        rows, keys = s.shape[2:]
        s = s.masked_fill(torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows).logical_not(), -torch.inf)
    return s


def forward(q, k, v, scale, causal):
    """Return (out, lse): (B, rows, H, D) and (B, H, rows), in memory that goes back in the order of the stream."""
    s = scores(q, k, scale, causal)
    lse = s.logsumexp(-1)
    values = plain(v).double().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    out, lse_out = empty(q.shape, q.dtype), empty(lse.shape, torch.float32)
    plain(out).copy_(((s - lse[..., None]).exp() @ values).transpose(1, 2))
    # Nothing is seen: +inf, as flash-attn says it.
    plain(lse_out).copy_(lse.masked_fill(lse == -torch.inf, torch.inf))
    return out, lse_out


def backward(dout, q, k, v, out, lse, dq, dk, dv, scale, causal):
    """Fill dq, dk and dv, from an lse (B, H, rows) over all keys."""
    check(dout, q, k, v, out)
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    group = q.shape[2] // k.shape[2]
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    p = (scores(q, k, scale, causal) - plain(lse).double()[..., None]).exp()
    queries, keys, values, dout, out = (plain(x).double().transpose(1, 2) for x in (q, k, v, dout, out))
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    ds = p * (dout @ values.transpose(2, 3) - (dout * out).sum(-1, keepdim=True)) * scale

    def fold(x):
        return x.unflatten(1, (k.shape[2], group)).sum(2).transpose(1, 2)

    plain(dq).copy_((ds @ keys).transpose(1, 2))
    plain(dk).copy_(fold(ds.transpose(2, 3) @ queries))
    plain(dv).copy_(fold(p.transpose(2, 3) @ dout))


def padded(x, cu_seqlens, longest):
    """(B * rows, heads, D) -> (B, rows, heads, D)."""
    lengths = plain(cu_seqlens).diff()
    assert cu_seqlens.dtype == torch.int32 and (lengths == longest).all() and lengths.sum() == x.shape[0]
    return x.unflatten(0, (len(lengths), longest))


def packed_lse(lse):
    """(B, H, rows) -> (H, B * rows)."""
    made = empty((lse.shape[1], lse.shape[0] * lse.shape[2]), lse.dtype)
    plain(made).copy_(plain(lse).transpose(0, 1).flatten(1))
    return made


def unpacked_lse(lse, batch):
    return lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


# --- flash-attn 2 ---


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    check(q, k, v)
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
    assert alibi_slopes is None and return_softmax is False
    CALLS.append(("flash_2", causal))
    out, lse = forward(q, k, v, softmax_scale, causal)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
    assert alibi_slopes is None and rng_state is None and isinstance(deterministic, bool)
    CALLS.append(("flash_2_backward", causal))
    backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
    return torch.empty(0)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
    num_splits=0,
):
    check(q, k, v)
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
    CALLS.append(("flash_2_varlen", causal))
    keys = [padded(x, cu_seqlens_k, max_seqlen_k) for x in (k, v)]
    out, lse = forward(padded(q, cu_seqlens_q, max_seqlen_q), *keys, softmax_scale, causal)
    return out.flatten(0, 1), packed_lse(lse), torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
    CALLS.append(("flash_2_varlen_backward", causal))
    varlen_backward(
        (dout, q, k, v, out),
        softmax_lse,
        (dq, dk, dv),
        (cu_seqlens_q, max_seqlen_q),
        (cu_seqlens_k, max_seqlen_k),
        softmax_scale,
        causal,
    )
    return torch.empty(0)


def varlen_backward(tensors, lse, grads, lengths_q, lengths_k, scale, causal):
    dout, q, out, dq = (padded(x, *lengths_q) for x in (tensors[0], tensors[1], tensors[4], grads[0]))
    k, v, dk, dv = (padded(x, *lengths_k) for x in (*tensors[2:4], *grads[1:]))
    assert lse.is_contiguous() and lse.shape == (q.shape[2], q.shape[0] * q.shape[1])
    backward(dout, q, k, v, out, unpacked_lse(lse, q.shape[0]), dq, dk, dv, scale, causal)


# --- flash-attn 3 ---


def _flash_attn_3_forward(
    q,
    k,
    v,
    k_new,
    v_new,
    qv,
    out_,
    cu_seqlens_q,
    cu_seqlens_k,
    cu_seqlens_k_new,
    seqused_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    page_table,
    kv_batch_idx,
    leftpad_k,
    rotary_cos,
    rotary_sin,
    seqlens_rotary,
    q_descale,
    k_descale,
    v_descale,
    softmax_scale,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    check(q, k, v)
    unused = k_new, v_new, qv, out_, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k
    assert {*unused, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, pack_gqa} == {None}
    assert (window_size_left, window_size_right, attention_chunk, softcap) == (-1, -1, 0, 0)
    is_packed = cu_seqlens_q is not None
    CALLS.append(("flash_3_varlen" if is_packed else "flash_3", causal))
    if not is_packed:
        assert max_seqlen_q is None and max_seqlen_k is None and cu_seqlens_k is None
        return *forward(q, k, v, softmax_scale, causal), torch.empty(0), torch.empty(0)
    keys = [padded(x, cu_seqlens_k, max_seqlen_k) for x in (k, v)]
    out, lse = forward(padded(q, cu_seqlens_q, max_seqlen_q), *keys, softmax_scale, causal)
    return out.flatten(0, 1), packed_lse(lse), torch.empty(0), torch.empty(0)


def _flash_attn_3_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    assert sequed_q is None and sequed_k is None and isinstance(deterministic, bool)
    assert (window_size_left, window_size_right, softcap, sm_margin) == (-1, -1, 0, 0)
    is_packed = cu_seqlens_q is not None
    CALLS.append(("flash_3_varlen_backward" if is_packed else "flash_3_backward", is_causal))
    tensors, grads = (dout, q, k, v, out), (dq, dk, dv)
    if is_packed:
        lengths = (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)
        varlen_backward(tensors, softmax_lse, grads, *lengths, softmax_scale, is_causal)
    else:
        backward(*tensors, softmax_lse, *grads, softmax_scale, is_causal)
    return torch.empty(0)


# --- sageattention ---


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    """Less exactly than the others: q and k are rounded to 8 bits a head, k without its mean over the keys."""
    check(q, k, v, most_dim=128)
    assert tensor_layout == "NHD" and return_lse is True and not kwargs and sm_scale is not None
    assert q.shape[2] == k.shape[2] and (not is_causal or q.shape[1] == k.shape[1])
    CALLS.append(("sage", is_causal))
    mean = plain(k).double().mean(1, keepdim=True)
    rounded = []
    for x in (plain(q).double(), plain(k).double() - mean):
        step = x.abs().amax((1, 3), keepdim=True).clamp_min(1e-9) / 127
        rounded.append((x / step).round() * step)
    out, lse = forward(*rounded, v, sm_scale, is_causal)
    base_2 = plain(lse).double() / LN_2
    correction = (plain(q).double() * mean).sum(-1).transpose(1, 2)
    plain(lse).copy_(base_2 / 1.44269504 + correction * sm_scale)
    final = empty(q.shape, q.dtype)
    plain(final).copy_(plain(out))
    return final, lse


# --- where they are found ---

HUB = {
    "flash_hub": ("flash_2", _flash_attn_forward, _flash_attn_backward),
    "flash_varlen_hub": ("flash_2_varlen", _flash_attn_varlen_forward, _flash_attn_varlen_backward),
    "_flash_3_hub": ("flash_3", _flash_attn_3_forward, _flash_attn_3_backward),
    "_flash_3_varlen_hub": ("flash_3_varlen", _flash_attn_3_forward, _flash_attn_3_backward),
    "sage_hub": ("sage", sageattn, None),
}
FUNCTIONS = {name: row[0] for name, row in HUB.items()} | {"flash": "flash_2", "sage": "sage"}


def install(monkeypatch):
    """Put them where the packages would be, and where diffusers keeps what it loaded from the hub."""
    flash, interface, sage = (ModuleType(x) for x in ("flash_attn", "flash_attn.flash_attn_interface", "sageattention"))
    interface._wrapped_flash_attn_forward = _flash_attn_forward
    interface._wrapped_flash_attn_backward = _flash_attn_backward
    flash.flash_attn_interface, sage.sageattn = interface, sageattn
    for module in (flash, interface, sage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from diffusers.models import attention_dispatch as diffusers

    monkeypatch.setattr(diffusers, "_check_attention_backend_requirements", lambda name: None)
    for name, (_, function, gradient) in HUB.items():
        found = diffusers._HUB_KERNELS_REGISTRY[diffusers.AttentionBackendName(name)]
        for field, value in {
            "kernel_fn": function,
            "wrapped_forward_fn": function,
            "wrapped_backward_fn": gradient,
        }.items():
            monkeypatch.setattr(found, field, value)
    CALLS.clear()
    return SimpleNamespace(interface=interface, sage=sage)
