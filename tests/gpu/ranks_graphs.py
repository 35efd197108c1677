"""One rank: calls captured in CUDA graphs on its GPU, replayed with other numbers. A JSON line for each case.

Usage: ranks_graphs.py DEVICE VARIANT [BACKEND]     DEVICE is cuda, or shared: one GPU for all ranks; VARIANT a key of
variants(world)
"""

import os
import sys
import traceback

import torch
from grid import kinds_of, variants
from launch import say

import cp_attn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH, DIM, ROUNDS = 2, 64, 4


class Inputs:
    """What a graph reads, at addresses that stay."""

    def __init__(self, lengths, kind, dtype):
        heads, kv_heads, self.is_causal, has_mask = kind
        self.rows = sum(lengths)
        self.q, self.k, self.v = (
            torch.empty(BATCH, lengths[RANK], n, DIM, dtype=dtype, device="cuda", requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        self.dout = torch.empty(BATCH, lengths[RANK], heads, DIM, dtype=dtype, device="cuda")
        self.mask = torch.rand(BATCH, 1, lengths[RANK], self.rows, device="cuda") > 0.3 if has_mask else None

    def draw(self, seed):
        draw = torch.Generator("cuda").manual_seed(seed * WORLD + RANK)
        with torch.no_grad():
            for x in (self.q, self.k, self.v, self.dout):
                x.normal_(generator=draw)


def step(context, inputs, lengths, backend):
    """Return (out, dq, dk, dv) of a forward and a backward."""
    flags = {"attn_mask": inputs.mask, "is_causal": inputs.is_causal, "enable_gqa": True, "seq_lens": lengths}
    out = cp_attn.attention(inputs.q, inputs.k, inputs.v, context, backend=backend, **flags)
    return out, *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)


def warm_up(function):
    """Run it before its capture, on a stream of its own, as torch wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)


def capture(function):
    """Return a graph, and what the function has returned, which each replay writes anew."""
    warm_up(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = function()
    return graph, outs


def compare(got, want):
    for name, mine, usual in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        tolerance = 1e-5 if usual.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(mine, usual, atol=tolerance, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def replayed(context, lengths, kind, dtype, backend):
    """Replays with other numbers, and calls of another size in between, against the same calls outside of a graph."""
    inputs, others = Inputs(lengths, kind, dtype), Inputs([2 * x for x in lengths], kind, dtype)
    inputs.draw(0)
    graph, outs = capture(lambda: step(context, inputs, lengths, backend))
    for seed in range(1, ROUNDS):
        inputs.draw(seed)
        others.draw(seed)
        step(context, others, [2 * x for x in lengths], backend)
        graph.replay()
        got = [x.clone() for x in outs]
        compare(got, step(context, inputs, lengths, backend))


def graphed_callable(context, lengths, kind, dtype, backend):
    """Forward and backward in graphs of their own, joined by autograd."""
    inputs = Inputs(lengths, kind, dtype)

    def attend(q, k, v):
        return cp_attn.attention(q, k, v, context, enable_gqa=True, seq_lens=lengths, backend=backend)

    def train(function):
        out = function(inputs.q, inputs.k, inputs.v)
        return out, *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)

    inputs.draw(0)
    sample = tuple(x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    graphed = torch.cuda.make_graphed_callables(attend, sample)
    for seed in range(1, ROUNDS):
        inputs.draw(seed)
        got = [x.clone() for x in train(graphed)]
        compare(got, train(attend))


def two_graphs(context, lengths, kind, dtype, backend):
    """Two graphs on two streams, one behind the other."""
    pair = [Inputs(lengths, kind, dtype) for _ in range(2)]
    for inputs in pair:
        inputs.draw(0)
    tapes = [capture(lambda x=x: step(context, x, lengths, backend)) for x in pair]
    streams = [torch.cuda.Stream() for _ in pair]
    for seed in range(1, ROUNDS):
        last = torch.cuda.current_stream()
        for inputs, (graph, _), stream in zip(pair, tapes, streams, strict=True):
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                inputs.draw(seed)
                graph.replay()
            last = stream
        torch.cuda.current_stream().wait_stream(last)
        for inputs, (_, outs) in zip(pair, tapes, strict=True):
            compare([x.clone() for x in outs], step(context, inputs, lengths, backend))


def refused(context, lengths, kind, dtype, backend):
    """Without lengths a context of uneven ones says what to pass; the capture ends, and calls go on."""
    if lengths.count(lengths[0]) == WORLD:
        return
    inputs = Inputs(lengths, kind, dtype)
    inputs.draw(0)
    caught = None
    try:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            cp_attn.attention(inputs.q, inputs.k, inputs.v, context, enable_gqa=True)
    except ValueError as error:
        caught = str(error)
    assert caught and "pass seq_lens=" in caught, caught
    step(context, inputs, lengths, backend)


def closed_early(config, lengths, kind, dtype, backend):
    """A context is closed while its graph lives, which goes on; nobody waits."""
    inputs = Inputs(lengths, kind, dtype)
    inputs.draw(0)
    with cp_attn.init(cp_attn.ContextParallelConfig(timeout=60.0, **config)) as context:
        graph, outs = capture(lambda: step(context, inputs, lengths, backend))
        inputs.draw(1)
        want = [x.clone() for x in step(context, inputs, lengths, backend)]
        torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    compare(outs, want)
    del graph


def attempt(case, function, *args):
    failed = None
    try:
        function(*args)
    except Exception:
        failed = traceback.format_exc()
    say(case=case, failed=failed)


def main(device, name, backend="native"):
    config = variants(WORLD)[name]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device == "cuda" else 0)
    is_even = not any(key.endswith("anything") for key in config)
    lengths = [128] * WORLD if is_even else [96 + 16 * r for r in range(WORLD)]
    dtypes = (torch.float32, torch.bfloat16) if "native" in backend else (torch.bfloat16,)
    with cp_attn.init(cp_attn.ContextParallelConfig(timeout=60.0, **config)) as context:
        for kind, fields in kinds_of(backend).items():
            for dtype in dtypes:
                attempt(f"{kind} {dtype}", replayed, context, lengths, fields, dtype, backend)
        for function in (graphed_callable, two_graphs, refused):
            attempt(function.__name__, function, context, lengths, (12, 12, False, False), torch.bfloat16, backend)
    attempt("closed_early", closed_early, config, lengths, (12, 12, False, False), torch.bfloat16, backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
