"""One rank: calls whose config has a mesh of torch's, beside that group's own collectives; the group ends first.

Usage: ranks_group.py DEVICE     cuda or cpu
"""

import os
import sys

import torch
import torch.distributed as dist
from launch import say
from torch.distributed.device_mesh import init_device_mesh

import cp_attn
from cp_attn import _groups

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(kind):
    device = torch.device(kind, RANK) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    mesh = init_device_mesh(kind, (WORLD, 1), mesh_dim_names=("ring", "ulysses"))
    group = mesh.get_group("ring")
    whole = torch.randn(1, 64 * WORLD, 4, 64, generator=torch.Generator().manual_seed(5)).to(device)
    own = whole.split(64, 1)[RANK].contiguous()
    sum_of_group = torch.ones(1000, device=device)
    dist.all_reduce(sum_of_group, group=group)  # makes the communicator, where none was made before
    found = _groups.find(mesh, RANK, WORLD, RANK) is not None
    mesh._flatten()
    sizes = [each.size() for each in _groups._groups(mesh)]
    context = cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=WORLD, mesh=mesh))
    outs = []
    for _ in range(5):
        dist.all_reduce(sum_of_group, group=group)
        outs.append(cp_attn.attention(own, own, own, context))
    assert sum_of_group[7].item() == float(WORLD) ** 6
    dist.destroy_process_group()
    outs.append(cp_attn.attention(own, own, own, context))
    x = whole.double().transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).split(64, 1)[RANK]
    errors = [(out.double() - want).abs().amax().item() for out in outs]
    context.close()
    say(found=found, sizes=sizes, error=max(errors))


main(sys.argv[1])
# The mesh keeps gloo's threads, and one that frees its last tensor while Python ends makes torch abort.
os._exit(0)
