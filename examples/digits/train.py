"""Train the digit model by flow matching on scikit-learn's handwritten digits, and write its weights."""

import argparse
from pathlib import Path

import torch
from model import IMAGE_TOKENS, WEIGHTS, build, save, velocity
from sklearn.datasets import load_digits
from tqdm import tqdm


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


def train(modules, steps, batch, learning_rate, seed):
    """Train `modules` in place."""
    optimizer = torch.optim.AdamW(modules.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    bar = tqdm(batches(steps, batch, seed), total=steps, desc="train")
    mean = None
    for images, digits, noise, t in bar:
        x = torch.lerp(images, noise, t[:, None, None])
        predicted = velocity(modules["transformer"], modules["prompts"], x, t, digits)
        loss = (predicted - (noise - images)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        bar.set_postfix(loss=f"{mean:.3f}")


def main():
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="batches to train on")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the one-cycle schedule")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the noise")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="where the weights go")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    modules = build()
    train(modules, args.steps, args.batch, args.learning_rate, args.seed)
    save(modules, args.out)
    count = sum(parameter.numel() for parameter in modules.parameters())
    print(f"{count / 1e6:.2f} M parameters, {args.out.stat().st_size / 2**20:.1f} MiB in {args.out}")


if __name__ == "__main__":
    main()
