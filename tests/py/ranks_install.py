"""One rank: diffusers' own ways of enabling lead to cp_attn. Prints a JSON line for each scene.

ranks_install.py FLUX HEADS: folders with tiny_models' flux, and with one whose heads two ranks cannot share.
"""

import os
import sys
import time
import traceback

import diffusers
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from launch import say
from tiny_models import make

import cp_attn
from cp_attn.models.parallel import Parallel

FLUX, HEADS = sys.argv[1:3]
RANK = int(os.environ["RANK"])
OURS = cp_attn.ContextParallelConfig(ring_degree=2, timeout=60.0)
ULYSSES = cp_attn.ContextParallelConfig(ulysses_degree=2, timeout=60.0)


def check(model):
    """Compare with a model that was never enabled; disable it."""
    assert isinstance(model._parallel_config, Parallel) and not model.training
    alone, inputs = make("flux")
    torch.testing.assert_close(model(**inputs).sample, alone(**inputs).sample, atol=1e-5, rtol=1e-5)
    cp_attn.disable_parallelism(model)


def refused(kind, words, load, *args, **kwargs):
    """Expect an error on this rank, soon, and no trace of it in diffusers."""
    before, start = dict(Registry._backends), time.monotonic()
    try:
        load(*args, **kwargs)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")
    assert Registry._backends == before and time.monotonic() - start < 30


def at_load_time():
    theirs = diffusers.ContextParallelConfig(ring_degree=2)
    for config in (OURS, ULYSSES, theirs, diffusers.ParallelConfig(context_parallel_config=theirs)):
        check(diffusers.FluxTransformer2DModel.from_pretrained(FLUX, parallel_config=config))
        check(diffusers.AutoModel.from_pretrained(FLUX, parallel_config=config))


def loading_info():
    model, info = diffusers.FluxTransformer2DModel.from_pretrained(FLUX, parallel_config=OURS, output_loading_info=True)
    assert info["missing_keys"] == []
    check(model)


def by_the_method():
    for config in (OURS, diffusers.ContextParallelConfig(ulysses_degree=2)):
        model = diffusers.AutoModel.from_pretrained(FLUX)
        assert model._parallel_config is None
        model.enable_parallelism(config=config)
        check(model)
    plan = {"nowhere": cp_attn.ContextParallelOutput(gather_dim=1)}
    refused(ValueError, "nowhere", model.enable_parallelism, config=OURS, cp_plan=plan)
    assert model._parallel_config is None


def refused_after_loading():
    refused(ValueError, "heads", diffusers.AutoModel.from_pretrained, HEADS, parallel_config=ULYSSES)
    at_load_time()


def one_rank_cannot_load():
    folder = FLUX if RANK == 0 else f"{FLUX}/nowhere"
    for cls in (diffusers.AutoModel, diffusers.FluxTransformer2DModel):
        words = "rank 1" if RANK == 0 else "nowhere"
        refused(Exception, words, cls.from_pretrained, folder, parallel_config=OURS, local_files_only=True)
    at_load_time()


def another_class_on_one_rank():
    cls = diffusers.FluxTransformer2DModel if RANK == 0 else type("Flux", (diffusers.FluxTransformer2DModel,), {})
    refused(ValueError, "differs", cls.from_pretrained, FLUX, parallel_config=OURS)


def enabled_models_stay_enabled():
    model = diffusers.AutoModel.from_pretrained(FLUX, parallel_config=OURS)
    cp_attn.uninstall()
    try:
        check(model)
    finally:
        cp_attn.install()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cp_attn.install()
    for name in sys.argv[3:]:
        try:
            globals()[name]()
            say(scene=name, error=None)
        except Exception:
            say(scene=name, error=traceback.format_exc()[-2500:])
