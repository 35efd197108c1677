"""torch.compile of enabled models: one graph, and the numbers of eager code."""

import functools

import pytest
from launch import launch, lines

pytest.importorskip("diffusers")

MODELS = (
    "flux,ring,wrapper,enable_first",
    "flux,ring_anything,wrapper,compile_first",
    "wan,ulysses_anything,in_place,enable_first",
    "wan,ring_anything,function,compile_first",
)
SCENES = (
    "blocks,ring",
    "lengths,ring_anything",
    "checkpoints,ring",
    "changes,ring",
    "refused,ring",
    "direct,ring",
    "direct,ulysses_anything",
)


@functools.cache
def ran(world, *scenes):
    return launch("ranks_compile.py", world, *scenes, timeout=400)


@pytest.mark.parametrize("model", MODELS)
def test_model(model):
    for line in lines(ran(2, *[f"model,{model}" for model in MODELS]), name=f"model,{model}"):
        assert max(line["difference"], line["again"], line["gradients"], line["after"]) <= 1e-5, line
        assert line["graphs"] == 1, line


@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene):
    for line in lines(ran(2, *SCENES), name=scene):
        assert line["difference"] <= 1e-5, line


def test_code_made_by_the_compiler():
    """Not only its graph, run as it is."""
    scene = "model,wan,ring_anything,wrapper,enable_first,inductor"
    for line in lines(ran(3, scene), name=scene):
        assert line["graphs"] == 1 and max(line["difference"], line["gradients"]) <= 1e-5, line
