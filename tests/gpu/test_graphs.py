"""Calls in CUDA graphs: a GPU for each rank, and one for all."""

from pathlib import Path

import pytest
from grid import kinds_of, variants
from launch import launch, lines
from test_grid import skip_without

SCRIPT = Path(__file__).with_name("ranks_graphs.py")
COMPILED = Path(__file__).with_name("ranks_compiled.py")
GRIDS = [(world, name) for world in (2, 4, 8) for name in variants(world)]


def play(script, world, count, *words, transport="auto"):
    ranks = launch(script, world, *words, timeout=900, CP_ATTN_TRANSPORT=transport)
    cases = [line["case"] for line in ranks[0].lines]
    assert len(cases) >= count
    for case in cases:
        list(lines(ranks, case=case))
    assert [rank.code for rank in ranks] == [0] * world


@pytest.mark.parametrize("transport", ["nccl", "auto"])
@pytest.mark.parametrize("world,name", [pytest.param(*g, marks=pytest.mark.gpus(g[0])) for g in GRIDS])
def test_on_gpus(world, name, transport):
    play(SCRIPT, world, 2 * len(kinds_of("native")) + 4, "cuda", name, transport=transport)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("world,name", GRIDS)
def test_on_one_gpu(world, name):
    play(SCRIPT, world, 2 * len(kinds_of("native")) + 4, "shared", name, transport="ipc")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("backend", ["_native_flash", "_native_cudnn", "flash", "_flash_3_hub"])
def test_backends_on_gpus(backend):
    skip_without(backend)
    play(SCRIPT, 2, len(kinds_of(backend)) + 4, "cuda", "ring", backend)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_compiled_models_on_gpus(name):
    """torch.compile(mode="reduce-overhead"), which captures graphs by itself."""
    pytest.importorskip("diffusers")
    play(COMPILED, 2, 2, name)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["ring_anything", "ulysses_anything"])
def test_uneven_models_on_gpus(name):
    pytest.importorskip("diffusers")
    play(COMPILED, 2, 2, name)
