"""One rank: a grid of calls, forward and backward, on its GPU, each judged against float64. A JSON line for each case.

Usage: ranks_grid.py DEVICE VARIANT [BACKEND]     DEVICE is cuda, cpu, or shared: one GPU for all ranks; VARIANT a key
of variants(world)
"""

import itertools
import os
import sys
import traceback

import torch
from grid import kinds_of, variants
from launch import say

import cp_attn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BATCH, DIM = 2, 64


def plain(q, k, v, mask, is_causal):
    """Return (out, lse) by the textbook, in the tensors' own dtype; rows that see no key are 0 and -inf."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(1, 2)


def gradients(function, tensors, dout):
    """Return (outputs, gradients) of a function of q, k, v."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    outs = function(*tensors)
    grads = torch.autograd.grad(outs[0], tensors, dout) if outs[0].requires_grad else ()
    return [x.detach() for x in (*outs, *grads)]


def worst(got, want):
    """Return the largest error; where both are -inf there is none."""
    return (got.double() - want).nan_to_num(0).abs().amax().item() if got.numel() else 0.0


def judge(name, got, usual, want, dtype, allowed):
    """Refuse an error of more than `allowed` times the plain method's, or than 16 roundings."""
    error, own = worst(got, want), worst(usual, want)
    largest = want[want.isfinite()].abs().amax().item() if want.isfinite().any() else 0.0
    bound = max(allowed * own, 16 * EPS[dtype] * max(largest, 1.0))
    assert error <= bound, f"{name} is {error:.3g} away from float64, and the plain method {own:.3g}"


def split(x, lengths, dim=1):
    return x.split(lengths, dim)[RANK]


def play(context, device, lengths, kind, dtype, backend):
    """One call forward and backward, at this rank's rows; `native` gives an lse too, whose gradient libraries lack."""
    heads, kv_heads, is_causal, has_mask = kind
    draw = torch.Generator().manual_seed(len(lengths) * 1000 + sum(lengths))
    rows = sum(lengths)

    def random(heads):
        return torch.randn(BATCH, rows, heads, DIM, generator=draw).to(dtype).to(device)

    q, k, v, dout = random(heads), random(kv_heads), random(kv_heads), random(heads)
    mask = (torch.rand(BATCH, 1, rows, rows, generator=draw) > 0.3).to(device) if has_mask else None
    with_lse, is_quantised = backend == "native", "sage" in backend
    names = ["out", *["lse"] * with_lse, *["dq", "dk", "dv"] * (not is_quantised)]

    def textbook(q, k, v):
        return plain(q, k, v, mask, is_causal)[: 1 + with_lse]

    def ours(q, k, v):
        own = None if mask is None else split(mask, lengths, 2)
        flags = {"attn_mask": own, "is_causal": is_causal, "enable_gqa": True, "backend": backend}
        found = cp_attn.attention(q, k, v, context, return_lse=with_lse, **flags)
        return found if with_lse else (found,)

    with torch.set_grad_enabled(not is_quantised):
        truth = gradients(textbook, [x.double() for x in (q, k, v)], dout.double())
        usual = gradients(textbook, (q, k, v), dout)
        got = gradients(ours, [split(x, lengths) for x in (q, k, v)], split(dout, lengths))
    assert all(x.device == q.device for x in got)
    for name, mine, common, want in zip(names, got, usual, truth, strict=True):
        if is_quantised:
            assert worst(mine, split(want, lengths)) <= 0.1
        else:
            judge(name, mine, split(common, lengths), split(want, lengths), dtype, 3 if name[0] == "d" else 2)


def main(device, name, backend="native"):
    config = variants(WORLD)[name]
    if device in ("cuda", "shared"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device == "cuda" else 0)
        device = f"cuda:{torch.cuda.current_device()}"
    is_even = not any(key.endswith("anything") for key in config)
    shapes = [[37] * WORLD, [128] * WORLD]
    if not is_even:
        shapes += [[33 + 5 * r for r in range(WORLD)], [0 if r == 0 and WORLD > 1 else 40 for r in range(WORLD)]]
    with cp_attn.init(cp_attn.ContextParallelConfig(timeout=60.0, **config)) as context:
        kinds, dtypes = kinds_of(backend), [x for x in EPS if "native" in backend or x.itemsize == 2]
        for lengths, (kind, fields), dtype in itertools.product(shapes, kinds.items(), dtypes):
            failed = None
            try:
                play(context, device, lengths, fields, dtype, backend)
            except Exception:
                failed = traceback.format_exc()
            say(case=f"{kind} {lengths} {dtype}", failed=failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
