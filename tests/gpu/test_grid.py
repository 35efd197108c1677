"""The grid of calls: a GPU for each rank, one for all, and on the CPU, which proves the grid itself."""

from pathlib import Path

import pytest
from grid import kinds_of, variants
from launch import launch, lines

from cp_attn import _C

SCRIPT = Path(__file__).with_name("ranks_grid.py")
GRIDS = [(world, name) for world in (2, 3, 4, 6, 8) for name in variants(world)]


def play(world, device, name, backend="native", transport="auto"):
    ranks = launch(SCRIPT, world, device, name, backend, timeout=900, CP_ATTN_TRANSPORT=transport)
    cases = [line["case"] for line in ranks[0].lines]
    assert len(cases) >= 2 * len(kinds_of(backend)) * (3 if "native" in backend else 2)
    for case in cases:
        list(lines(ranks, case=case))
    assert [rank.code for rank in ranks] == [0] * world


@pytest.mark.parametrize("transport", ["nccl", "auto"])
@pytest.mark.parametrize("world,name", [pytest.param(*g, marks=pytest.mark.gpus(g[0])) for g in GRIDS])
def test_on_gpus(world, name, transport):
    play(world, "cuda", name, transport=transport)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("world,name", [g for g in GRIDS if g[0] in (2, 4, 8)])
def test_on_one_gpu(world, name):
    play(world, "shared", name, transport="ipc")


def skip_without(backend):
    """Skip where the backend's package is not there, or does not run on this GPU."""
    if "native" in backend:
        return
    import torch

    from cp_attn import _packages

    major, minor = torch.cuda.get_device_capability()
    try:
        _packages.check(backend, "bfloat16", 64, 64, 12, 12, False, False, 10 * major + minor)
    except (ImportError, NotImplementedError) as error:
        pytest.skip(str(error))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["ring_anything", "ulysses"])
@pytest.mark.parametrize("backend", [x for x in _C._backends["cuda"] if x != "native"])
def test_backends_on_gpus(backend, name):
    skip_without(backend)
    play(2, "cuda", name, backend)


@pytest.mark.parametrize("name,backend", [("ring_anything", "native"), ("ulysses", "_native_math")])
def test_the_grid_itself(name, backend):
    play(2, "cpu", name, backend)
