"""One rank: scenes of making, finding and closing contexts, one after the other. Prints a JSON line for each."""

import os
import socket
import stat
import sys
import time
import traceback

import torch
from launch import say

import cp_attn
from cp_attn import _contexts

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def config(**fields):
    return cp_attn.ContextParallelConfig(**fields or dict(ring_degree=WORLD), timeout=30.0)


def mean(where, members=None):
    """Attend with equal scores: the mean of the members' values, 2 ** rank each."""
    x = torch.full((1, 1, 1, 4), 2.0**RANK)
    out = cp_attn.attention(torch.zeros_like(x), torch.zeros_like(x), x, where)
    members = range(WORLD) if members is None else members
    expected = sum(2.0**m for m in members) / len(members)
    assert torch.allclose(out, torch.full_like(out, expected)), (out, expected)


def init():
    with cp_attn.init(config()) as context:
        assert (context.rank, context.world_size) == (RANK, WORLD) and not context.closed
        mean(context)
    assert context.closed


def two_at_once():
    first, second = cp_attn.init(config()), cp_attn.init(config())
    mean(second)
    mean(first)
    first.close()
    mean(second)
    second.close()


def a_context_for_a_config():
    cfg = config()
    mean(cfg)
    context = _contexts.context_for(config())  # an equal config, the same context
    assert _contexts.context_for(cfg) is context
    cp_attn.close(cfg)
    assert context.closed
    mean(cfg)
    assert _contexts.context_for(cfg) is not context
    cp_attn.close(cfg)
    cp_attn.close(cfg)


def any_address():
    """No name is looked up and no port asked for: ranks of one host need no network."""
    usual = os.environ["MASTER_ADDR"]
    names = ("localhost", "127.0.1.1", "::1", socket.gethostname(), "no.such.host.invalid", usual)
    with socket.socket() as taken:
        if RANK == 0:
            taken.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            taken.listen()
        mine = taken.fileno()
        for os.environ["MASTER_ADDR"] in names:
            with cp_attn.init(config()) as context:
                mean(context)
                for fd in map(int, os.listdir("/proc/self/fd")):
                    if fd != mine and os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode):
                        with socket.socket(fileno=os.dup(fd)) as found:
                            assert found.family == socket.AF_UNIX, found


def late_then_afresh():
    """A rank that comes too late breaks the context, and says so; closed on all ranks, its config is good again."""
    cfg = cp_attn.ContextParallelConfig(ring_degree=WORLD, timeout=0.7)
    for _ in range(2):
        mean(cfg)
        if RANK == WORLD - 1:
            time.sleep(1.5)
        start = time.monotonic()
        try:
            mean(cfg)
        except cp_attn.CommError as e:
            assert RANK == WORLD - 1 or (isinstance(e, TimeoutError) and 0.6 < time.monotonic() - start < 1.4), e
            assert f"rank {WORLD - 1} did not come to attention, call" in str(e), e
        else:
            raise AssertionError("no CommError")
        cp_attn.close(cfg)
    mean(cfg)
    cp_attn.close(cfg)


def wrong_degrees():
    try:
        cp_attn.init(config(ring_degree=WORLD + 1))
    except ValueError as e:
        assert f"{WORLD + 1} ranks" in str(e) and "mesh" in str(e)
    else:
        raise AssertionError("no ValueError")


def error_on_one_rank():
    """What one rank finds wrong before it meets the others is raised on all, and the next meeting works."""
    last = WORLD - 1
    for wrong, kind in ((lambda: config(ring_degree=WORLD + 1), ValueError), (lambda: 3, TypeError)):
        start = time.monotonic()
        try:
            cp_attn.init(wrong() if RANK == last else config())
        except kind as e:
            assert RANK == last or f"rank {last}" in str(e), e
        else:
            raise AssertionError(f"no {kind.__name__}")
        assert time.monotonic() - start < 20
        init()


def other_config_on_one_rank():
    wrong = config(ulysses_degree=WORLD) if RANK == WORLD - 1 else config()
    try:
        cp_attn.init(wrong)
    except ValueError as e:
        assert f"rank {WORLD - 1}" in str(e) and "ulysses_degree" in str(e), e
    else:
        raise AssertionError("no ValueError")
    init()


def forked_child():
    """A child takes nobody's place: neither in a context nor at a meeting."""
    with cp_attn.init(config()) as context:
        mean(context)
        child = os.fork()
        if child == 0:
            try:
                cp_attn.init(config())
            except RuntimeError as e:
                os._exit(0 if "fork" in str(e) else 3)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        mean(context)
    init()


def argument_missing_on_one_rank():
    """Also where an input asks for a gradient, and so the call comes through autograd."""
    with cp_attn.init(config()) as context:
        x = torch.ones(1, 1, 1, 4, requires_grad=True)
        try:
            if RANK == 0:
                cp_attn.attention(x, x, context_or_config=context)
            else:
                cp_attn.attention(x, x, x, context)
        except TypeError as e:
            assert "v" in str(e), e
        else:
            raise AssertionError("no TypeError")
        mean(context)


def mesh_regions():
    """Two regions of two ranks; each has its own mean."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("ring", "dp", "ulysses"))
    cfg = config(ring_degree=2, mesh=mesh)
    own = [RANK % 2, RANK % 2 + 2]
    with cp_attn.init(cfg) as context:
        assert context.world_size == 2 and context.rank == own.index(RANK)
        mean(context, own)
    try:
        cp_attn.init(config(ulysses_degree=2, mesh=mesh))
    except ValueError as e:
        assert "'ring'" in str(e) and "'dp'" in str(e)
    else:
        raise AssertionError("no ValueError")
    torch.distributed.destroy_process_group()


def torch_distributed_alone():
    """An initialised torch.distributed, and nothing in the environment."""
    torch.distributed.init_process_group("gloo")
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    try:
        for _ in range(2):
            with cp_attn.init(config()) as context:
                mean(context)
    finally:
        os.environ.update(kept)
        torch.distributed.destroy_process_group()


def exit_without_close():
    mean(config())
    cp_attn.init(config())
    say(scene="exit_without_close", error=None)
    sys.exit(5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        try:
            globals()[name]()
            say(scene=name, error=None)
        except Exception:
            say(scene=name, error=traceback.format_exc()[-2000:])
