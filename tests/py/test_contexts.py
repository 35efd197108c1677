"""Contexts: made for a config, found again, closed; and what `import cp_attn` costs."""

import functools
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from launch import RANK_VARIABLES, clean_environ, launch

import cp_attn
from cp_attn import _C, _contexts, _ranks

SCENES = {
    2: (
        "init",
        "two_at_once",
        "a_context_for_a_config",
        "any_address",
        "late_then_afresh",
        "wrong_degrees",
        "error_on_one_rank",
        "other_config_on_one_rank",
        "forked_child",
        "argument_missing_on_one_rank",
        "torch_distributed_alone",
        "exit_without_close",
    ),
    3: (
        "init",
        "a_context_for_a_config",
        "any_address",
        "late_then_afresh",
        "error_on_one_rank",
        "other_config_on_one_rank",
    ),
    4: ("mesh_regions",),
}


@functools.cache
def scenes(world):
    return launch("ranks_contexts.py", world, *SCENES[world])


def python(code, *options):
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("world, scene", [(world, scene) for world, names in SCENES.items() for scene in names])
def test_scene(world, scene):
    for rank in scenes(world):
        line = rank.line(scene=scene)
        assert line["error"] is None, f"rank {rank.rank}: {line['error']}"
        assert rank.code == (5 if "exit_without_close" in SCENES[world] else 0), rank.err


@pytest.mark.parametrize(
    "more",
    (
        "",
        "import torch.distributed as d; d.init_process_group('gloo'); ",
        "import os; os.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + 1); ",
    ),
    ids=("plain", "gloo", "a port where nobody listens"),
)
def test_torchrun(more, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        f"{more}import torch, cp_attn\n"
        "c = cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=2))\n"
        "x = torch.ones(1, 4, 2, 8)\n"
        "assert cp_attn.attention(x, x, x, c).allclose(x)\n"
        "print('fine')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done.stderr[-2000:]


def test_ranks_come_in_any_order():
    """Four ranks, each some time after the one before, in all 24 orders."""
    config = cp_attn.ContextParallelConfig(ring_degree=4)

    def come(rank, order, key):
        time.sleep(0.015 * order.index(rank))
        with _C.Context(config, rank=rank, world=4, key=key) as context:
            return context.gather(np.array([2.0**rank]), 0).tolist()

    with ThreadPoolExecutor(4) as pool:
        for order in itertools.permutations(range(4)):
            key = f"order {os.getpid()} {order}"
            found = [pool.submit(come, rank, order, key) for rank in range(4)]
            assert [future.result() for future in found] == [[1.0, 2.0, 4.0, 8.0]] * 4


def test_no_ranks():
    done = python("import cp_attn; cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=2))")
    assert done.returncode == 1
    for word in ("RuntimeError", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "torch.distributed", "torchrun"):
        assert word in done.stderr, done.stderr


def test_no_ranks_but_torch():
    """torch.distributed is there, only not initialised."""
    pytest.importorskip("torch")
    code = "import torch.distributed, cp_attn; cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=2))"
    assert "nor is torch.distributed initialised" in python(code).stderr


def test_import_is_light():
    """Neither torch nor numpy nor diffusers comes with it, and it takes no more than 60 ms."""
    heavy = "('torch', 'numpy', 'diffusers')"
    done = python(f"import sys, cp_attn; print([m for m in {heavy} if m in sys.modules], cp_attn.__version__)")
    assert done.stdout.startswith("[]"), done
    took = [int(python("import cp_attn", "-X", "importtime").stderr.split("|")[-2]) for _ in range(5)]
    assert min(took) <= 60_000, took


def test_public_names():
    for name in cp_attn.__all__:
        assert getattr(cp_attn, name) is not None and name in dir(cp_attn)
        assert name == "__version__" or getattr(cp_attn, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cp_attn.nothing  # noqa: B018


def theirs(**fields):
    """A config as diffusers has it: attributes, and a class of its own."""
    base = dict(ring_degree=2, ulysses_degree=1, convert_to_fp32=False, rotate_method="allgather", mesh=None)
    return SimpleNamespace(**base | dict(ulysses_anything=False, ring_anything=True) | fields)


def test_configs_by_attribute():
    expected = cp_attn.ContextParallelConfig(ring_degree=2, convert_to_fp32=False, ring_anything=True)
    both = SimpleNamespace(context_parallel_config=theirs(), tensor_parallel_config=None)
    assert _contexts.read_config(expected) is expected
    assert _contexts.read_config(theirs()) == expected == _contexts.read_config(both)
    assert expected.rotate_method == "auto"
    assert _contexts.read_config(theirs(rotate_method="alltoall")).rotate_method == "alltoall"


@pytest.mark.parametrize(
    "config, kind, word",
    [
        (SimpleNamespace(context_parallel_config=theirs(), tensor_parallel_config=1), ValueError, "tensor-parallel"),
        (SimpleNamespace(tp_degree=2), ValueError, "tensor-parallel"),
        (SimpleNamespace(context_parallel_config=None), ValueError, "None"),
        (None, TypeError, "NoneType"),
        ({"ring_degree": 2}, TypeError, "dict"),
        (theirs(ring_degree=1), ValueError, "1"),
    ],
)
def test_bad_configs(config, kind, word):
    with pytest.raises(kind, match=word):
        _contexts.read_config(config)


def test_a_mesh_must_be_one():
    config = SimpleNamespace(ring_degree=2, ulysses_degree=1, mesh="ring")
    with pytest.raises(ValueError, match="str.*DeviceMesh"):
        _ranks.place(config, dict(RANK="0", WORLD_SIZE="2", MASTER_PORT="1"))


def test_launch_hides_other_launchers():
    assert not [name for name in clean_environ() if name.startswith(RANK_VARIABLES)]
