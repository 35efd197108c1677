"""The benchmarks still build and run; what they measure is read by people."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import clean_environ

from benchmarks import counted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", sorted(p.name for p in (ROOT / "benchmarks").glob("*.c")))
def test_programs_fit_the_core(program):
    flags = "-std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fsyntax-only -Icsrc -Icuda".split()
    command = [os.environ.get("CC", "cc"), *flags]
    done = subprocess.run([*command, f"benchmarks/{program}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels(tmp_path):
    """Every kernel of this machine, beside torch."""
    rows = tmp_path / "rows.json"
    options = ["--shape", "64x256x64", "--dtype", "float32", "--rounds", "1", "--repeats", "1", "--json", str(rows)]
    command = [sys.executable, "-m", "benchmarks.kernels", *options]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = [json.loads(line) for line in rows.read_text().splitlines()]
    assert taken[0]["kernel"] == "generic"
    assert all(row["gflops"] > 0 and row["backward"] > 0 and row["ratio"] > 0 and row["command"] for row in taken)


def test_ranks(tmp_path):
    """Every ratio, forward and backward."""
    rows = tmp_path / "rows.json"
    options = "--tokens 360 --heads 2 --dim 16 --rounds 1 --repeats 1 --json".split()
    command = [sys.executable, "-m", "benchmarks.ranks", *options, str(rows)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["mark"] for row in taken} == {"", "C7", "C8", "C9", "C10"}
    assert {row["op"] for row in taken} == {"attention", "attention_backward"}
    assert all(row["share"] > 0 and row["command"] for row in taken)


def test_block(tmp_path):
    """A block of FLUX on two ranks computes what it does on one."""
    pytest.importorskip("diffusers", minversion="0.42")
    rows = tmp_path / "rows.json"
    options = ["--heads", "2", "--tokens", "32", "--rounds", "1", "--json", str(rows)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "benchmarks.block", *options]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["backend"] for row in taken] == ["ring", "ulysses"]
    assert all(0 < row["error"] < 1e-4 and row["of_share"] > 0 and row["command"] for row in taken)


def test_modelled():
    """docs/gpu-results.md has the tables of modelled times."""
    diffusers = pytest.importorskip("diffusers", minversion="0.42")
    document = (ROOT / "docs" / "gpu-results.md").read_text()
    if f"benchmarks.modelled --check`, diffusers {diffusers.__version__}," not in document:
        pytest.skip(f"the tables are of another version than diffusers {diffusers.__version__}")
    command = [sys.executable, "-m", "benchmarks.modelled", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_counted_notices_more_and_less():
    """Two per cent either way, and any allocation; `.ci/run` makes the counts."""
    before = {"instructions": 1000.0, "reads": 200.0, "allocations": 0}
    assert not list(counted.differences("x", {"instructions": 1019.0, "reads": 197.0, "allocations": 0}, before))
    moved = list(counted.differences("x", {"instructions": 1021.0, "reads": 195.0, "allocations": 1}, before))
    assert moved == [
        "x: 1,021 instructions, recorded 1,000 (+2.1%)",
        "x: 195 reads, recorded 200 (-2.5%)",
        "x: 1 allocations, recorded 0 (new)",
    ]


def test_gate(tmp_path):
    """Every row is there: the core by ranks, and Python from each kind of tensor."""
    rows = tmp_path / "rows.json"
    options = ["--rounds", "1", "--calls", "100", "--world", "1", "--world", "2", "--json", str(rows)]
    command = [sys.executable, "-m", "benchmarks.gate", *options]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = {(row["what"], row["world"]): row for row in map(json.loads, rows.read_text().splitlines())}
    kinds = ("NumPy", "torch", "torch, gradients recorded")
    expected = {(f"C core, {op}", world) for op in ("agree", "attention") for world in (1, 2)}
    expected |= {(f"attention(){over}, {kind}", 2) for over in ("", " over the C core") for kind in kinds}
    assert set(taken) == expected
    assert all(row["us"] > 0 and row["command"] for row in taken.values())
    assert "limit 20" in done.stdout


def test_gpu_costs(tmp_path):
    """Both sides count, and docs/gpu-results.md has what they say: ours always, diffusers' for its versions."""
    pytest.importorskip("diffusers", minversion="0.42")
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.gpu_costs", "--check", "--json", str(rows)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    document = (ROOT / "docs" / "gpu-results.md").read_text()
    versions = next(line for line in done.stdout.splitlines() if line.startswith("versions: "))
    is_same = versions.removeprefix("versions: ") in document
    known = set(document.splitlines())
    lines = [line for line in done.stdout.splitlines() if line.startswith("|") and (is_same or "| cp_attn |" in line)]
    assert not [line for line in lines if line not in known]
    taken = {}
    for row in map(json.loads, rows.read_text().splitlines()):
        taken[row["op"], row["shape"].split(",")[0], row["variant"], row["side"]] = row
    ring, anything = (
        [taken["attention", "FLUX 1024x1024", variant, side] for side in ("diffusers, `flash`", "cp_attn")]
        for variant in ("ring", "ulysses_anything")
    )
    # Three blocks of k and v leave each of four ranks; four gathers of sizes, of which each is five waits.
    assert [row["sent_bytes"] for row in ring] == [3 * 2 * 1152 * 24 * 128 * 2] * 2
    assert [row["host_waits"] for row in anything] == [20, 0]
    assert anything[0]["size_gathers"] == 4
    assert all(row["host_waits"] == 0 and row["host_exchanges"] == 1 for row in taken.values() if "groups" in row)
