"""Calls captured in CUDA graphs, from Python, on simulated GPUs: what torch.cuda.graph does, without torch."""

import os
import time

import numpy as np
import pytest
import sim_gpu as sim
from gpu_ranks import open_gpus
from test_calls import RINGS, lengths_of, numbers
from thread_ranks import cut, oracle

from cp_attn import _C

LIB = sim.LIB
ROUNDS = 3


@pytest.fixture(params=["nccl", "ipc"])
def gpus(request):
    with open_gpus(request.param) as start:
        yield start


@pytest.fixture
def capture():
    """Have every rank capture a function of it; returns graphs and what the functions returned."""
    made = []

    def capture(ranks, function):
        def own(r):
            with sim.Graph(r) as graph:
                answer = function(r)
            return graph, answer

        graphs, answers = zip(*ranks.run(own), strict=True)
        made.extend(graphs)
        return graphs, answers

    yield capture
    for graph in made:
        graph.close()


def connect(ranks):
    x = numbers(1, 6, 6, 4)
    ranks.run(lambda r: sim.to_numpy(_C.attention(*[sim.Fast(x, r) for _ in range(3)], ranks.contexts[r])))


def gradients(ranks, parts):
    """What the same calls give on the host."""
    outs, lses = zip(*ranks.attention(*parts[:3], return_lse=True), strict=True)
    return ranks.run(
        lambda r: _C._attention_backward(
            ranks.contexts[r],
            *[x[r] for x in parts[:3]],
            outs[r],
            lses[r],
            parts[3][r],
            *[None, None, False, None, False, "sharded", "native"],
        )
    )


