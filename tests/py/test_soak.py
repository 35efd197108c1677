"""The soak's own scenes: a few of every kind come out right, and it says so where one does not."""

import subprocess
import sys
from pathlib import Path

from launch import clean_environ

SOAK = Path(__file__).parents[1] / "soak"


def soak(*args):
    command = [sys.executable, str(SOAK), *map(str, args)]
    return subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=200)


def test_scenes():
    done = soak("--seed", 1, "--scenes", 12, "--seconds", 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scenes 12, hangs 0, wrong answers and endings 0, leftovers 0" in done.stdout


def test_a_wrong_answer_is_counted(tmp_path):
    for name in ("__main__.py", "rank.py"):
        text = (SOAK / name).read_text().replace('HERE.parent / "py"', repr(str(SOAK.parent / "py")))
        (tmp_path / name).write_text(text.replace("is_causal=is_causal)\n", "is_causal=not is_causal)\n", 1))
    command = [sys.executable, str(tmp_path), "--seed", "1", "--scenes", "3"]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "WrongAnswer" in done.stdout, done.stdout + done.stderr
