"""Denoise with a small random Flux transformer that two ranks share.

torchrun --nproc-per-node=2 THIS_FILE [LATENTS]; rank 0 writes the result to LATENTS, for torch.load. With diffusers'
own parallelism (flux_upstream.py) it needs accelerators; with cp_attn (flux_cp_attn.py) it does not.
"""

import sys

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from cp_attn import ContextParallelConfig, install

install()

SIDE, TEXT, STEPS = 16, 32, 4


def make_transformer():
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12),
    ).eval()


@torch.no_grad()
def denoise(transformer):
    """Return the latents (1, rows, channels); every rank starts from the same noise."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, SIDE * SIDE, 16, generator=generator)
    prompt = torch.randn(1, TEXT, 64, generator=generator)
    pooled = torch.randn(1, 64, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        noise = transformer(
            hidden_states=latents,
            encoder_hidden_states=prompt,
            pooled_projections=pooled,
            timestep=t[None] / 1000,
            img_ids=ids,
            txt_ids=torch.zeros(TEXT, 3),
        ).sample
        latents = scheduler.step(noise, t, latents).prev_sample
    return latents


def main():
    dist.init_process_group("gloo")
    transformer = make_transformer()
    transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    latents = denoise(transformer)
    if dist.get_rank() == 0:
        print(f"latents: mean {latents.mean():.5f}, deviation {latents.std():.5f}")
        if sys.argv[1:]:
            torch.save(latents, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
