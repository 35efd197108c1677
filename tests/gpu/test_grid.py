"""The grid of calls on as many ranks as there are GPUs; and on the CPU, which proves the grid itself."""

from pathlib import Path

import pytest
from grid import KINDS, variants
from launch import launch, lines

SCRIPT = Path(__file__).with_name("ranks_grid.py")
GRIDS = [(world, name) for world in (2, 3, 4, 6, 8) for name in variants(world)]


def play(world, device, name):
    ranks = launch(SCRIPT, world, device, name, timeout=900)
    cases = [line["case"] for line in ranks[0].lines]
    assert len(cases) >= 2 * len(KINDS) * 3
    for case in cases:
        list(lines(ranks, case=case))
    assert [rank.code for rank in ranks] == [0] * world


@pytest.mark.parametrize("world,name", [pytest.param(*g, marks=pytest.mark.gpus(g[0])) for g in GRIDS])
def test_on_gpus(world, name):
    play(world, "cuda", name)


@pytest.mark.parametrize("name", ["ring_anything", "ulysses"])
def test_the_grid_itself(name):
    play(2, "cpu", name)
