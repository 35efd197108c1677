"""The small Flux transformer that draws handwritten digits: how it is built, stored, asked and sampled."""

from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

SIDE = 8  # an image is 8 x 8 pixels, one token a pixel
IMAGE_TOKENS = SIDE * SIDE
TEXT_TOKENS = 8  # 8 + 64 tokens: two ranks split both streams evenly, three ranks neither
TEXT_DIM = 32
POOLED_DIM = 32
WEIGHTS = Path(__file__).with_name("weights.safetensors")


class PromptEncoder(nn.Module):
    """The whole vocabulary is ten digits, so a table stands where a text encoder would."""

    def __init__(self):
        """Make the two tables: 8 text tokens and one pooled vector for each digit."""
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(10, TEXT_TOKENS, TEXT_DIM))
        self.pooled = nn.Parameter(torch.randn(10, POOLED_DIM))

    def forward(self, digits):
        """Return the text tokens (B, 8, TEXT_DIM) and the pooled vectors (B, POOLED_DIM) of digits (B,)."""
        return self.tokens[digits], self.pooled[digits]


def build():
    """Return an untrained transformer and prompt encoder."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=1,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=POOLED_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    return nn.ModuleDict({"transformer": transformer, "prompts": PromptEncoder()})


def save(modules, path=WEIGHTS):
    """Write the weights of what `build` returned."""
    save_file(modules.state_dict(), path)


def load(path=WEIGHTS):
    """Return the transformer and the prompt encoder with the weights of `path`, for drawing."""
    modules = build()
    modules.load_state_dict(load_file(path))
    modules.requires_grad_(False).eval()
    return modules["transformer"], modules["prompts"]


def velocity(transformer, prompts, x, t, digits):
    """Call the transformer with full inputs, as without parallelism: x (B, 64, 1), t (B,) in 0..1, digits (B,)."""
    text, pooled = prompts(digits)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    image_ids = torch.stack((torch.zeros(SIDE, SIDE), rows, columns), dim=-1).reshape(IMAGE_TOKENS, 3)
    return transformer(
        hidden_states=x,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=t,
        img_ids=image_ids,
        txt_ids=torch.zeros(TEXT_TOKENS, 3),
        return_dict=False,
    )[0]


@torch.no_grad()
def sample(transformer, prompts, noise, digits, steps, progress=None):
    """Follow the flow from noise (t = 1) to images (t = 0) in Euler steps; a progress text shows a bar.

    Returns (B, 64, 1), like `noise`, with ink at 1 and paper at -1.
    """
    x = noise
    times = torch.linspace(1, 0, steps + 1)
    for t, t_next in tqdm(list(zip(times, times[1:], strict=False)), desc=progress, disable=progress is None):
        x = x + (t_next - t) * velocity(transformer, prompts, x, t.expand(len(x)), digits)
    return x
