"""The Flux example: cp_attn's differs from diffusers' in two places, and draws what one process draws."""

import difflib
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from launch import clean_environ

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_difference():
    old, new = ((EXAMPLES / name).read_text().splitlines() for name in ("flux_upstream.py", "flux_cp_attn.py"))
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-" and line[2:].strip()]
    assert changed and all(" import " in line or "enable_parallelism(" in line for line in changed), changed
    assert sum("enable_parallelism(" in line for line in changed) == 2


def test_two_ranks_draw_what_one_draws(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    script, latents = EXAMPLES / "flux_cp_attn.py", tmp_path / "latents.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, latents]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    spec = spec_from_file_location("flux_cp_attn", script)
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    alone = example.denoise(example.make_transformer())
    assert (torch.load(latents) - alone).abs().max() < 1e-4
