"""Gradients through split models: summed over the ranks they are those of one process."""

import functools

import pytest
from launch import launch
from test_models import MODELS

pytest.importorskip("diffusers")

SCENES = (
    "invariant",
    "several_backwards",
    "checkpoints",
    "checkpoints_of_two_forwards",
    "frozen",
    "one_output",
    "changed_in_place",
    "outputs_left_split",
    "nothing_recorded",
)
TOYS = [(2, "ring_anything"), (3, "ring_anything"), (3, "ulysses_anything"), (4, "unified_anything")]
SPLITS = [
    ("even", 2, "ring"),
    ("uneven", 3, "ring_anything"),
    ("uneven", 3, "ulysses_anything"),
    ("uneven", 4, "unified_anything"),
]


WAYS = ("plain_loop", "ddp", "fsdp2")


@functools.cache
def ran(script, world, *args):
    return launch(script, world, *args, timeout=300)


def lines(ranks, name):
    for rank in ranks:
        line = rank.line(name=name)
        assert line["failed"] is None, f"rank {rank.rank}: {line['failed']}"
        yield line


@pytest.mark.parametrize("world, config", TOYS, ids=[f"{config}{world}" for world, config in TOYS])
@pytest.mark.parametrize("scene", SCENES)
def test_scene(world, config, scene):
    for line in lines(ran("ranks_gradients.py", world, "scenes", config), scene):
        assert line["error"] <= 1e-10, line


@pytest.mark.parametrize("lengths, world, config", SPLITS, ids=[f"{config}{world}" for _, world, config in SPLITS])
@pytest.mark.parametrize("model", MODELS)
def test_model(lengths, world, config, model):
    for line in lines(ran("ranks_gradients.py", world, lengths, config, *MODELS), model):
        # Some models compute parts of themselves in float32, whatever they are given.
        assert max(line["error"], line["again"], line["frozen"]) <= 1e-6, line
        once, checkpointed = line["calls"]
        assert once < checkpointed, line


@pytest.mark.parametrize("way", WAYS)
def test_training(way):
    for line in lines(ran("ranks_training.py", 4, *WAYS), way):
        assert line["error"] <= 1e-12, line