@pytest.mark.parametrize("name", RINGS)
def test_forward_and_backward(gpus, capture, name):
    """Launched with other numbers again and again, and calls of other sizes in between."""
    config = RINGS[name]
    ranks = gpus(**config)
    lengths = lengths_of(ranks.world, 4, not any(flag.endswith("anything") for flag in config))
    shape = 2, sum(lengths), 6, 8
    first = [cut(np.zeros(shape, np.float32), lengths) for _ in range(4)]
    given = [[sim.Fast(x[r].copy(), r) for x in first] for r in range(ranks.world)]
    connect(ranks)

    def calls(r):
        q, k, v, dout = given[r]
        context = ranks.contexts[r]
        out, lse = _C.attention(q, k, v, context, return_lse=True, seq_lens=lengths)
        rest = None, None, False, None, False, "sharded", "native"
        return out, *_C._attention_backward(context, q, k, v, out, lse, dout, *rest)

    before = [context._memory()[0] for context in ranks.contexts]
    graphs, answers = capture(ranks, calls)
    assert [context._memory()[0] for context in ranks.contexts] == before  # the workspace; windows may grow
    for round in range(ROUNDS):
        parts = [cut(numbers(*shape, seed=10 * round + i), lengths) for i in range(4)]
        parts = [[np.ascontiguousarray(x) for x in part] for part in parts]

        def launch(r, parts=parts, round=round):
            for array, part in zip(given[r], parts, strict=True):
                array.write(part[r])
            if round % 2:
                x = numbers(1, 6, 6, 64)  # a larger workspace than the graph's
                _C.attention(*[sim.Fast(x, r) for _ in range(3)], ranks.contexts[r])
            graphs[r].launch()

        ranks.run(launch)
        got = ranks.run(lambda r: [sim.to_numpy(x) for x in answers[r]])
        want = oracle(*[np.concatenate(part, 1) for part in parts[:3]])[0]
        np.testing.assert_allclose(np.concatenate([own[0] for own in got], 1), want, atol=1e-5)
        for own, host in zip(got, gradients(ranks, parts), strict=True):
            for a, b in zip(own[1:], host, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_cutting_and_gathering(gpus, capture):
    ranks = gpus(ring_degree=3)
    x = numbers(3, 7, 2, 5)
    given = [sim.Fast(np.zeros_like(x), r) for r in range(3)]
    connect(ranks)

    def calls(r):
        share = ranks.contexts[r].shard(given[r], 1)
        whole = ranks.contexts[r].gather(share, 1)
        return share, whole, ranks.contexts[r]._reduce_scatter(whole, 1, [2, 5, 0][r])

    graphs, answers = capture(ranks, calls)
    for round in range(ROUNDS):
        values = x + round
        ranks.run(lambda r, values=values: (given[r].write(values), graphs[r].launch()))
        for r, own in enumerate(ranks.run(lambda r: [sim.to_numpy(x) for x in answers[r]])):
            np.testing.assert_array_equal(own[0], np.array_split(values, 3, 1)[r])
            np.testing.assert_array_equal(own[1], values)
            np.testing.assert_allclose(own[2], np.split(3 * values, [2, 7], 1)[r], rtol=1e-6)


def refused(ranks, capture, error, words, **keywords):
    """All ranks raise it, while they capture, and the capture ends well."""
    given = [sim.Fast(numbers(1, 4, 2, 8), r) for r in range(ranks.world)]

    def call(r):
        with pytest.raises(error, match=words):
            _C.attention(given[r], given[r], given[r], ranks.contexts[r], **keywords)

    capture(ranks, call)


def test_what_cannot_be_captured(gpus, capture):
    ranks = gpus(ring_degree=2, ring_anything=True)
    refused(ranks, capture, _C.NotSupported, "make one call before the capture", seq_lens=[4, 4])
    connect(ranks)
    refused(ranks, capture, ValueError, "pass seq_lens=")
    connect(ranks)


def test_a_rank_that_does_not_capture(gpus):
    ranks = gpus(ring_degree=2)
    given = [sim.Fast(numbers(1, 4, 2, 8), r) for r in range(2)]
    connect(ranks)

    def call(r):
        graph = sim.Graph(r)
        if r:
            return _C.attention(*[given[r]] * 3, ranks.contexts[r])
        try:
            with graph:
                return _C.attention(*[given[r]] * 3, ranks.contexts[r])
        finally:
            graph.close()

    for caught in ranks.errors(call):
        assert type(caught) is ValueError and "in whether it is captured in a graph" in str(caught), repr(caught)


def test_a_context_is_closed_before_its_graphs(gpus, capture):
    """Nobody waits, what was captured goes on, and what it works with goes with the graphs."""
    ranks = gpus(ring_degree=2)
    x = numbers(1, 8, 2, 8)
    given = [sim.Fast(np.ascontiguousarray(x[:, 4 * r : 4 * r + 4]), r) for r in range(2)]
    connect(ranks)
    graphs, answers = capture(ranks, lambda r: _C.attention(*[given[r]] * 3, ranks.contexts[r]))
    start = time.monotonic()
    for context in ranks.contexts:
        context.close()
    assert time.monotonic() - start < 1.9
    assert LIB.simgpu_live().comms == (2 if os.environ["CP_ATTN_TRANSPORT"] == "nccl" else 0)
    ranks.run(lambda r: graphs[r].launch())
    outs = ranks.run(lambda r: sim.to_numpy(answers[r]))
    np.testing.assert_allclose(np.concatenate(outs, 1), oracle(x, x, x)[0], atol=1e-5)


def overwrite(old, new, device):
    """Copy on the device, in the order of its current stream."""
    sim.check(LIB.cudaSetDevice(device))
    stream = sim.Fast.streams[device].handle
    sim.check(LIB.cudaMemcpyAsync(old.data_ptr(), new.data_ptr(), old.nbytes, 3, stream))
    sim.Fast.streams[device].wait()


def test_the_workspace_is_of_torchs_pool(gpus, capture):
    """Torch's allocator has a pool for the graph: what was lent is given back at once, and stays the graph's."""
    torch = pytest.importorskip("torch")
    import sim_tensor

    ranks = gpus(ring_degree=2)
    x = numbers(1, 8, 2, 8)
    given = [sim_tensor.put(torch.from_numpy(x[:, 4 * r : 4 * r + 4].copy()), r) for r in range(2)]
    ranks.run(lambda r: sim_tensor.get(_C.attention(*[given[r]] * 3, ranks.contexts[r])))
    lent = len(sim_tensor.OWNED)
    graphs, answers = capture(ranks, lambda r: _C.attention(*[given[r]] * 3, ranks.contexts[r]))
    assert len(sim_tensor.OWNED) == lent
    assert [len(graph.pool) for graph in graphs] == [2, 2]  # the answer and the workspace
    for round in range(ROUNDS):
        values = [torch.from_numpy(x[:, 4 * r : 4 * r + 4].copy()) * (round + 1) for r in range(2)]
        new = [sim_tensor.put(values[r], r) for r in range(2)]
        ranks.run(lambda r, new=new: overwrite(given[r], new[r], r))
        ranks.run(lambda r: graphs[r].launch())
        outs = ranks.run(lambda r: sim_tensor.get(answers[r]).numpy())
        want = oracle(*[x * (round + 1)] * 3)[0]
        np.testing.assert_allclose(np.concatenate(outs, 1), want, atol=1e-5)


def test_calls_of_an_uneven_model(gpus, capture, monkeypatch):
    """What its streams tell is what a graph has to know: of joined rows, forward and launched anew."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    import sim_tensor

    from cp_attn import _lengths
    from cp_attn.models.exchange import Exchange, part
    from cp_attn.models.streams import Streams

    monkeypatch.setattr(_lengths, "is_captured", lambda x: bool(sim.Graph.under_way))
    ranks = gpus(ring_degree=3, ring_anything=True)
    lengths, streams = [0] * 3, [Streams() for _ in range(3)]
    for r in range(3):
        for name, rows in ("image", 15), ("text", 7):
            count = part(rows, r, 3)[1]
            lengths[r] += count
            streams[r].add_split(name, rows, count)
    x = numbers(1, sum(lengths), 2, 8)
    parts = [np.ascontiguousarray(own) for own in cut(x, lengths)]
    given = [sim_tensor.put(torch.from_numpy(own), r) for r, own in enumerate(parts)]

    def call(r, told=True):
        flags = None, False, None, False, False, "native"
        return Exchange(ranks.contexts[r]).attend(*[given[r]] * 3, *flags, streams[r] if told else None)

    def untold(r):
        with pytest.raises(ValueError, match="pass seq_lens="):
            call(r, told=False)

    with torch.no_grad():
        ranks.run(call)
    capture(ranks, untold)
    ranks.run(call)
    graphs, answers = capture(ranks, call)
    for round in range(ROUNDS):
        new = [sim_tensor.put(torch.from_numpy(own) * (round + 1), r) for r, own in enumerate(parts)]
        ranks.run(lambda r, new=new: (overwrite(given[r], new[r], r), graphs[r].launch()))
        outs = ranks.run(lambda r: sim_tensor.get(answers[r]).numpy())
        np.testing.assert_allclose(np.concatenate(outs, 1), oracle(*[x * (round + 1)] * 3)[0], atol=1e-5)


def test_compiled_code_leaves_nothing_in_torchs_pool(gpus, capture):
    """Torch warms up in the pool of the graphs, and admits nothing else that stays there."""
    torch = pytest.importorskip("torch")
    import sim_tensor

    ranks = gpus(ring_degree=2)
    for context in ranks.contexts:
        context._mark_compiled()
    x = torch.from_numpy(numbers(1, 4, 2, 8))
    given = [sim_tensor.put(x, r) for r in range(2)]
    lent = len(sim_tensor.OWNED)
    ranks.run(lambda r: sim_tensor.get(_C.attention(*[given[r]] * 3, ranks.contexts[r])))
    assert len(sim_tensor.OWNED) == lent and ranks.contexts[0]._memory()[0] > 0
    graphs, _ = capture(ranks, lambda r: _C.attention(*[given[r]] * 3, ranks.contexts[r]))
    assert [len(graph.pool) for graph in graphs] == [2, 2]
