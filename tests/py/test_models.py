"""Models split over ranks answer as they do alone, and enabling leaves no traces."""

import functools
import json

import pytest
from launch import launch

pytest.importorskip("diffusers")

EVEN = {
    "ring": dict(ring_degree=2),
    "ulysses": dict(ulysses_degree=2),
    "unified": dict(ring_degree=2, ulysses_degree=2),
}
UNEVEN = {
    "ring_anything": dict(ring_degree=3, ring_anything=True),
    "ulysses_anything": dict(ulysses_degree=3, ulysses_anything=True),
    "unified_anything": dict(ring_degree=2, ulysses_degree=2, unified_anything=True),
}
CASES = [("even", *case) for case in EVEN.items()] + [("uneven", *case) for case in UNEVEN.items()]
MODELS = (
    "flux",
    "flux2",
    "wan",
    "wan_tokens",
    "chronoedit",
    "qwenimage",
    "ltx",
    "ltx2",
    "ltx2_split",
    "helios",
    "helios_amplified",
    "minimax",
)
# The rank script's functions, by the number of ranks.
EVERYWHERE = (
    "mean_probe",
    "uneven_mean_probe",
    "replicated_keys",
    "masked_replicated_keys",
    "different_inputs",
    "mixed_keys",
    "whole_streams_in_front",
    "masked_streams",
    "mask_of_joined_streams",
    "positions",
    "output_types",
    "lists",
    "streams_are_cut_one_by_one",
    "omitted_parameter",
    "other_number_of_dims",
    "lengths",
    "bad_plan_on_one_rank",
    "bad_config_on_one_rank",
    "enabled_on_one_rank",
    "other_plan_on_one_rank",
    "error_in_one_forward",
)
SCENES = {
    2: (
        *EVERYWHERE,
        "wrapped_forward",
        "no_dispatcher",
        "dispatcher_without_config",
        "forward_without_attention",
        "bad_plans",
        "twice",
        "two_models",
        "registry_is_restored",
        "shared_processor",
        "replaced_processors",
        "backends",
        "heads",
        "dropout",
        "config_of_diffusers",
        "own_parallelism_of_diffusers",
        "replaced_modules",
        "lora",
        "lora_from_a_file",
        "lora_wrapper",
        "offload",
        "offload_by_a_pipeline",
        "closed_context",
        "controlnet_residuals",
        "refused_arguments",
        "kept_keys",
    ),
    3: EVERYWHERE,
    4: (
        "mean_probe",
        "streams_are_cut_one_by_one",
        "masked_streams",
        "positions",
        "lengths",
        "masked_replicated_keys",
        "different_inputs",
    ),
}


@functools.cache
def split_models(uneven, config):
    fields = json.loads(config)
    world = fields.get("ring_degree", 1) * fields.get("ulysses_degree", 1)
    return launch("ranks_models.py", world, config, uneven, *MODELS, timeout=240)


@functools.cache
def scenes(world):
    return launch("ranks_scenes.py", world, *SCENES[world], timeout=240)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("uneven, variant, fields", CASES, ids=[case[1] for case in CASES])
def test_equal_to_one_process(uneven, variant, fields, model):
    for rank in split_models(uneven, json.dumps(fields)):
        line = rank.line(model=model)
        assert "error" not in line, f"rank {rank.rank}: {line['error']}"
        assert line["difference"] < 1e-5 and line["tuples"] < 1e-5 and line["is_same_type"], line
        whole, local = line["rows"]
        assert local < whole, line
        assert line["after"] == 0, line


@pytest.mark.parametrize("world, scene", [(world, scene) for world, names in SCENES.items() for scene in names])
def test_scene(world, scene):
    for rank in scenes(world):
        line = rank.line(scene=scene)
        assert line["error"] is None, f"rank {rank.rank}: {line['error']}"
