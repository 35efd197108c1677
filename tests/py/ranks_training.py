"""One rank of four: two regions of two ranks, each with a batch of its own. Three steps of training, several ways;
every one must end where a single process ends that sees both batches, and see the same gradient norms on the way."""

import math
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
from torch.nn.utils import clip_grad_norm_

import cp_attn

RANK, STEPS, REGIONS, SIZE = int(os.environ["RANK"]), 3, 2, 2
# The norm alone shows a wrong factor: what has been clipped is the same whatever it was multiplied by.
LIMITS = {"unclipped": math.inf, "clipped": 100.0}


def batch(index):
    """Return the batch of a number; the regions take them in turn."""
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(1, rows, 6, generator=generator, dtype=torch.float64) for rows in (11, 4)]


def optimizer_of(model):
    """Return an optimizer, and a scheduler that has to be stepped once a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def value(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def result(model, norms):
    return [value(p) for p in model.parameters()], [value(n).item() for n in norms]


def alone(limit, micros=1):
    """Return the parameters after training on the mean of all losses of a step, and the norms seen."""
    model, _ = make(Mixed)
    optimizer, scheduler = optimizer_of(model)
    norms, count = [], REGIONS * micros
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model(*batch(count * step + i))) for i in range(count)) / count).backward()
        norms.append(clip_grad_norm_(model.parameters(), limit))
        optimizer.step()
        scheduler.step()
    return result(model, norms)


def enabled():
    """Return a model on its region of two ranks, and the mesh of all."""
    mesh = init_device_mesh("cpu", (REGIONS, SIZE, 1), mesh_dim_names=("data", "ring", "ulysses"))
    model, _ = make(Mixed)
    config = cp_attn.ContextParallelConfig(ring_degree=SIZE, ring_anything=True, mesh=mesh, timeout=60.0)
    cp_attn.enable_parallelism(model, config, cp_plan=PLAN)
    return model, mesh


def train(limit, wrap, factor=1, before=None, after=None):
    """Return the same of a plain loop: `wrap` the model, multiply the loss, clip `before` or `after` a sum."""
    model, mesh = enabled()
    wrapped = wrap(model)
    optimizer, scheduler = optimizer_of(wrapped)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (factor * loss_of(wrapped(*batch(REGIONS * step + RANK // SIZE)))).backward()
        if before is not None:
            before(model, mesh)
        norms.append(clip_grad_norm_(wrapped.parameters(), limit))
        if after is not None:
            after(model, mesh)
        optimizer.step()
        scheduler.step()
    cp_attn.disable_parallelism(model)
    return result(model, norms)


def add_up(model, mesh):
    """Sum over the region, mean over the regions."""
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh["ring"].get_group())
        dist.all_reduce(p.grad, group=mesh["data"].get_group())
        p.grad /= REGIONS


def plain_loop(limit):
    return train(limit, lambda model: model, before=add_up)


def plain_loop_that_clips_too_early(limit):
    """A rank's own gradient is a part of a sum, and its norm means nothing: this must come out wrong."""
    return train(limit, lambda model: model, after=add_up)


def ddp(limit):
    """It takes the mean over all four ranks."""
    return train(limit, DistributedDataParallel, SIZE)


def fsdp2(limit):
    """So does it."""

    def wrap(model):
        everybody = init_device_mesh("cpu", (REGIONS * SIZE,))
        for module in (model.first, model.second, model.third, model.fourth, model):
            fully_shard(module, mesh=everybody)
        return model

    return train(limit, wrap, SIZE)


def accelerate(limit, micros=1):
    """It wraps the model in DDP; the loader deals batches to regions instead of ranks."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    model, _ = enabled()
    optimizer, scheduler = optimizer_of(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micros, step_scheduler_with_optimizer=False)
    wrapped, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(wrapped, DistributedDataParallel) and accelerator.num_processes == REGIONS * SIZE
    batches = [batch(i) for i in range(REGIONS * micros * STEPS)]
    loader = torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=lambda found: found[0])
    loader = prepare_data_loader(loader, num_processes=REGIONS, process_index=RANK // SIZE)
    norms = []
    for inputs in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(SIZE * loss_of(wrapped(*inputs)))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(wrapped.parameters(), limit))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
    cp_attn.disable_parallelism(model)
    return result(model, norms)


def accelerate_accumulated(limit):
    """Two batches a step: only the second one's backward takes the mean over the ranks."""
    return accelerate(limit, micros=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        for kind, limit in LIMITS.items():
            try:
                got, norms = globals()[name](limit)
                want, wanted = alone(limit, micros=2 if name.endswith("accumulated") else 1)
                say(
                    name=name,
                    kind=kind,
                    failed=None,
                    error=max((a - b).abs().max() for a, b in zip(got, want, strict=True)).item(),
                    norms=[norms, wanted],
                    limit=limit if math.isfinite(limit) else None,
                )
            except Exception:
                say(name=name, kind=kind, failed=traceback.format_exc()[-2500:])
    dist.destroy_process_group()
