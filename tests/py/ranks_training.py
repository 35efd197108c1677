"""One rank of four: two regions of two ranks, each with a batch of its own. Three steps of training, three ways; every
one must end where a single process ends that sees both batches."""

import os
import sys
import traceback

import torch
import torch.distributed as dist
from launch import say
from mixed_model import PLAN, Mixed, loss_of, make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cp_attn

RANK, STEPS, REGIONS, SIZE = int(os.environ["RANK"]), 3, 2, 2


def batch(region, step):
    generator = torch.Generator().manual_seed(100 * region + step)
    return [torch.randn(1, rows, 6, generator=generator, dtype=torch.float64) for rows in (11, 4)]


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def alone():
    """Return the parameters after training on the mean of the regions' losses."""
    model, _ = make(Mixed)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model(*batch(region, step))) for region in range(REGIONS)) / REGIONS).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(wrap, after_backward, factor):
    """Return the parameters after the same in parallel; `wrap` comes last."""
    mesh = init_device_mesh("cpu", (REGIONS, SIZE, 1), mesh_dim_names=("data", "ring", "ulysses"))
    model, _ = make(Mixed)
    config = cp_attn.ContextParallelConfig(ring_degree=SIZE, ring_anything=True, mesh=mesh, timeout=60.0)
    cp_attn.enable_parallelism(model, config, cp_plan=PLAN)
    wrapped = wrap(model, mesh)
    optimizer = optimizer_of(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        (factor * loss_of(wrapped(*batch(RANK // SIZE, step)))).backward()
        after_backward(model, mesh)
        optimizer.step()
    cp_attn.disable_parallelism(model)
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def plain_loop():
    """Sum over the region, mean over the regions."""

    def add_up(model, mesh):
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh["ring"].get_group())
            dist.all_reduce(p.grad, group=mesh["data"].get_group())
            p.grad /= REGIONS

    return train(lambda model, mesh: model, add_up, 1)


def ddp():
    """It takes the mean over all four ranks."""
    return train(lambda model, mesh: DistributedDataParallel(model), lambda model, mesh: None, SIZE)


def fsdp2():
    """So does it."""

    def wrap(model, mesh):
        everybody = init_device_mesh("cpu", (REGIONS * SIZE,))
        for module in (model.first, model.second, model.third, model.fourth, model):
            fully_shard(module, mesh=everybody)
        return model

    return train(wrap, lambda model, mesh: None, SIZE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    want = alone()
    for name in sys.argv[1:]:
        try:
            got = globals()[name]()
            say(name=name, failed=None, error=max((a - b).abs().max() for a, b in zip(got, want, strict=True)).item())
        except Exception:
            say(name=name, failed=traceback.format_exc()[-2500:])
    dist.destroy_process_group()
