"""The Flux example differs from diffusers' in two places and draws what one process draws; training follows it."""

import difflib
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from launch import clean_environ

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits"
# train.py's main, where the parameter that comes last is left out of the sum.
FORGETFUL = f"""
import sys

sys.path.insert(0, {str(DIGITS)!r})
import train

complete = train.sum_gradients
train.sum_gradients = lambda parameters: complete(parameters[:-1])
sys.exit(train.main())
"""


def torchrun(ranks, script, *args, timeout=120):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(arg) for arg in (script, *args)]
    return subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=timeout)


def test_the_difference():
    old, new = ((EXAMPLES / name).read_text().splitlines() for name in ("flux_upstream.py", "flux_cp_attn.py"))
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-" and line[2:].strip()]
    assert changed and all(" import " in line or "enable_parallelism(" in line for line in changed), changed
    assert sum("enable_parallelism(" in line for line in changed) == 2


def test_two_ranks_draw_what_one_draws(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    script, latents = EXAMPLES / "flux_cp_attn.py", tmp_path / "latents.pt"
    done = torchrun(2, script, latents)
    assert done.returncode == 0, done.stderr[-3000:]
    spec = spec_from_file_location("flux_cp_attn", script)
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    alone = example.denoise(example.make_transformer())
    assert (torch.load(latents) - alone).abs().max() < 1e-4


@pytest.fixture
def digits(monkeypatch):
    """What the digit examples need, and their folder as the first to import from."""
    for name in ("torch", "diffusers", "sklearn", "safetensors", "tqdm"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(DIGITS)


@pytest.mark.parametrize("variant", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process(ranks, variant, digits, tmp_path):
    options = [f"--{variant}-degree", ranks, f"--{variant}-anything", "--steps", 50, "--batch", 8, "--compare"]
    done = torchrun(ranks, DIGITS / "train.py", *options, "--out", tmp_path / "weights", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    written, compared = done.stdout.splitlines()
    assert written.endswith(f"{tmp_path}/weights") and (tmp_path / "weights").stat().st_size > 2**20
    pattern = rf"{ranks} ranks, {variant}_anything: in 50 steps .* most (\S+), the weights by (\S+) \(relative\)"
    differences = [float(number) for number in re.fullmatch(pattern, compared).groups()]
    assert max(differences) < 1e-5, compared


def test_a_forgotten_parameter_is_noticed(digits, tmp_path):
    weights = DIGITS / "weights.safetensors"
    script, before = tmp_path / "forgetful.py", weights.read_bytes()
    script.write_text(FORGETFUL)
    done = torchrun(2, script, "--ring-degree", 2, "--steps", 10, "--batch", 4, "--compare")
    assert done.returncode != 0 and "a difference is above 1e-04" in done.stderr, done.stderr[-3000:]
    assert weights.read_bytes() == before, "comparing has replaced the weights that come with the example"


def test_training_alone(digits, tmp_path, monkeypatch, capsys):
    import train

    def main(*args):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, args)])
        return train.main()

    # Ten steps: OneCycleLR must not divide by a warm-up of one step less one.
    assert main("--steps", 10, "--batch", 2, "--out", tmp_path / "weights") is None
    assert (tmp_path / "weights").stat().st_size > 2**20
    for refused in (["--compare"], ["--ring-degree", 2], ["--steps", 0]):
        with pytest.raises(SystemExit):
            main(*refused)
        assert "train.py: error: " in capsys.readouterr().err
