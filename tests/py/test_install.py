"""After `install`, diffusers' own ways of enabling lead to cp_attn; after `uninstall` they are diffusers' again."""

import difflib
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from launch import RANK_VARIABLES, clean_environ, launch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.models._modeling_parallel import TensorParallelConfig  # noqa: E402
from diffusers.models.modeling_utils import ModelMixin  # noqa: E402
from tiny_models import JOINT, make  # noqa: E402

import cp_attn  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
OWNERS = (ModelMixin, diffusers.AutoModel)
CONFIG = cp_attn.ContextParallelConfig(ring_degree=2)
SCENES = (
    "at_load_time",
    "loading_info",
    "by_the_method",
    "refused_after_loading",
    "one_rank_cannot_load",
    "another_class_on_one_rank",
    "enabled_models_stay_enabled",
)


@pytest.fixture
def installed(monkeypatch):
    for name in [name for name in os.environ if name.startswith(RANK_VARIABLES)]:
        monkeypatch.delenv(name)
    cp_attn.install()
    yield
    cp_attn.uninstall()


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    make("flux")[0].save_pretrained(folder)
    return str(folder)  # AutoModel takes no Path


@pytest.fixture(scope="module")
def ranks(flux, tmp_path_factory):
    heads = tmp_path_factory.mktemp("heads")
    fields = JOINT | dict(num_attention_heads=3, pooled_projection_dim=20, axes_dims_rope=[4, 4, 8])
    diffusers.FluxTransformer2DModel(**fields).save_pretrained(heads)
    return launch("ranks_install.py", 2, flux, heads, *SCENES, timeout=240)


def methods():
    return [dict(vars(owner)) for owner in OWNERS]


@pytest.mark.parametrize("scene", SCENES)
def test_scene(ranks, scene):
    for rank in ranks:
        line = rank.line(scene=scene)
        assert line["error"] is None, f"rank {rank.rank}: {line['error']}"


def test_restored():
    before = methods()
    cp_attn.uninstall()  # nothing to undo
    for _ in range(2):
        cp_attn.install()
        after = methods()
        changed = [[name for name in old if new[name] is not old[name]] for old, new in zip(before, after, strict=True)]
        assert changed == [["from_pretrained", "enable_parallelism"], ["from_pretrained"]]
        cp_attn.install()
        assert all(new[name] is now[name] for new, now in zip(after, methods(), strict=True) for name in new)
        cp_attn.uninstall()
        restored = methods()
        assert [list(now) for now in restored] == [list(old) for old in before]
        assert all(now[name] is old[name] for old, now in zip(before, restored, strict=True) for name in old)


def test_what_others_put_on_top_stays(monkeypatch, flux):
    cp_attn.install()
    ours = ModelMixin.enable_parallelism
    monkeypatch.setattr(ModelMixin, "enable_parallelism", lambda self, **given: ours(self, **given))
    theirs = ModelMixin.enable_parallelism
    cp_attn.uninstall()
    assert ModelMixin.enable_parallelism is theirs
    monkeypatch.undo()  # puts ours back: it is diffusers' way all the same
    try:
        with pytest.raises(RuntimeError, match="torch.distributed must be available"):
            make("flux")[0].enable_parallelism(config=diffusers.ContextParallelConfig(ring_degree=2))
    finally:
        ModelMixin.enable_parallelism = ours.__wrapped__


def test_a_load_without_a_config(installed, flux):
    assert diffusers.AutoModel.from_pretrained(flux)._parallel_config is None
    assert diffusers.FluxTransformer2DModel.from_pretrained(flux, parallel_config=None)._parallel_config is None


@pytest.mark.parametrize("cls", [diffusers.AutoModel, diffusers.FluxTransformer2DModel])
def test_refused_before_a_file_is_read(installed, cls):
    tensor = TensorParallelConfig(2)
    for config in (tensor, diffusers.ParallelConfig(tensor_parallel_config=tensor)):
        with pytest.raises(ValueError, match="tensor-parallel"):
            cls.from_pretrained("nowhere", parallel_config=config)
    with pytest.raises(TypeError, match="dict"):
        cls.from_pretrained("nowhere", parallel_config={"ring_degree": 2})
    with pytest.raises(RuntimeError, match="no rank environment"):
        cls.from_pretrained("nowhere", parallel_config=CONFIG)


def test_refused_by_the_method(installed):
    model, _ = make("flux")
    with pytest.raises(ValueError, match="tensor-parallel"):
        model.enable_parallelism(config=TensorParallelConfig(2))
    with pytest.raises(RuntimeError, match="no rank environment"):
        model.enable_parallelism(config=CONFIG)
    with pytest.raises(TypeError, match="positional"):
        model.enable_parallelism(CONFIG)  # as in diffusers
    assert model._parallel_config is None


def test_before_diffusers_is_imported():
    script = (
        "import sys, cp_attn; assert 'diffusers' not in sys.modules; cp_attn.install()\n"
        "from diffusers import AutoModel, ContextParallelConfig\n"
        "AutoModel.from_pretrained('nowhere', parallel_config=ContextParallelConfig(ring_degree=2))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=clean_environ(), capture_output=True, text=True)
    assert "RuntimeError: no rank environment" in done.stderr, done.stderr


@pytest.mark.parametrize("missing", ["diffusers", "torch"])
def test_not_installed(missing):
    script = f"import sys; sys.modules[{missing!r}] = None; from cp_attn import install; install()"
    done = subprocess.run([sys.executable, "-c", script], env=clean_environ(), capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: cp_attn.install needs diffusers") and missing in last, done.stderr


@pytest.mark.parametrize("owner, name", [(ModelMixin, "enable_parallelism"), (diffusers.AutoModel, "from_pretrained")])
def test_another_build_of_diffusers(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    before = methods()
    with pytest.raises(RuntimeError, match=rf"diffusers .* lacks {owner.__name__}\.{name}"):
        cp_attn.install()
    assert methods() == before


def test_the_example_differs_in_imports():
    old, new = ((EXAMPLES / name).read_text().splitlines() for name in ("flux_upstream.py", "flux_install.py"))
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-" and line[2:].strip()]
    assert changed and all(" import " in line or line == "+ install()" for line in changed), changed


def test_two_ranks_draw_what_one_draws(tmp_path):
    script, latents = EXAMPLES / "flux_install.py", tmp_path / "latents.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, latents]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    spec = spec_from_file_location("flux_install", script)
    example = module_from_spec(spec)
    try:
        spec.loader.exec_module(example)
        alone = example.denoise(example.make_transformer())
    finally:
        cp_attn.uninstall()
    assert (torch.load(latents) - alone).abs().max() < 1e-4
