"""CUDA tensors through Python, gate, plan, executor, CUDA device, NCCL or windows: simulated GPUs, a thread a rank.

What runs is `cp_attn._cuda` compiled for the host (tests/simgpu/); devices are asynchronous, copies and kernels late.
"""

import gc

import numpy as np
import pytest
import sim_gpu as sim
from gpu_ranks import open_gpus
from thread_ranks import cut, oracle

from cp_attn import _C

LIB = sim.LIB

RINGS = {
    "ring2": {"ring_degree": 2},
    "ring3": {"ring_degree": 3, "ring_anything": True},
    "ulysses2": {"ulysses_degree": 2},
    "ulysses3": {"ulysses_degree": 3, "ulysses_anything": True},
    "unified2x2": {"ring_degree": 2, "ulysses_degree": 2},
    "unified3x2": {"ring_degree": 3, "ulysses_degree": 2, "unified_anything": True},
}
MALLOC, KERNEL = b"cudaMalloc", b"kernel"  # borrowed by the runtime
KINDS = {"capsules": sim.Array, "exchange table": sim.Fast}


@pytest.fixture(params=["nccl", "ipc"])
def gpus(request):
    with open_gpus(request.param) as start:
        yield start


@pytest.fixture
def gpus_of_nccl():
    with open_gpus("nccl") as start:
        yield start


@pytest.fixture
def gpus_of_ipc():
    with open_gpus("ipc") as start:
        yield start


@pytest.fixture
def gpus_of_any():
    with open_gpus("auto") as start:
        yield start


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def lengths_of(world, rows, is_even):
    return [rows] * world if is_even else [rows + (r * 5) % 4 - 1 for r in range(world)]


def backward(ranks, put, q, k, v, out, lse, dout, **keywords):
    def call(r):
        arrays = [put(x[r], r) for x in (q, k, v, out, lse, dout)]
        mask = keywords.get("mask")
        mask = put(mask[r], r) if mask else None
        rest = mask, keywords.get("is_causal", False), None, True, "sharded", "native"
        grads = _C._attention_backward(ranks.contexts[r], *arrays, None, *rest)
        return [sim.to_numpy(x) if not isinstance(x, np.ndarray) else x for x in grads]

    return ranks.run(call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RINGS)
