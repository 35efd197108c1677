"""One process and one GPU: streams, answers, refusals."""

import os

import pytest
import torch

import cp_attn

pytestmark = pytest.mark.gpus(1)


@pytest.fixture
def context(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid() % 20000 + 20000)}).items():
        monkeypatch.setenv(name, value)
    with cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=1, timeout=60.0)) as context:
        yield context


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda", dtype=dtype)


def right(q, out):
    want = torch.nn.functional.scaled_dot_product_attention(*[q.double().transpose(1, 2)] * 3).transpose(1, 2)
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)


def test_side_streams(context):
    """Calls on streams in turns, behind work that is still to come on them."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    made = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(10_000_000)
            q = random(1, 333, 4, 64)
            made.append((q, cp_attn.attention(q, q, q, context)))
    torch.cuda.synchronize()
    for q, out in made:
        right(q, out)


def test_the_current_device_stays(context):
    q = random(1, 64, 2, 64)
    before = torch.cuda.current_device()
    right(q, cp_attn.attention(q, q, q, context))
    assert torch.cuda.current_device() == before


def test_host_and_gpu_in_one_context(context):
    q = random(1, 64, 2, 64)
    for x in (q, q.cpu(), q):
        out = cp_attn.attention(x, x, x, context)
        assert out.device == x.device
        right(x, out)


def test_views_are_read_in_place(context):
    q = random(2, 4, 100, 128).transpose(1, 2)[..., ::2]
    right(q, cp_attn.attention(q, q, q, context))


def test_cutting_and_gathering(context):
    x = random(3, 5, 7)
    assert torch.equal(context.shard(x, 1), x) and torch.equal(context.gather(x, 2), x)


def test_mixed_devices(context):
    q = random(1, 64, 2, 64)
    with pytest.raises(ValueError, match="q is on cuda:0 and v on cpu"):
        cp_attn.attention(q, q, q.cpu(), context)
    right(q, cp_attn.attention(q, q, q, context))
