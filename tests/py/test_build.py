"""What setup.py decides about the GPU part, before anything is compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ask(**environ):
    """Return (exit code, what setup.py says) where it is asked for the name alone."""
    command = [sys.executable, "setup.py", "--name"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CP_ATTN_", "CUDA_"))}
    done = subprocess.run(command, cwd=ROOT, env=clean | environ, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def old_nvcc(tmp_path):
    """A toolkit that is too old."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    return str(tmp_path)


def test_left_out_on_demand():
    code, said = ask(CP_ATTN_CUDA="0")
    assert code == 0 and "cp_attn._cuda is not built: CP_ATTN_CUDA=0" in said


def test_left_out_with_a_reason(old_nvcc):
    code, said = ask(CUDA_HOME=old_nvcc)
    assert code == 0 and "not built" in said and "release 12.4" in said and "12.8 or later" in said


def test_demanded_in_vain(old_nvcc):
    code, said = ask(CUDA_HOME=old_nvcc, CP_ATTN_CUDA="1")
    assert code != 0 and "CP_ATTN_CUDA=1" in said and "release 12.4" in said


def test_another_value():
    code, said = ask(CP_ATTN_CUDA="yes")
    assert code != 0 and "'yes'" in said and "allowed: 0, 1" in said
