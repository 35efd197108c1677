"""Two ranks that are threads of this process, a GPU each: streams, answers, refusals."""

import pytest
import torch
from thread_ranks import Ranks

import cp_attn

BOTH = {"ring": {"ring_degree": 2}, "ulysses": {"ulysses_degree": 2}}


@pytest.fixture(params=["nccl", "auto"])
def transport(request, monkeypatch):
    monkeypatch.setenv("CP_ATTN_TRANSPORT", request.param)


@pytest.fixture(params=BOTH)
def ranks(request, transport):
    with Ranks(2, timeout=60.0, **BOTH[request.param]) as ranks:
        yield ranks


def random(r, *shape):
    return torch.randn(shape, device=f"cuda:{r}")


def attend(ranks, q, r):
    return cp_attn.attention(q[r], q[r], q[r], ranks.contexts[r])


def right(q, outs):
    whole = torch.cat([x.cpu() for x in q], 1).double().transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole).transpose(1, 2)
    torch.testing.assert_close(torch.cat([x.cpu() for x in outs], 1).double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.gpus(2)
def test_side_streams(ranks):
    """Calls on streams in turns, behind work that is still to come on them."""

    def run(r):
        torch.cuda.set_device(r)
        streams, made = [torch.cuda.Stream() for _ in range(3)], []
        for turn in range(12):
            with torch.cuda.stream(streams[turn % 3]):
                torch.cuda._sleep(10_000_000 * (r + 1))
                x = random(r, 1, 333, 4, 64)
                made.append((x, attend(ranks, [x, x], r)))
        torch.cuda.synchronize()
        return made

    for first, second in zip(*ranks.run(run), strict=True):
        right([first[0], second[0]], [first[1], second[1]])


@pytest.mark.gpus(2)
def test_the_current_device_stays(ranks):
    q = [random(r, 1, 64, 2, 64) for r in range(2)]

    def run(r):
        torch.cuda.set_device(1 - r)
        out = attend(ranks, q, r)
        assert torch.cuda.current_device() == 1 - r and out.device == q[r].device
        return out

    right(q, ranks.run(run))


@pytest.mark.gpus(2)
def test_host_and_gpu_in_one_context(ranks):
    q = [random(r, 1, 64, 2, 64) for r in range(2)]
    for x in (q, [x.cpu() for x in q], q):
        outs = ranks.run(lambda r, x=x: attend(ranks, x, r))
        assert all(out.device == y.device for out, y in zip(outs, x, strict=True))
        right(x, outs)


@pytest.mark.gpus(2)
def test_views_are_read_in_place(ranks):
    q = [random(r, 2, 4, 100, 128).transpose(1, 2)[..., ::2] for r in range(2)]
    right(q, ranks.run(lambda r: attend(ranks, q, r)))


@pytest.mark.gpus(2)
def test_cutting_and_gathering(ranks):
    x = torch.randn(3, 6, 8)
    for dim in range(3):
        shares = ranks.run(lambda r, d=dim: ranks.contexts[r].shard(x.to(f"cuda:{r}"), d))
        wholes = ranks.run(lambda r, s=shares, d=dim: ranks.contexts[r].gather(s[r], d))
        assert all(torch.equal(whole.cpu(), x) for whole in wholes)


@pytest.mark.gpus(2)
def test_mixed_devices(ranks):
    q = [random(r, 1, 64, 2, 64) for r in range(2)]
    for r, caught in enumerate(ranks.errors(lambda r: cp_attn.attention(q[r], q[r], q[r].cpu(), ranks.contexts[r]))):
        assert type(caught) is ValueError and "v on cpu" in str(caught), (r, caught)
    right(q, ranks.run(lambda r: attend(ranks, q, r)))


@pytest.mark.gpus(1)
def test_one_gpu_for_two_ranks(ranks):
    q = [random(0, 1, 64, 2, 64) for _ in range(2)]
    for caught in ranks.errors(lambda r: attend(ranks, q, r)):
        assert type(caught) is ValueError and "are on one GPU" in str(caught), caught
    right(q, ranks.run(lambda r: attend(ranks, [x.cpu() for x in q], r)))
