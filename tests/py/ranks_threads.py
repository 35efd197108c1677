"""One rank: attention with several threads, forward and backward, beside float64. Prints JSON lines."""

import os
import sys
import time

import torch
from launch import say

import cp_attn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZE = (2, 601, 6, 40)  # not a multiple of anything


def tasks():
    return len(os.listdir("/proc/self/task"))


def tasks_left(most):
    """Threads once those that have ended are out of the list, where they stay for a moment."""
    deadline = time.monotonic() + 2.0
    while tasks() > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return tasks()


def tensors(kv_heads):
    generator = torch.Generator().manual_seed(11)
    q, k, v, up = (
        torch.randn(SIZE[0], SIZE[1], heads, SIZE[3], generator=generator)
        for heads in (SIZE[2], kv_heads, kv_heads, SIZE[2])
    )
    return q, k, v, up


def truth(q, k, v, up, is_causal, dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal, enable_gqa=True
    ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), up.to(dtype))]


def check(context, kv_heads, is_causal):
    whole = tensors(kv_heads)
    q, k, v, up = (context.shard(x, 1) for x in whole)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = cp_attn.attention(*leaves, context, is_causal=is_causal, enable_gqa=True)
    found = [out.detach(), *torch.autograd.grad(out, leaves, up)]
    exact, plain = (truth(*whole, is_causal, dtype) for dtype in (torch.float64, torch.float32))
    ratios = []
    for got, right, yardstick in zip(found, exact, plain, strict=True):
        part = context.shard(right, 1)
        allowed = max((yardstick - right).abs().max().item(), 1e-6 * right.abs().max().item())
        ratios.append((got - part).abs().max().item() / allowed)
    return ratios, found


def main(case):
    config = cp_attn.ContextParallelConfig(timeout=60.0, ring_anything=True, ring_degree=WORLD)
    if case == "ulysses":
        config = cp_attn.ContextParallelConfig(timeout=60.0, ulysses_anything=True, ulysses_degree=WORLD)
    before = tasks()
    with cp_attn.init(config) as context:
        threads = context.threads
        made = tasks() - before
        worst, sums = 0.0, []
        for kv_heads in (6, 2):
            for is_causal in (False, True):
                ratios, found = check(context, kv_heads, is_causal)
                worst = max(worst, *ratios)
                sums.append(found[0].double().sum().item())
        running = tasks()
    say(
        case=case,
        threads=threads,
        made_early=made,
        running=running - before,
        left=tasks_left(before) - before,
        worst=worst,
        sums=sums,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.zeros(10).sum()
    main(sys.argv[1])
