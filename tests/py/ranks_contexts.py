"""One rank: scenes of making, finding and closing contexts, one after the other. Prints a JSON line for each."""

import os
import sys
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


def wrong_degrees():
    try:
        cp_attn.init(config(ring_degree=WORLD + 1))
    except ValueError as e:
        assert f"{WORLD + 1} ranks" in str(e) and "mesh" in str(e)
    else:
        raise AssertionError("no ValueError")


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
