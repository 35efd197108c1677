"""The benchmark for one GPU, as far as it goes without one: all but the times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import clean_environ

pytest.importorskip("diffusers", minversion="0.42")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]


def python(*words):
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_says_so():
    done = python("-m", "benchmarks.gpu_single", "--check")
    assert done.returncode == 3 and "no GPU on this machine" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16", "--shape", "13x8x32")])
def test_all_rows_without_times(tmp_path, options):
    rows = tmp_path / "rows.json"
    done = python("-m", "benchmarks.gpu_single", "--simulated", "--check", "--json", str(rows), *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    taken = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    marks = {name: (row["floor"], row["goal"]) for name, row in taken.items()}
    assert marks == {
        "attention as called, beside the bare kernel": (0.98, 1.0),
        "Ulysses of 4, data path": (2, 4),
        "merge of 4 blocks": (6, 10),
        "ring of 4, whole operation": (2.5, 3.5),
        "host time to enqueue, Ulysses": (8, 15),
        "host time to enqueue, ring": (15, 30),
        "transient bytes, ring of 4": (0.40, 0.32),
        "graph replay, host time of eager over it": (3, 6),
    }
    assert all(row["ours"] is row["theirs"] is row["ratio"] is None and row["command"] for row in taken.values())
    assert "the answers of both sides agree; nothing was timed" in done.stdout


def test_sides_that_differ_are_not_timed():
    program = """
import sys
from unittest import mock
from benchmarks import gpu_single, upstream_rank

sys.argv[1:] = ["--simulated"]
faults = {
    "Ulysses": ("_exchange", lambda x, *rest: x.roll(1, 0)),
    "ring": ("_gather", lambda world: lambda x, **rest: x.roll(3).repeat(world)),
    "attention": ("bare", lambda q, k, v: [v.transpose(1, 2)]),
    "merge": ("merge", lambda q, outs, *rest: outs[0]),
}
for name, (function, fault) in faults.items():
    with mock.patch.object(upstream_rank, function, fault):
        try:
            gpu_single.main()
        except SystemExit as end:
            assert f"{name}: the two sides are" in str(end), end
        else:
            raise AssertionError(f"{name} was not found")
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_ratios_and_marks():
    program = """
from benchmarks.gpu_single import Row
from benchmarks.gpu_machines import medians
fast, slow = Row("x", "ms", 1.0, 3.0, 2.5, 3.5), Row("x", "ms", 2.0, 3.0, 2.5, 3.5)
small, large = (Row("x", "MiB", ours, 100.0, 0.4, 0.3, is_small=True) for ours in (39.0, 41.0))
assert [row.ratio for row in (fast, slow, small, large)] == [3.0, 1.5, 0.39, 0.41]
assert [row.is_below for row in (fast, slow, small, large)] == [False, True, False, True]
assert "| 3.00 | 2.5 | 3.5 |" in fast.line() and "| 0.39 | <= 0.4 | <= 0.3 |" in small.line()
order = []
times = iter([9, 9, 1, 5, 3, 6, 2, 40])  # the first of each side warms up
assert medians(lambda side: (order.append(side), next(times))[1], ("a", "b"), 3) == [2, 6]
assert "".join(order) == "abababab"
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_machine_that_measures(tmp_path):
    """The times of both sides, the host's with what the gate and Python take, and the floors."""
    program = f"""
import sys
from benchmarks import gpu_single
from benchmarks.gpu_machines import Simulated

class Timed(Simulated):
    is_timed = True
    taken = 0

    def ms(self, function):
        function()
        self.taken += 1
        return 1.0 if self.taken % 2 else 3.0  # ours come first

    host_us = ms

    def transient_bytes(self, function):
        function()
        return 1 << 20

gpu_single.Simulated = gpu_single.Gpu = Timed
gpu_single.torch.cuda.is_available = lambda: True
gpu_single.gate_and_python_us = lambda: 1.0
sys.argv[1:] = "--check --shape 8x4x16 --dtype float32 --rounds 2 --json {tmp_path}/rows.json".split()
sys.exit(gpu_single.main())
"""
    done = python("-c", program)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-3000:]  # floors of 6 and more are missed
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "rows.json").read_text().splitlines())}
    assert rows["ring of 4, whole operation"]["ratio"] == 3.0
    assert rows["host time to enqueue, ring"]["ratio"] == 1.5
    assert rows["host time to enqueue, Ulysses"]["note"] == "ours with 1.0 us for the gate and Python"
    memory = rows["transient bytes, ring of 4"]
    assert memory["theirs"] == 1.0 and memory["ratio"] == memory["ours"] > 1.0  # the workspace counts


def test_what_torch_is_asked_on_a_gpu():
    """The GPU's own time is between two events behind an idle GPU; memory is the peak less what stays."""
    program = """
from types import SimpleNamespace
from unittest import mock
import torch
from benchmarks import gpu_library, gpu_machines

said = []
class Event:
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        said.append("event")
    def elapsed_time(self, end):
        return 2.5
cuda = SimpleNamespace(
    Event=Event, synchronize=lambda: said.append("wait"), current_device=lambda: 3, get_device_name=lambda: "a GPU",
    get_device_capability=lambda: (9, 0), memory_allocated=lambda: 100, max_memory_allocated=lambda: 170,
    reset_peak_memory_stats=lambda: said.append("peak"),
    current_stream=lambda: SimpleNamespace(cuda_stream=7),
)
built = []
with mock.patch.object(torch, "cuda", cuda), mock.patch.object(gpu_library, "Library", lambda path, ordinal: ordinal), \
        mock.patch.object(gpu_library, "build_for_gpu", built.append):
    gpu = gpu_machines.Gpu()
    assert built == ["90"] and gpu.library == 3 and gpu.stream() == 7
    assert gpu.ms(lambda: said.append("work")) == 2.5
    assert said == ["wait", "event", "work", "event", "wait"]
    del said[:]
    assert gpu.host_us(lambda: said.append("work")) >= 0 and said == ["wait", "work"]
    assert gpu.transient_bytes(lambda: torch.zeros(5, dtype=torch.float32)) == 50
    assert gpu.transient_bytes(lambda: None) == 70
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr[-3000:]
