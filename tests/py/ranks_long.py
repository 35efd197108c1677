"""One rank: scenes of thousands of calls, or of contexts side by side. Prints a JSON line for each.

q is 0 in all attention, so that a row is the mean of the values; these are powers of two, so that no two sums agree.
"""

import functools
import os
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
from footprint import footprint, grown
from launch import say

import cp_attn
from cp_attn import _C

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RING = dict(ring_degree=WORLD, ring_anything=True)
ULYSSES = dict(ulysses_degree=WORLD, ulysses_anything=True)


def config(fields):
    return cp_attn.ContextParallelConfig(**fields, timeout=60.0)


@functools.cache
def values(lengths):
    """Return the whole (1, rows, 3, 4)."""
    return (2.0 ** torch.arange(sum(lengths), dtype=torch.float64))[None, :, None, None].expand(1, -1, 3, 4)


def own(x, lengths):
    return torch.split(x, lengths, 1)[RANK]


def check(got, want):
    got = torch.as_tensor(got)
    if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-12, atol=0):
        raise AssertionError(f"{got.flatten()[:9]} of {got.shape} in the place of {want.flatten()[:9]} of {want.shape}")


# --- calls ---


def attend(context, lengths, factor=1.0):
    v = factor * own(values(lengths), lengths)
    out = cp_attn.attention(torch.zeros_like(v), v, v, context)
    check(out, factor * values(lengths).mean(1, True).expand_as(v))


def attend_arrays(context, lengths):
    v = own(values(lengths), lengths)
    out = cp_attn.attention(torch.zeros_like(v).numpy(), v.numpy(), v.numpy(), context)
    check(out, values(lengths).mean(1, True).expand_as(v))


def gather(context, lengths):
    check(context.gather(own(values(lengths), lengths), 1), values(lengths))


def shard(context, lengths):
    check(context.shard(values(lengths), 1), torch.tensor_split(values(lengths), WORLD, 1)[RANK])


def backward(context, lengths):
    """Of sum(rows * out) with keys and rows 1, 2, 3, ...: dq is their covariance with v, dk 0 and dv the mean row."""
    whole = values(lengths)
    rows = torch.arange(1.0, 1.0 + sum(lengths), dtype=torch.float64)[None, :, None, None].expand_as(whole)
    q, k, v = (own(x, lengths).clone().requires_grad_() for x in (0 * whole, rows, whole))
    out = cp_attn.attention(q, k, v, context)
    out.backward(own(rows, lengths))
    # dP = 4 * row * v, and the scale is 1 / sqrt(4).
    covariance = (whole * rows).mean() - whole.mean() * rows.mean()
    check(q.grad, 2 * covariance * own(rows, lengths))
    check(k.grad, torch.zeros_like(k))
    check(v.grad, rows.mean().expand_as(v))


# HNG-1: a rank does not see its peer's length, and may not take one of these signatures for another.
PAIRS = ((2, 2), (2, 3), (3, 2), (2, 2), (3, 3), (2, 3))
# In turn and more than a context keeps plans for (CP_PLAN_CACHE_SIZE): each one's plan has gone when it comes again.
MANY = [(2 + i % 10, 2 + i // 10) for i in range(100)]
TURNS = 1000  # of ten calls each


def all_ranks(pair):
    return *pair, *[1] * (WORLD - 2)


def turn(context, number):
    """Make ten calls: the pairs, each other kind of call with one of them, and one of the many."""
    for pair in PAIRS:
        (attend_arrays if number % 2 else attend)(context, all_ranks(pair))
    for call in (gather, shard, backward):
        call(context, all_ranks(PAIRS[1 + number % 4]))
    kind = (attend, gather, backward)[number % 100 % 3]
    kind(context, all_ranks(MANY[number % 100]))


def many_calls(fields):
    with cp_attn.init(config(fields)) as context:
        for number in range(TURNS):
            if number == TURNS // 5:
                before, allocations = footprint() | held(context), _C._mem_stats()[1]
            turn(context, number)
        after = footprint() | held(context)
        assert not grown(before, after), grown(before, after)
        # As many plans as there were turns were made anew: what has gone was under test.
        assert _C._mem_stats()[1] - allocations >= TURNS - TURNS // 5


def held(context):
    return dict(zip(("workspace", "window"), context._memory(), strict=True))


def calls_ring():
    many_calls(RING)


def calls_ulysses():
    many_calls(ULYSSES)


# --- contexts ---


def many_contexts():
    """Closed by hand, by their config, and by nobody."""
    for number in range(1000):
        if number == 200:
            before = footprint()
        cfg = config((RING, ULYSSES)[number % 2])
        if number % 3 == 0:
            with cp_attn.init(cfg) as context:
                attend(context, all_ranks((2, 3)))
        elif number % 3 == 1:
            attend(cfg, all_ranks((3, 2)))
            cp_attn.close(cfg)
        else:
            attend(cp_attn.init(cfg), all_ranks((3, 3)))
    assert not grown(before, footprint()), grown(before, footprint())


def alternately():
    """Contexts of two configs, and two of the same config."""
    by_config = config(RING)
    with cp_attn.init(by_config) as ring, cp_attn.init(config(ULYSSES)) as ulysses:
        for number in range(300):
            pair = all_ranks(PAIRS[number % len(PAIRS)])
            attend(by_config, all_ranks(MANY[number % len(MANY)]))
            (attend, gather, backward)[number % 3](ring, pair)
            (backward, attend, gather)[number % 3](ulysses, pair)
    attend(by_config, all_ranks((2, 3)))
    cp_attn.close(by_config)


def at_once(calls):
    """Make all calls at the same time, each in a thread of its own, with its number."""
    barrier = threading.Barrier(len(calls))

    def start(number, call):
        barrier.wait()
        call(number)

    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(start, *item) for item in enumerate(calls)]:
            done.result()


def in_threads():
    """A context each, all at once; each thread has values of its own."""
    contexts = [cp_attn.init(config(fields)) for fields in (RING, ULYSSES, RING, ULYSSES)]

    def work(number):
        for i in range(100):
            attend(contexts[number], all_ranks(PAIRS[(i + number) % len(PAIRS)]), 1.0 + number)

    at_once([work] * len(contexts))
    for context in contexts:
        context.close()


def models():
    """Two models with configs of their own, in turn, at once, and one alone after the other is disabled."""
    from toy_model import Toy

    plan = {"": {"hidden": cp_attn.ContextParallelInput(1, 3)}, "head": cp_attn.ContextParallelOutput(1, 3)}
    pair = Toy(), Toy(heads=4)
    for model, fields in zip(pair, (RING, ULYSSES), strict=True):
        cp_attn.enable_parallelism(model, config(fields), cp_plan=plan)

    def forward(model, rows):
        hidden = 2.0 ** torch.arange(rows, dtype=torch.float64)[None, :, None].expand(1, rows, 4)
        check(model(hidden), hidden.mean(1, True).expand_as(hidden))

    for rows in range(WORLD, WORLD + 30):
        forward(pair[0], rows)
        forward(pair[1], rows + 1)

    def work(number):
        for i in range(50):
            forward(pair[number], WORLD + number + i % 7)

    at_once([work, work])
    cp_attn.disable_parallelism(pair[0])
    forward(pair[0], 5)
    forward(pair[1], WORLD + 2)
    cp_attn.disable_parallelism(pair[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        failed = None
        try:
            globals()[name]()
        except Exception:
            failed = traceback.format_exc()[-2000:]
        say(scene=name, failed=failed)
