"""Draw ten of each digit, alone and with context parallelism, and compare the two pictures.

Alone: python sample.py. With parallelism: torchrun --nproc-per-node=2 sample.py --ring-degree 2
"""

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from model import IMAGE_TOKENS, SIDE, load, sample
from PIL import Image
from ranks import parse, take_share_of_cores
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import cp_attn

EACH = 10  # drawings of each digit
MAX_DIFFERENCE = 1e-4  # of pixels that run from -1 to 1
MIN_SHARE = 0.90


def memory(field):
    """Return a field of /proc/self/status in MiB: VmRSS is resident now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak():
    """Let the memory peak start again from what is resident now; False where the system does not allow it."""
    # What an earlier drawing freed goes back to the system first, or it would count in the next one's peak.
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def draw(transformer, prompts, args, progress):
    """Return the images (100, 64), rows of ten of a digit, and a line on what they cost this process."""
    digits = torch.arange(10).repeat_interleave(EACH)
    # On the CPU and from the seed: every rank starts from the same noise.
    noise = torch.randn(len(digits), IMAGE_TOKENS, 1, generator=torch.Generator().manual_seed(args.seed))
    is_reset = reset_peak()
    before = memory("VmRSS")
    start = time.perf_counter()
    images = sample(transformer, prompts, noise, digits, args.steps, progress)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM")
    cost = f"{seconds:.2f} s with {torch.get_num_threads()} thread(s), peak memory {peak:.0f} MiB"
    cost += f" ({peak - before:.0f} MiB above the start)" if is_reset else " (since the process began)"
    return images.squeeze(-1), cost


def share_as_asked(images):
    """Return the share of the images that a classifier of the real digits reads as the digit that was asked for."""
    real = load_digits()
    classifier = SVC(gamma=0.001).fit(real.data, real.target)
    read = classifier.predict((images.clamp(-1, 1).numpy() + 1) * 8)
    return float((read == np.repeat(np.arange(10), EACH)).mean())


def save_picture(images, path):
    """Write the images as a grid, a digit a row, dark ink on white paper."""
    pixels = (255 * (1 - images.clamp(-1, 1).numpy()) / 2).astype(np.uint8)
    cells = np.pad(pixels.reshape(10, EACH, SIDE, SIDE), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=255)
    grid = Image.fromarray(cells.transpose(0, 2, 1, 3).reshape(10 * (SIDE + 2), EACH * (SIDE + 2)))
    grid.resize((6 * grid.width, 6 * grid.height), Image.Resampling.NEAREST).save(path)


def main():
    """Draw, compare and report; the result is the exit status, a sentence where it is a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="Euler steps (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default 0)")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="the picture (default digits.png)")
    args, config = parse(parser)
    is_first = os.environ.get("RANK", "0") == "0"
    # All drawings get a rank's share: what is compared is one process with as many ranks, each like it.
    take_share_of_cores()
    transformer, prompts = load()
    failures = []

    if is_first:
        # The other ranks wait meanwhile in enable_parallelism.
        images, cost = draw(transformer, prompts, args, "one process")
        print(f"one process: {cost}")

    if config is not None:
        cp_attn.enable_parallelism(transformer, config)
        parallel, cost = draw(transformer, prompts, args, f"{os.environ['WORLD_SIZE']} ranks" if is_first else None)
        cp_attn.disable_parallelism(transformer)
        if not is_first:
            return None
        difference = (parallel - images).abs().max().item()
        images = parallel
        print(f"{os.environ['WORLD_SIZE']} ranks: {cost}; each rank, measured on rank 0")
        print(f"largest difference of a pixel: {difference:.1e} (pixels run from -1 to 1)")
        if not difference <= MAX_DIFFERENCE:
            failures.append(f"the pictures differ by {difference:.1e}, more than {MAX_DIFFERENCE:.0e}")

    share = share_as_asked(images)
    save_picture(images, args.out)
    print(f"read as asked: {share:.2f}; picture in {args.out}")
    if share < MIN_SHARE:
        failures.append(f"only {share:.2f} of the digits are read as asked, less than {MIN_SHARE:.2f}")
    if config is None:
        print("for context parallelism: torchrun --nproc-per-node=2 sample.py --ring-degree 2")
    return "; ".join(failures) or None


if __name__ == "__main__":
    sys.exit(main())
