"""Gradients through split models: summed over the ranks they are those of one process."""

import functools

import pytest
from launch import launch, lines
from test_models import MODELS

pytest.importorskip("diffusers")

from variations import VARIATIONS  # noqa: E402

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


WAYS = ("plain_loop", "ddp", "fsdp2", "accelerate", "accelerate_accumulated")
TOO_EARLY = "plain_loop_that_clips_too_early"


@functools.cache
def ran(script, world, *args):
    return launch(script, world, *args, timeout=300)


@pytest.mark.parametrize("world, config", TOYS, ids=[f"{config}{world}" for world, config in TOYS])
@pytest.mark.parametrize("scene", SCENES)
def test_scene(world, config, scene):
    for line in lines(ran("ranks_gradients.py", world, "scenes", config), name=scene):
        assert line["error"] <= 1e-10, line


@pytest.mark.parametrize("lengths, world, config", SPLITS, ids=[f"{config}{world}" for _, world, config in SPLITS])
@pytest.mark.parametrize("model", MODELS)
def test_model(lengths, world, config, model):
    for line in lines(ran("ranks_gradients.py", world, lengths, config, *MODELS), name=model):
        # Some models compute parts of themselves in float32, whatever they are given.
        assert max(line["error"], line["again"], line["frozen"]) <= 1e-6, line
        once, checkpointed = line["calls"]
        assert once < checkpointed, line


@pytest.mark.parametrize("world, config", TOYS[1:], ids=[f"{config}{world}" for world, config in TOYS[1:]])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_variation(world, config, variation):
    for line in lines(ran("ranks_gradients.py", world, "variations", config), name=variation):
        assert line["error"] <= 1e-6 and line["out"] <= 1e-6, line


@pytest.mark.parametrize("model", MODELS)
def test_autocast(model):
    """In bfloat16, outputs and summed gradients are as far from float32 as those of one process."""
    for line in lines(ran("ranks_gradients.py", 2, "autocast", "ring_anything", *MODELS), name=model):
        alone, split = line["error"]
        assert all(0 < a and b <= 1.5 * a for a, b in zip(alone, split, strict=True)), line
        assert line["again"], "checkpoints changed the gradient"


def trained(way, kind):
    """Yield each rank's largest parameter error, its gradient norms, those of one process, and the limit."""
    pytest.importorskip("accelerate")
    for line in lines(ran("ranks_training.py", 4, *WAYS, TOO_EARLY), name=way, kind=kind):
        yield line["error"], *line["norms"], line["limit"]


@pytest.mark.parametrize("kind", ["unclipped", "clipped"])
@pytest.mark.parametrize("way", WAYS)
def test_training(way, kind):
    for error, norms, wanted, limit in trained(way, kind):
        assert error <= 1e-12 and norms == pytest.approx(wanted, rel=1e-10)
        assert limit is None or max(norms) > limit > min(norms)  # some steps are clipped, others are not


def test_clipping_before_the_sum_is_wrong():
    for error, norms, wanted, _ in trained(TOO_EARLY, "clipped"):
        assert error > 1e-3 and norms != pytest.approx(wanted, rel=0.1)
