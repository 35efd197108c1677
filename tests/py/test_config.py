"""The config as a value: fields, order of the checks, copies, pickles, subclasses, garbage."""

import copy
import gc
import inspect
import math
import pickle
import weakref

import numpy as np
import pytest

from cp_attn import _C, ContextParallelConfig

FIELDS = {
    "ring_degree": 2,
    "ulysses_degree": 1,
    "convert_to_fp32": True,
    "rotate_method": "auto",
    "mesh": None,
    "ulysses_anything": False,
    "ring_anything": False,
    "timeout": 600.0,
    "unified_anything": False,
}


class Mesh:
    """What the config asks of a mesh."""

    mesh_dim_names = ("ring", "ulysses")

    def __repr__(self):
        return "a mesh"


class Child(ContextParallelConfig):
    """A subclass with an attribute of its own."""


class Index:
    """What is used as an int, or raises where it is asked to be one."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64, np.uint64, np.array, Index])
def test_whole_numbers_of_other_kinds(kind):
    config = ContextParallelConfig(kind(2), kind(3), timeout=np.int64(7) if kind is Index else kind(7))
    assert config == ContextParallelConfig(2, 3, timeout=7.0) and hash(config) == hash(
        ContextParallelConfig(2, 3, timeout=7)
    )
    assert [type(n) for n in (config.ring_degree, config.ulysses_degree, config.timeout)] == [int, int, float]
    assert pickle.loads(pickle.dumps(config)) == config == eval(repr(config))


def test_defaults_and_order():
    config = ContextParallelConfig(2)
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS
    assert list(inspect.signature(ContextParallelConfig).parameters) == list(FIELDS)
    assert config.mesh_shape == (2, 1)
    assert config.mesh_dim_names == ("ring", "ulysses")
    assert config.tensor_parallel_config is None
    config = ContextParallelConfig(3, 4, False, "alltoall", None, False, False, timeout=5, unified_anything=True)
    assert config.mesh_shape == (3, 4)
    assert (config.convert_to_fp32, config.rotate_method) == (False, "alltoall")
    assert (config.timeout, type(config.timeout), config.unified_anything) == (5.0, float, True)
    with pytest.raises(TypeError, match="positional"):
        ContextParallelConfig(3, 4, False, "alltoall", None, False, False, 5.0)


def test_nothing_can_be_set():
    config = ContextParallelConfig(2)
    for name in (*FIELDS, "mesh_shape", "other"):
        with pytest.raises(AttributeError):
            setattr(config, name, 3)
        with pytest.raises(AttributeError):
            delattr(config, name)
    with pytest.raises(TypeError):
        ContextParallelConfig.ring_degree = 3
    config.__init__(3)
    assert config.ring_degree == 2


def test_equal_configs_are_one_key():
    variants = [
        ContextParallelConfig(2),
        ContextParallelConfig(3),
        ContextParallelConfig(2, 2),
        ContextParallelConfig(2, convert_to_fp32=False),
        ContextParallelConfig(2, rotate_method="allgather"),
        ContextParallelConfig(2, ring_anything=True),
        ContextParallelConfig(1, 2, ulysses_anything=True),
        ContextParallelConfig(2, 2, unified_anything=True),
        ContextParallelConfig(2, timeout=1.5),
        ContextParallelConfig(2, mesh=Mesh()),
        ContextParallelConfig(2, mesh=Mesh()),
    ]
    assert len(set(variants)) == len(variants)
    for a in variants:
        assert [a == b for b in variants].count(True) == 1
    assert ContextParallelConfig(2, None) == ContextParallelConfig(ring_degree=2, ulysses_degree=1, timeout=600)
    assert hash(ContextParallelConfig(2)) == hash(ContextParallelConfig(2, 1))
    assert ContextParallelConfig(2) != 2
    assert ContextParallelConfig(2) != Child(2)
    with pytest.raises(TypeError):
        sorted([ContextParallelConfig(2), ContextParallelConfig(3)])


@pytest.mark.parametrize(
    "config",
    [
        ContextParallelConfig(2),
        ContextParallelConfig(2, rotate_method="allgather", ring_anything=True, timeout=0.1),
        ContextParallelConfig(3, 2, False, "alltoall", unified_anything=True),
        ContextParallelConfig(ulysses_degree=7, ulysses_anything=True),
    ],
)
def test_copies(config):
    assert eval(repr(config)) == config
    assert copy.copy(config) is config and copy.deepcopy(config) is config
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(config, protocol))
        assert again == config and type(again) is ContextParallelConfig


def test_subclass():
    child = Child(2, timeout=3.0)
    child.note = "mine"
    assert repr(child).startswith("Child(ring_degree=2")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(child, protocol))
        assert (type(again), again, again.note) == (Child, child, "mine")
    with pytest.raises(ValueError):
        Child(1)


def test_mesh():
    mesh = Mesh()
    config = ContextParallelConfig(2, mesh=mesh)
    assert config.mesh is mesh
    assert config == ContextParallelConfig(2, mesh=mesh) != ContextParallelConfig(2)
    assert "mesh=a mesh" in repr(config)
    assert copy.deepcopy(config).mesh is mesh
    with pytest.raises(TypeError, match="mesh"):
        pickle.dumps(config)


def test_cycle_through_the_mesh_is_collected():
    mesh = Mesh()
    mesh.config = ContextParallelConfig(2, mesh=mesh)
    gone = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "keywords,error,words",
    [
        # In the order of the checks: each breaks a later rule as well.
        (dict(ring_degree=0, timeout="soon"), TypeError, ["timeout", "str"]),
        (dict(ring_degree=2**70, convert_to_fp32=1), TypeError, ["convert_to_fp32", "int"]),
        (dict(ring_degree=2, rotate_method=1), TypeError, ["rotate_method", "int"]),
        (dict(ring_degree=2, mesh="mesh"), TypeError, ["mesh", "str"]),
        (dict(ring_degree=2, timeout=True), TypeError, ["timeout", "bool"]),
        (dict(ring_degree=2, ring_anything=None), TypeError, ["ring_anything", "NoneType"]),
        (dict(ring_degree=2, ulysses_degree=-5, rotate_method="x"), ValueError, ["ulysses_degree", "-5", "1 to 1024"]),
        (dict(ring_degree=np.bool_(True)), TypeError, ["ring_degree", "bool"]),
        (dict(ulysses_degree=np.float64(2)), TypeError, ["ulysses_degree", "float64"]),
        (dict(ring_degree="2"), TypeError, ["ring_degree", "str"]),
        (dict(ring_degree=np.array([2])), TypeError, ["ring_degree", "ndarray"]),
        (dict(ring_degree=Index(KeyError("own"))), TypeError, ["ring_degree", "Index"]),
        (dict(ring_degree=np.int64(0)), ValueError, ["ring_degree", "0", "1 to 1024"]),
        (dict(ring_degree=Index(2**70)), ValueError, ["ring_degree", "1024"]),
        (dict(ring_degree=2, timeout=np.bool_(True)), TypeError, ["timeout", "bool"]),
        (dict(ring_degree=2**70), ValueError, ["ring_degree", str(2**70), "1024"]),
        (dict(ulysses_degree=-(2**70)), ValueError, ["ulysses_degree", str(-(2**70))]),
        (dict(ring_degree=1, rotate_method="x"), ValueError, ["ring_degree", "ulysses_degree", "both 1"]),
        (dict(ring_degree=2, rotate_method="x", ulysses_anything=True), ValueError, ["'x'", "'auto'", "'alltoall'"]),
        (dict(ring_degree=2, ulysses_anything=True, ring_anything=True), ValueError, ["ulysses_anything", "=1"]),
        (dict(ring_degree=2, ulysses_degree=3, ulysses_anything=True), ValueError, ["ring_degree=2", "unified"]),
        (dict(ulysses_degree=2, ring_anything=True, timeout=-1), ValueError, ["ring_anything", "ring_degree=1"]),
        (dict(ring_degree=2, ulysses_degree=3, ring_anything=True), ValueError, ["ulysses_degree=3", "unified"]),
        (dict(ring_degree=2, unified_anything=True, timeout=-1), ValueError, ["unified_anything", "ulysses_degree=1"]),
        (dict(ring_degree=2, timeout=-1), ValueError, ["timeout", "-1"]),
        (dict(ring_degree=2, timeout=math.inf), ValueError, ["timeout", "inf"]),
        (dict(ring_degree=2, timeout=10**400), ValueError, ["timeout"]),
        (dict(ring_degree=2, ring=2), TypeError, ["ring"]),
    ],
)
def test_refusals(keywords, error, words):
    with pytest.raises(error) as caught:
        ContextParallelConfig(**keywords)
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_nothing_leaks():
    live = _C._mem_stats()[0]

    def work():
        for _ in range(200):
            config = ContextParallelConfig(2, mesh=Mesh())
            hash(config), repr(config), config == config
            pickle.loads(pickle.dumps(ContextParallelConfig(2)))
            with pytest.raises(TypeError):
                pickle.dumps(config)
            with pytest.raises(ValueError):
                ContextParallelConfig(2, mesh=Mesh(), timeout=0)

    work()
    gc.collect()
    before = len(gc.get_objects())
    work()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert _C._mem_stats()[0] == live