def test_forward_and_backward(gpus, name, kind):
    config = RINGS[name]
    ranks, make = gpus(**config), KINDS[kind]
    world = ranks.world
    is_even = not any(flag.endswith("anything") for flag in config)
    lengths = lengths_of(world, 4, is_even)
    rows = sum(lengths)
    for seed, (dtype, heads, kv_heads, is_causal, has_mask) in enumerate(
        [(np.float32, 6, 6, False, False), (np.float32, 12, 6, True, True), (np.float16, 6, 6, False, True)]
    ):
        q = numbers(2, rows, heads, 8, seed=seed, dtype=dtype)
        k = numbers(2, rows, kv_heads, 8, seed=seed + 10, dtype=dtype)
        v = numbers(2, rows, kv_heads, 8, seed=seed + 20, dtype=dtype)
        dout = numbers(2, rows, heads, 8, seed=seed + 30, dtype=dtype)
        mask = numbers(2, 1, rows, rows, seed=seed + 40) > -1 if has_mask else None
        want, want_lse = oracle(q, k, v, mask, is_causal)
        tolerance = 2e-2 if dtype is np.float16 else 1e-5
        parts = [cut(x, lengths) for x in (q, k, v, dout)]
        masks = cut(mask, lengths, 2) if has_mask else None

        def call(r, parts=parts, masks=masks, is_causal=is_causal):
            given = [make(x[r], r) for x in parts[:3]]
            keywords = {"attn_mask": make(masks[r], r)} if masks else {}
            made = _C.attention(
                *given, ranks.contexts[r], is_causal=is_causal, enable_gqa=True, return_lse=True, **keywords
            )
            assert all(type(x) is (_C.Buffer if make is sim.Array else sim.Fast) for x in made)
            return [sim.to_numpy(x) for x in made]

        for _ in range(2):  # new to the context, then known to it
            outs, lses = zip(*ranks.run(call), strict=True)
            np.testing.assert_allclose(np.concatenate(outs, 1), want, atol=tolerance)
            np.testing.assert_allclose(np.concatenate(lses, 1), want_lse, atol=tolerance)
        # The gradients are those that the same call gets on the host.
        own = [*parts[:3], outs, lses, parts[3]]
        keywords = {"mask": masks, "is_causal": is_causal}
        on_host = backward(ranks, lambda x, r: x, *own, **keywords)
        on_gpu = backward(ranks, lambda x, r: make(np.ascontiguousarray(x), r), *own, **keywords)
        for host, gpu in zip(on_host, on_gpu, strict=True):
            for a, b in zip(host, gpu, strict=True):
                np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_and_gathering(gpus, kind):
    ranks, make = gpus(ring_degree=3, ring_anything=True), KINDS[kind]
    for dtype in (np.float32, np.float16, np.int64, np.bool_, np.uint8):
        x = (numbers(3, 7, 2, 5, seed=4) * 9).astype(dtype)
        for dim in range(4):
            parts = np.array_split(x, 3, dim)
            shares = ranks.run(lambda r, x=x, d=dim: sim.to_numpy(ranks.contexts[r].shard(make(x, r), d)))
            wholes = ranks.run(
                lambda r, p=parts, d=dim: sim.to_numpy(ranks.contexts[r].gather(make(p[r].copy(), r), d))
            )
            for r in range(3):
                assert np.array_equal(shares[r], parts[r]) and np.array_equal(wholes[r], x)
    x = numbers(3, 4, 6)
    sums = ranks.run(lambda r: sim.to_numpy(ranks.contexts[r]._reduce_scatter(make(x, r), 1, [0, 3, 1][r])))
    for r, rows in enumerate(np.split(3 * x, [0, 3], 1)):
        np.testing.assert_allclose(sums[r], rows, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_strides(gpus, kind):
    ranks, make = gpus(ring_degree=2), KINDS[kind]
    base = numbers(2, 4, 6, 16)
    want = oracle(*[np.concatenate([base.transpose(0, 2, 1, 3)[..., ::2]] * 2, 1)] * 3)[0][:, :6]
    for out in ranks.run(
        lambda r: sim.to_numpy(_C.attention(*[make(base.transpose(0, 2, 1, 3)[..., ::2], r)] * 3, ranks.contexts[r]))
    ):
        np.testing.assert_allclose(out, want, atol=1e-5)
    turned = numbers(3, 4, 5, 6).transpose(2, 1, 3, 0)
    for caught in ranks.errors(lambda r: ranks.contexts[r].gather(make(turned, r), 1)):
        assert type(caught) is _C.NotSupported and "contiguous" in str(caught)
    assert np.array_equal(sim.to_numpy(ranks.run(lambda r: ranks.contexts[r].gather(make(base, r), 0))[1])[2:], base)


def test_host_and_gpu_in_one_context(gpus):
    ranks = gpus(ulysses_degree=2)
    q = numbers(1, 8, 4, 8)
    want = oracle(q, q, q)[0]
    for turn in range(4):
        make = [lambda x, r: x, sim.Array, sim.Fast][turn % 3]
        outs = ranks.run(lambda r, make=make: _C.attention(*[make(q[:, 4 * r : 4 * r + 4], r)] * 3, ranks.contexts[r]))
        outs = [x if isinstance(x, np.ndarray) else sim.to_numpy(x) for x in outs]
        np.testing.assert_allclose(np.concatenate(outs, 1), want, atol=1e-5)


def attend(ranks, make):
    x = numbers(1, 4, 2, 8)
    return lambda r: _C.attention(*[make(x, r) for _ in range(3)], ranks.contexts[r])


def works(ranks, make):
    want = oracle(*[np.concatenate([numbers(1, 4, 2, 8)] * ranks.world, 1)] * 3)[0][:, :4]
    for out in ranks.run(attend(ranks, make)):
        np.testing.assert_allclose(out if isinstance(out, np.ndarray) else sim.to_numpy(out), want, atol=1e-5)


def refused(ranks, make, error, *words):
    for caught in ranks.errors(attend(ranks, make)):
        assert type(caught) is error, repr(caught)
        assert all(word in str(caught) for word in words), str(caught)


def test_refusals(gpus_of_nccl):
    """The same sentence on all ranks, and the context goes on, on the host and on GPUs."""
    ranks = gpus_of_nccl(ring_degree=3)
    refused(ranks, lambda x, r: sim.Array(x, r) if r else x, ValueError, "rank 1", "device", "GPU")
    refused(ranks, lambda x, r: sim.Array(x, r % 2), ValueError, "ranks 0 and 2 are on one GPU", "cuda:0", "simulated")
    works(ranks, lambda x, r: x)
    LIB.simgpu_set_device_count(2)
    x = numbers(1, 4, 2, 8)
    arrays = [sim.Array(x, r % 2) for r in range(3)]
    for array in arrays:
        array.memory.device = 2 if array is arrays[2] else array.memory.device
    for caught in ranks.errors(lambda r: _C.attention(*[arrays[r]] * 3, ranks.contexts[r])):
        assert type(caught) is ValueError and "q is on cuda:2" in str(caught) and "sees 2" in str(caught)
    arrays[2].memory.device = 0
    LIB.simgpu_set_device_count(6)
    works(ranks, sim.Array)
    refused(ranks, lambda x, r: sim.Array(x, 5 if r == 1 else r), ValueError, "q is on cuda:5", "device 1")
    mixed = ranks.errors(lambda r: _C.attention(sim.Array(x, r), sim.Array(x, r), x, ranks.contexts[r]))
    assert all(type(e) is ValueError and "q is on cuda:0 and v on cpu" in str(e) for e in mixed)
    works(ranks, sim.Fast)


def test_a_shared_gpu_is_for_nccl_to_judge(gpus_of_nccl, monkeypatch):
    monkeypatch.setenv("CP_ATTN_SHARED_GPU", "1")
    ranks = gpus_of_nccl(ring_degree=2)
    refused(ranks, lambda x, r: sim.Array(x, 0), _C.CommError, "GPU of its own")


@pytest.mark.parametrize(
    "function", ["cudaGetDeviceProperties", "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags"]
)
def test_a_device_that_fails(gpus, function):
    """Before or while the ranks connect: all get the same error; the context goes on, or says why not."""
    ranks = gpus(ring_degree=2)
    name = function.encode()  # borrowed by the runtime
    LIB.simgpu_fail_call(name, 0, 719)
    caught = ranks.errors(attend(ranks, sim.Array))
    assert all(isinstance(e, _C.Error) and "unspecified launch failure" in str(e) for e in caught), caught
    LIB.simgpu_fail_call(name, -1, 0)
    if function == "cudaGetDeviceProperties":
        works(ranks, sim.Array)
    else:
        refused(ranks, sim.Array, _C.CommError, "broken")


def test_memory_that_runs_out_in_the_first_call(gpus):
    """At any allocation of any rank: all raise, nobody waits; what is refused before the ranks connect can go on."""
    outcomes = set()
    for count in range(300):
        ranks = gpus(ring_degree=2, timeout=20)
        _C._mem_fail_after(count)
        caught = ranks.errors(attend(ranks, sim.Fast))
        _C._mem_fail_after(-1)
        assert all(caught) or not any(caught), (count, caught)
        if not any(caught):
            break
        assert all(isinstance(e, (MemoryError, _C.CommError)) for e in caught), (count, caught)
        assert all("cannot allocate" in str(e) for e in caught), (count, caught)
        is_broken = "broken" in str(ranks.errors(attend(ranks, sim.Fast))[0])
        outcomes.add(is_broken)
        if not is_broken:
            works(ranks, sim.Fast)
        ranks.close()
    assert outcomes == {True, False}, outcomes
    assert count < 299


def test_a_transfer_that_fails(gpus_of_nccl):
    ranks = gpus_of_nccl(ring_degree=2, timeout=20)
    works(ranks, sim.Array)
    LIB.simnccl_fail_after(1)
    ranks.errors(attend(ranks, sim.Array))  # it is noticed after the call, or in it
    caught = None
    for _ in range(200):
        caught = ranks.errors(attend(ranks, sim.Array))
        if all(caught):
            break
    assert all(isinstance(e, _C.CommError) and "NCCL" in str(e) for e in caught), caught
    LIB.simnccl_fail_after(-1)


def test_calls_follow_the_callers_stream(gpus):
    """Inputs written late on the caller's stream, two streams in turns, nobody waits: what is read last is right."""
    ranks = gpus(ring_degree=2)
    more = [sim.Stream(device) for device in range(2)]
    first = list(sim.Fast.streams)
    wants, outs = [], []
    for turn in range(6):
        sim.Fast.streams = more + first[2:] if turn % 2 else first
        x = numbers(1, 8, 2, 8, seed=turn)
        wants.append(oracle(x, x, x)[0])
        outs.append(
            ranks.run(
                lambda r, x=x: _C.attention(
                    *[sim.Fast(np.ascontiguousarray(x[:, 4 * r : 4 * r + 4]), r)] * 3, ranks.contexts[r]
                )
            )
        )
    for want, parts in zip(wants, outs, strict=True):
        np.testing.assert_allclose(np.concatenate([sim.to_numpy(x) for x in parts], 1), want, atol=1e-5)
    del outs, parts
    gc.collect()
    for stream in more:
        stream.wait()
        stream.close()
    sim.Fast.streams = first


def test_a_buffer_orders_the_stream_that_takes_it(gpus):
    ranks = gpus(ring_degree=2)
    for out in ranks.run(attend(ranks, sim.Array)):
        stream = sim.Stream(out.__dlpack_device__()[1])
        before = LIB.simgpu_stats().awaits
        for number, awaits in ((stream.handle.value, 1), (-1, 0), (1, 0), (None, 0)):
            out.__dlpack__(stream=number)
            assert LIB.simgpu_stats().awaits - before == awaits
            before = LIB.simgpu_stats().awaits
        with pytest.raises(BufferError, match="2, "):
            out.__dlpack__(dl_device=(1, 0))
        stream.wait()
        stream.close()


def test_the_workspace_is_the_librarys(gpus, monkeypatch):
    """It grows there, a refusal is an agreed MemoryError, and closing gives everything back."""
    ranks = gpus(ring_degree=2)
    before = len(sim.OWNED)
    works(ranks, sim.Fast)
    assert len(sim.OWNED) == before + 2
    held = [context._memory()[0] for context in ranks.contexts]
    x = numbers(1, 40, 2, 8)
    call = [lambda r: _C.attention(*[sim.Fast(x, r) for _ in range(3)], ranks.contexts[r])][0]
    monkeypatch.setattr(sim, "REFUSE", 1 << 10)
    for caught in ranks.errors(call):
        assert type(caught) is MemoryError and "the workspace" in str(caught) and "full up" in str(caught)
    assert [context._memory()[0] for context in ranks.contexts] == held
    works(ranks, sim.Fast)
    monkeypatch.setattr(sim, "REFUSE", None)
    for out in ranks.run(call):
        np.testing.assert_allclose(sim.to_numpy(out), oracle(*[np.concatenate([x, x], 1)] * 3)[0][:, :40], atol=1e-5)
    assert len(sim.OWNED) == before + 2
    for context in ranks.contexts:
        context.close()
    assert len(sim.OWNED) == before


def test_a_known_call_waits_for_nothing_and_allocates_nothing(gpus):
    ranks = gpus(ring_degree=3)
    x = [[sim.Fast(numbers(1, 4, 2, 8, seed=r), r) for _ in range(3)] for r in range(3)]
    call = lambda r: _C.attention(*x[r], ranks.contexts[r])  # noqa: E731
    kept = [ranks.run(call)]
    before = LIB.simgpu_stats()
    kept.append(ranks.run(call))
    after = LIB.simgpu_stats()
    assert after.host_waits == before.host_waits
    assert after.allocations - before.allocations == 3  # the answers
    assert after.frees == before.frees


# --- windows between GPUs ---


def test_windows_where_gpus_reach_each_other(gpus_of_any):
    refused(gpus_of_any(ring_degree=2), lambda x, r: sim.Array(x, 0), ValueError, "are on one GPU")
    works(gpus_of_any(ring_degree=3), sim.Array)
    assert LIB.simgpu_stats().groups == 0
    LIB.simgpu_set_peer_access(0, 1, False)
    works(gpus_of_any(ring_degree=2), sim.Array)
    assert LIB.simgpu_stats().groups > 0


def test_windows_that_cannot_be(gpus_of_ipc, monkeypatch):
    """The same sentence on all ranks, and the context goes on, with another transport."""
    ranks = gpus_of_ipc(ring_degree=2)
    LIB.simgpu_set_peer_access(1, 0, False)
    refused(ranks, lambda x, r: sim.Array(x, 0), ValueError, "ipc", "threads of one process on one GPU (cuda:0")
    words = "CP_ATTN_TRANSPORT is ipc", "the GPU of rank 1", "has no peer access to that of rank 0"
    refused(ranks, sim.Array, ValueError, *words)
    works(ranks, lambda x, r: x)
    monkeypatch.setenv("CP_ATTN_TRANSPORT", "pigeons")
    refused(ranks, sim.Array, ValueError, 'CP_ATTN_TRANSPORT is "pigeons"', "allowed: ipc, nccl, auto")
    monkeypatch.setenv("CP_ATTN_TRANSPORT", "nccl")
    works(ranks, sim.Array)


def test_a_gpu_without_memory_for_a_window(gpus_of_ipc):
    """A MemoryError of all ranks, and the context goes on, with calls that it knows and new ones."""
    ranks = gpus_of_ipc(ring_degree=2)
    works(ranks, sim.Fast)
    x = numbers(1, 5000, 8, 32)
    given = [[sim.Fast(x, r) for _ in range(3)] for r in range(2)]
    gather = lambda r: sim.to_numpy(ranks.contexts[r].gather(given[r][0], 1))  # noqa: E731
    LIB.simgpu_fail_call(MALLOC, 0, 2)
    for caught in ranks.errors(gather):
        assert type(caught) is MemoryError and "no memory for the window of rank" in str(caught), repr(caught)
    LIB.simgpu_fail_call(MALLOC, -1, 0)
    works(ranks, sim.Fast)
    for whole in ranks.run(gather):
        assert np.array_equal(whole, np.concatenate([x, x], 1))
    works(ranks, sim.Fast)


@pytest.mark.parametrize(
    "function", ["cudaHostAlloc", "cudaHostGetDevicePointer", "cudaIpcGetMemHandle", "cudaDeviceEnablePeerAccess"]
)
def test_what_fails_while_windows_are_made(gpus_of_ipc, function):
    """On one rank: all raise at once, and the context says why it is broken."""
    ranks = gpus_of_ipc(ring_degree=2, timeout=20)
    name = function.encode()  # borrowed by the runtime
    LIB.simgpu_fail_call(name, 0, 719)
    caught = ranks.errors(attend(ranks, sim.Array))
    LIB.simgpu_fail_call(name, -1, 0)
    assert all(isinstance(e, _C.Error) and "unspecified launch failure" in str(e) for e in caught), caught
    refused(ranks, sim.Array, _C.CommError, "broken", "unspecified launch failure")


@pytest.mark.parametrize("count", range(0, 12, 3))
def test_a_kernel_that_fails_between_windows(gpus_of_ipc, count):
    """The other rank's GPU, which waits for it, is let go long before the deadline; its next call raises."""
    ranks = gpus_of_ipc(ring_degree=2, timeout=20)
    works(ranks, sim.Fast)
    LIB.simgpu_fail_call(KERNEL, count, 719)
    caught = ranks.errors(attend(ranks, sim.Fast))
    LIB.simgpu_fail_call(KERNEL, -1, 0)
    assert any(caught), caught
    refused(ranks, sim.Fast, _C.CommError, "broken", "unspecified launch failure")


# --- chunks of heads ---


@pytest.mark.parametrize("asked, rows, chunks", [("", 1152, 2), ("", 16, 1), ("1", 1152, 1), ("3", 16, 3)])
def test_chunks_of_heads(gpus_of_nccl, monkeypatch, asked, rows, chunks):
    """As many as CP_ATTN_HEAD_CHUNKS says, else as pay by what is known of the GPUs, which say that they are of sm_90:
    FLUX's heads go in two, a small call's in one. An exchange there and one back for each."""
    monkeypatch.setenv("CP_ATTN_HEAD_CHUNKS", asked)
    ranks = gpus_of_nccl(ulysses_degree=4)
    LIB.simgpu_run_dry()
    x = [sim.Array(np.zeros((1, rows, 24, 128), np.float16), r) for r in range(4)]
    ranks.run(lambda r: _C.attention(x[r], x[r], x[r], ranks.contexts[r]))
    before = LIB.simgpu_stats().groups
    made = ranks.run(lambda r: _C.attention(x[r], x[r], x[r], ranks.contexts[r]))
    assert LIB.simgpu_stats().groups - before == 4 * 2 * chunks
    assert [out.shape for out in made] == [(1, rows, 24, 128)] * 4
