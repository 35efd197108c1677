"""One rank of several hosts: scenes with calls, deaths and stops. Prints a JSON line for each."""

import os
import signal
import subprocess
import sys
import time
import traceback

import numpy as np
from launch import say

import cp_attn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAYOUTS = {
    "ring": dict(ring_degree=WORLD),
    "ring_anything": dict(ring_degree=WORLD, ring_anything=True),
    "ulysses": dict(ulysses_degree=WORLD),
    "unified": dict(ring_degree=2, ulysses_degree=WORLD // 2),
    "unified_anything": dict(ring_degree=2, ulysses_degree=WORLD // 2, unified_anything=True),
}


def context_of(layout, timeout=30.0):
    return cp_attn.init(cp_attn.ContextParallelConfig(**LAYOUTS[layout], timeout=timeout))


def attend(context, rows=8, rank=RANK):
    x = np.random.default_rng(rank).standard_normal((1, rows, WORLD, 16)).astype(np.float32)
    return cp_attn.attention(x, x, x, context)


def plain(q, k, v, mask):
    """Return the attention in (batch, rows, heads, head dim) without cp_attn."""
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)


def calls(layout):
    """Outputs and gradients as of a single process in float64; returns the largest error, relative."""
    import torch

    rows = [5 + 3 * r for r in range(WORLD)] if "anything" in layout else [9] * WORLD
    heads = WORLD + 1 if layout == "unified_anything" else WORLD
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn(2, sum(rows), heads, 16, generator=generator, dtype=torch.float64) for _ in range(4)]
    wanted = [x.clone().requires_grad_() for x in whole[:3]]
    expected = plain(*wanted, None)
    expected.backward(whole[3])
    mine = slice(sum(rows[:RANK]), sum(rows[: RANK + 1]))
    worst = 0.0
    with context_of(layout) as context:
        for _ in range(3):
            q, k, v = (x[:, mine].float().requires_grad_() for x in whole[:3])
            out = cp_attn.attention(q, k, v, context)
            out.backward(whole[3][:, mine].float())
            pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip((q, k, v), wanted, strict=True))]
            for got, want in pairs:
                error = (got.double() - want[:, mine]).abs().max() / want.abs().max()
                worst = max(worst, error.item())
        gathered = context.gather(whole[0][:, mine].float().contiguous(), 1)
        assert torch.equal(gathered, whole[0].float())
    return worst


def disagreement():
    """One rank's error is everybody's, and the next call works."""
    with context_of("ring") as context:
        attend(context)
        try:
            cp_attn.attention(*(np.zeros((1, 8, WORLD, 16 + (RANK == 3)), np.float32) for _ in range(3)), context)
        except ValueError as e:
            assert "rank 3 differs from rank 0 in head dim" in str(e)
        else:
            raise AssertionError("no error")
        attend(context)
    return "agreed"


def error_of(call):
    try:
        call()
    except cp_attn.CommError as e:
        return type(e).__name__, str(e), time.monotonic()
    return None, None, time.monotonic()


def killed(victim=1):
    """A rank of the first host is killed between two calls; the others' errors, and when they had them."""
    context = context_of("ring")
    attend(context)
    if victim == RANK:
        time.sleep(0.3)  # all are through, and its news are out
        say(killed=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: attend(context))


def stopped(victim=2):
    """A rank of the second host is stopped until the others have their errors; then it learns the same."""
    context = context_of("ring", timeout=1.5)
    pids = context.gather(np.array([os.getpid()]), dim=0).tolist()
    attend(context)
    time.sleep(0.3)  # its news are out
    if victim == RANK:
        os.kill(os.getpid(), signal.SIGSTOP)
    result = error_of(lambda: attend(context))
    if RANK == 0:
        os.kill(pids[victim], signal.SIGCONT)
    return result


def cut(device):
    """The cable between the hosts is cut: nobody closes anything, and each side misses the other."""
    context = context_of("ring", timeout=1.5)
    attend(context)
    if RANK == 0:
        time.sleep(0.3)  # all are through
        subprocess.run(["ip", "link", "set", device, "down"], check=True)
    time.sleep(0.6)
    return error_of(lambda: attend(context))


def error_at_init():
    """A rank comes with an error: all raise it. Then all meet afresh."""
    try:
        cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=WORLD + (RANK == 2), timeout=30.0))
    except ValueError as e:
        assert "ring_degree 5 x ulysses_degree 1 is 5 ranks, but there are 4" in str(e), e
        assert (RANK == 2) != ("rank 2: " in str(e)), e
    else:
        raise AssertionError("no error")
    with context_of("ring") as context:
        attend(context)
    return "met afresh"


def two_at_once():
    """Two contexts of one job, each with its own connections."""
    with context_of("ring") as one, context_of("ulysses") as other:
        for _ in range(3):
            attend(one)
            attend(other)
    return "both"


def forked():
    """A child can neither use the context nor disturb it by throwing it away."""
    context = context_of("ring")
    attend(context)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            attend(context)
        except RuntimeError as e:
            del context
            os._exit(0 if "fork" in str(e) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    attend(context)
    context.close()
    return "alive"


def interrupted():
    """Ctrl-C on rank 3 while it waits for rank 0, which learns of it at its next call."""
    context = context_of("ring")
    attend(context)
    if RANK == 0:
        time.sleep(1.0)
    if RANK == 3:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        attend(context)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except cp_attn.CommError as e:
        return str(e)
    return None


def leave_open():
    """The end of the process closes it."""
    globals()["kept"] = context_of("unified")
    attend(globals()["kept"])


def port():
    """Rank 0's port is taken: it says so, and by what variable to choose another one."""
    assert RANK == 0
    import socket

    with socket.create_server(("", int(os.environ["MASTER_PORT"]) + 1)):
        try:
            context_of("ring")
        except RuntimeError as e:
            return str(e)
    return None


if __name__ == "__main__":
    for name, *arguments in (argument.split(":") for argument in sys.argv[1:]):
        result = failed = None
        try:
            result = globals()[name](*arguments)
        except Exception:
            failed = traceback.format_exc()
        say(rank=RANK, scene=":".join((name, *arguments)), result=result, failed=failed)
