"""Train the digit model by flow matching on scikit-learn's handwritten digits, and write its weights.

Alone: python train.py. With context parallelism: torchrun --nproc-per-node=2 train.py --ring-degree 2
With --compare the first rank then trains once more, alone; both must give the same losses and the same weights.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model import IMAGE_TOKENS, WEIGHTS, build, save, velocity
from ranks import parse, take_share_of_cores
from sklearn.datasets import load_digits
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import cp_attn

MAX_DIFFERENCE = 1e-4  # of a loss or a parameter, relative


def training_set():
    """Return the real images (1797, 64, 1), scaled from 0..16 to -1..1, and their digits (1797,)."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
    return images.reshape(-1, IMAGE_TOKENS, 1), torch.tensor(data.target)


def batches(steps, size, seed):
    """Yield images, digits, noise and times from one generator, so that every process with this seed gets the same."""
    images, digits = training_set()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (size,), generator=generator)
        noise = torch.randn(size, IMAGE_TOKENS, 1, generator=generator)
        # The sigmoid of a normal: most of what is to be learned lies between noise and image, not at the ends.
        t = torch.sigmoid(torch.randn(size, generator=generator))
        yield images[chosen], digits[chosen], noise, t


def sum_gradients(parameters):
    """Give every rank the sum of all ranks' gradients: what a rank has computed is only its own rows' part."""
    gradients = [parameter.grad for parameter in parameters]
    flat = parameters_to_vector(gradients)  # one message instead of one for each parameter
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)


def train(args, config=None, progress=None):
    """Train from the seed, on all ranks if there is a config, and return the modules and the loss of every step.

    A progress text shows a bar.
    """
    torch.manual_seed(args.seed)
    modules = build()
    parameters = list(modules.parameters())
    if config is not None:
        cp_attn.enable_parallelism(modules["transformer"], config)
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.01)
    # Not 0.1: OneCycleLR divides by zero where that makes one step.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=args.steps, pct_start=0.101
    )
    bar = tqdm(batches(args.steps, args.batch, args.seed), total=args.steps, desc=progress, disable=progress is None)
    losses, mean = [], None
    for images, digits, noise, t in bar:
        x = torch.lerp(images, noise, t[:, None, None])
        predicted = velocity(modules["transformer"], modules["prompts"], x, t, digits)
        loss = (predicted - (noise - images)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if config is not None:
            sum_gradients(parameters)
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        mean = losses[-1] if mean is None else 0.97 * mean + 0.03 * losses[-1]
        bar.set_postfix(loss=f"{mean:.3f}")
    if config is not None:
        cp_attn.disable_parallelism(modules["transformer"])
    return modules, losses


def compare(modules, losses, alone_modules, alone_losses):
    """Return the largest relative differences of a step's loss and of a parameter."""
    loss = (torch.tensor(losses) / torch.tensor(alone_losses) - 1).abs().max()
    pairs = zip(modules.parameters(), alone_modules.parameters(), strict=True)
    weight = torch.stack([(mine - other).norm() / other.norm() for mine, other in pairs]).max()
    return loss.item(), weight.item()


def variant(config):
    """Return the name of a config's variant: ring, ulysses_anything and so on."""
    kind = "unified" if min(config.mesh_shape) > 1 else "ring" if config.ring_degree > 1 else "ulysses"
    return kind + "_anything" * getattr(config, kind + "_anything")


def main():
    """Train from the command line; the result is the exit status, a sentence where it is a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="batches to train on (default 1500)")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch (default 64)")
    parser.add_argument(
        "--learning-rate", type=float, default=2e-3, help="peak of the one-cycle schedule (default 2e-3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default 0)")
    where = f"where the weights go (default {WEIGHTS.name} beside this file; with --compare nowhere)"
    parser.add_argument("--out", type=Path, help=where)
    parser.add_argument(
        "--compare", action="store_true", help="train in one process too, and compare losses and weights"
    )
    args, config = parse(parser)
    if args.compare and config is None:
        parser.error("--compare needs ranks: torchrun --nproc-per-node=2 train.py --ring-degree 2 --compare")
    out = args.out or (None if args.compare else WEIGHTS)

    take_share_of_cores()
    name = "one process"
    if config is not None:
        dist.init_process_group("gloo")
        name = f"{dist.get_world_size()} ranks, {variant(config)}"
    is_first = config is None or dist.get_rank() == 0
    modules, losses = train(args, config, name if is_first else None)
    if config is not None:
        dist.destroy_process_group()
    if not is_first:
        return None

    if out is not None:
        save(modules, out)
        count = sum(parameter.numel() for parameter in modules.parameters())
        print(f"{count / 1e6:.2f} M parameters, {out.stat().st_size / 2**20:.1f} MiB in {out}")
    if args.compare:
        loss, weight = compare(modules, losses, *train(args, progress="one process"))
        print(
            f"{name}: in {args.steps} steps the losses differ from one process's by at most {loss:.1e},"
            f" the weights by {weight:.1e} (relative)"
        )
        if not (loss <= MAX_DIFFERENCE and weight <= MAX_DIFFERENCE):
            return f"a difference is above {MAX_DIFFERENCE:.0e}"
    return None


if __name__ == "__main__":
    sys.exit(main())
