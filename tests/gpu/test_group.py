"""A context that the group of the caller's mesh connects, where there are GPUs; on the CPU the script itself."""

from pathlib import Path

import pytest
from launch import launch

SCRIPT = Path(__file__).with_name("ranks_group.py")


def play(world, device):
    ranks = launch(SCRIPT, world, device, timeout=300, CP_ATTN_TRANSPORT="nccl")
    for rank in ranks:
        assert rank.line(found=device == "cuda", sizes=[world, 1, world, world])["error"] < 1e-4
        assert rank.code == 0, rank.err


@pytest.mark.parametrize("world", [pytest.param(world, marks=pytest.mark.gpus(world)) for world in (2, 4, 8)])
def test_on_gpus(world):
    play(world, "cuda")


def test_the_script_itself():
    play(2, "cpu")
