"""Arrays in and out: producers made by hand, NumPy, torch. Two thread ranks take part in every call."""

import ctypes
import functools
import gc
import importlib.util
import itertools
import math
import mmap
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from dlpack_structs import PYTHON, Plain, Versioned
from thread_ranks import Ranks, cut, oracle

from cp_attn import _C

# --- a producer of DLPack capsules whose every field can be set ---

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LIVE = {}  # managed tensors by address, with their producers: what deleters take out


@DELETER
def delete(address):
    LIVE.pop(address)[1].deleted += 1


@DELETER
def destroy(capsule):
    for name in (b"dltensor", b"dltensor_versioned"):
        if PYTHON.PyCapsule_IsValid(capsule, name):
            delete(PYTHON.PyCapsule_GetPointer(capsule, name))


class Producer:
    """Exports a float32 array as told."""

    def __init__(self, array, versioned=True, strides="as they are", skip=0, version=(1, 0), flags=0, **fields):
        self.array, self.versioned, self.version, self.flags, self.fields = array, versioned, version, flags, fields
        self.made = self.deleted = 0
        self.skip = skip  # elements that byte_offset stands for
        self.strides = [s // array.itemsize for s in array.strides] if isinstance(strides, str) else strides

    def capsule(self):
        managed = Versioned() if self.versioned else Plain()
        managed.deleter = ctypes.cast(delete, ctypes.c_void_p)
        if self.versioned:
            managed.major, managed.minor, managed.flags = *self.version, self.flags
        ndim = self.array.ndim
        tensor = managed.tensor
        tensor.data = (self.array.ctypes.data - self.skip * 4) or None
        tensor.byte_offset = self.skip * 4
        tensor.device_type, tensor.ndim = 1, ndim
        tensor.code, tensor.bits, tensor.lanes = 2, 32, 1
        tensor.shape = (ctypes.c_int64 * ndim)(*self.array.shape)
        if self.strides is not None:
            tensor.strides = (ctypes.c_int64 * ndim)(*self.strides)
        for name, value in self.fields.items():
            setattr(tensor, name, value)
        self.made += 1
        LIVE[ctypes.addressof(managed)] = managed, self
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return PYTHON.PyCapsule_New(ctypes.addressof(managed), name, ctypes.cast(destroy, ctypes.c_void_p))

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream is None
        self.max_version = max_version
        return self.capsule()


class OnlyStream(Producer):
    def __dlpack__(self, stream=None):
        return self.capsule()


class NoKeywords(Producer):
    def __dlpack__(self):
        return self.capsule()


class WhenAsked(Producer):
    """Read-only, which only a versioned capsule can say: there is no other one."""

    def __init__(self, array):
        super().__init__(array, flags=1)

    def __dlpack__(self, *, max_version=None):
        if max_version is None:
            raise BufferError("this array is read-only")
        return self.capsule()


@pytest.fixture
def ranks():
    with Ranks(2, ring_degree=2) as ranks:
        yield ranks


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_numpy(array):
    return array if isinstance(array, np.ndarray) else np.from_dlpack(array)


def same(ranks, array, **keywords):
    """Attention over two equal halves of `array`, which is q, k and v."""
    return ranks.attention([array] * 2, [array] * 2, [array] * 2, **keywords)[0]


def refused(ranks, array, error, *words):
    """Both ranks raise `error`; the array's deleters have run."""
    for caught in ranks.errors(lambda r: _C.attention(array, array, array, ranks.contexts[r])):
        assert type(caught) is error, caught
        assert all(word in str(caught) for word in words), str(caught)
    if isinstance(array, Producer):
        gc.collect()
        assert array.made == array.deleted


SHAPE = (2, 3, 2, 4)


def plain(array):
    return array if isinstance(array, np.ndarray) else array.detach().numpy()


def refused_anywhere(ranks, bad, error, *words, arguments=("q", "k", "v", "attn_mask", "x"), wrap=None, good=None):
    """Whichever argument is bad, on one rank or on all: every rank raises `error`, names it, and can go on.

    `wrap` calls a function of the bad array; `good` makes the arrays beside it.
    """
    wrap = wrap or (lambda function, array: function(array))
    for seed, (name, odd) in enumerate(itertools.product(arguments, ((0,), (1,), (0, 1)))):
        makers = [good if r in odd and good else numbers for r in range(2)]
        own = [[make(*SHAPE, seed=seed * 6 + r * 3 + i) for i in range(3)] for r, make in enumerate(makers)]

        def call(r, name=name, odd=odd, own=own):
            context = ranks.contexts[r]
            if name == "x":
                method = context.gather if r in odd and len(odd) == 2 else context.shard
                return wrap(lambda array: [method(array, 1)], bad) if r in odd else method(numbers(*SHAPE), 1)
            given = dict(zip("qkv", own[r], strict=True))
            if r not in odd:
                return _C.attention(**given, context_or_config=context)
            return wrap(lambda array: _C.attention(**given | {name: array}, context_or_config=context), bad)

        for r, caught in enumerate(ranks.errors(call)):
            text = str(caught)
            assert type(caught) is error, (name, odd, r, repr(caught))
            assert all(word in text for word in (name, *words)), text
            assert len(text) < 300 and "\n" not in text, text
            assert r in odd or f"rank {odd[0]}" in text, text
        own = [[plain(x) for x in three] for three in own]
        whole = oracle(*(np.concatenate(parts, 1) for parts in zip(*own, strict=True)))[0]
        for r, out in enumerate(ranks.attention(*zip(*own, strict=True))):
            np.testing.assert_allclose(out, whole[:, 3 * r : 3 * r + 3], atol=1e-5)


@pytest.mark.parametrize("make", [Producer, OnlyStream, NoKeywords])
@pytest.mark.parametrize("versioned", [True, False])
def test_signatures(ranks, make, versioned):
    x = numbers(*SHAPE)
    want = same(ranks, x)
    producer = make(x, versioned=versioned)
    out = same(ranks, producer)
    assert type(out) is _C.Buffer and out.shape == SHAPE and out.dtype == "float32"
    assert np.array_equal(np.from_dlpack(out), want)
    assert producer.made == producer.deleted == 6
    if make is Producer:
        assert producer.max_version[0] == 1


def test_no_strides_and_an_offset(ranks):
    x = numbers(*SHAPE)
    want = same(ranks, x)
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, strides=None))), want)
    whole = numbers(5, *SHAPE[1:])
    whole[3:] = x
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(whole[3:], skip=3 * 24))), want)


@pytest.mark.parametrize("stride", [0, 1, 2**62, -(2**62)])
def test_strides_of_single_elements_mean_nothing(ranks, stride):
    """On any axis, of any argument, and whoever exports it."""
    for axes in ((0, 1), (0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        x = numbers(*(1 if axis in axes else n for axis, n in enumerate(SHAPE)))
        strides = [stride if axis in axes else s // 4 for axis, s in enumerate(x.strides)]
        odd = np.lib.stride_tricks.as_strided(x, x.shape, [max(-(2**62), min(4 * s, 2**62)) for s in strides])
        want, wholes = same(ranks, x), [np.concatenate([x, x], axis) for axis in range(4)]
        for given in (Producer(x, strides=strides), Producer(x, versioned=False, strides=strides), odd):
            assert np.array_equal(as_numpy(same(ranks, given)), want)
            for axis, whole in enumerate(wholes):
                got = ranks.run(lambda r, given=given, axis=axis: ranks.contexts[r].gather(given, axis))
                assert np.array_equal(as_numpy(got[1]), whole)
    rows = numbers(1, 1, 1, 6)
    mask = Producer(rows, strides=[stride, stride, stride, 1])
    assert np.array_equal(same(ranks, numbers(*SHAPE), attn_mask=mask), same(ranks, numbers(*SHAPE), attn_mask=rows))


def test_empty(ranks):
    x = np.zeros((2, 0, 2, 4), np.float32)
    out = np.from_dlpack(same(ranks, Producer(x, data=None, strides=[2**62, 7, 2**61, 1])))
    assert out.shape == x.shape
    assert same(ranks, x).shape == x.shape


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_empty_on_some_ranks(kind):
    """Without memory, where lengths may differ; refused on all ranks where they may not."""
    q, k, v = (numbers(2, 5, 3, 4, seed=seed) for seed in range(3))
    want = oracle(q, k, v)[0]
    nothing = Producer(np.zeros((2, 0, 3, 4), np.float32), data=None, strides=[2**62, 7, 2**61, 1])
    for lengths in ([0, 2, 3], [5, 0, 0], [2, 0, 3]):
        parts = [[part if part.shape[1] else nothing for part in cut(x, lengths)] for x in (q, k, v)]
        with Ranks(3, **{f"{kind}_degree": 3, f"{kind}_anything": True}) as ranks:
            got = [as_numpy(out) for out in ranks.attention(*parts)]
            np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-5)
            for whole in ranks.run(lambda r, parts=parts: ranks.contexts[r].gather(parts[0][r], 1)):
                assert np.array_equal(as_numpy(whole), q)
        with Ranks(3, **{f"{kind}_degree": 3}) as ranks:
            for caught in ranks.errors(lambda r, parts=parts: _C.attention(*[parts[0][r]] * 3, ranks.contexts[r])):
                assert type(caught) is ValueError and f"{kind}_anything" in str(caught)


def test_read_only(ranks):
    x = numbers(*SHAPE)
    want = same(ranks, x)
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, flags=1))), want)
    x.flags.writeable = False
    out = same(ranks, x)
    assert np.array_equal(out, want) and out.flags.writeable and not np.shares_memory(out, x)


def test_memory_that_cannot_be_written(ranks, tmp_path):
    """Pages that would end the process if anybody wrote there, by every way and as every argument."""
    x, bits = numbers(*SHAPE), numbers(2, 2, 3, 6)
    for name, array in (("x", x), ("bits", bits)):
        array.tofile(tmp_path / name)
    x, bits = (np.memmap(tmp_path / n, np.float32, "r", shape=a.shape) for n, a in (("x", x), ("bits", bits)))
    want = same(ranks, np.array(x), attn_mask=np.array(bits))
    for way in (np.asarray, lambda array: array, lambda array: Producer(array, flags=1), WhenAsked):
        given, mask = way(x), way(bits)
        assert np.array_equal(as_numpy(same(ranks, given, attn_mask=mask)), want)
        whole = ranks.run(lambda r, given=given: ranks.contexts[r].gather(given, 1))[0]
        assert np.array_equal(as_numpy(whole), np.concatenate([x, x], 1))


@pytest.mark.parametrize("code,bits,lanes", [(2, 32, 2), (2, 8, 1), (10, 8, 1), (1, 16, 1), (3, 64, 1)])
def test_unknown_element_types(ranks, code, bits, lanes):
    producer = Producer(numbers(*SHAPE), code=code, bits=bits, lanes=lanes)
    refused(ranks, producer, TypeError, "q", f"code {code}, bits {bits}, lanes {lanes}")


@pytest.mark.parametrize("code,bits,name", [(0, 32, "int32"), (6, 8, "bool"), (5, 64, "complex64")])
def test_element_types_that_attention_has_not(ranks, code, bits, name):
    refused(ranks, Producer(numbers(*SHAPE), code=code, bits=bits), TypeError, name, "bfloat16")


def test_bfloat16_comes_back_as_such(ranks):
    x = np.zeros(SHAPE, np.uint16)  # 0.0 whatever the format
    out = same(ranks, Producer(x, code=4, bits=16, strides=None))
    assert (type(out), out.dtype, out.shape) == (_C.Buffer, "bfloat16", SHAPE)


@pytest.mark.parametrize("device", [(2, 1), (4, 0), (10, 3), (13, 0), (99, 7)])
def test_devices(ranks, device):
    """Memory that the host cannot read: one class of error, with the device, whichever argument it is."""
    name = {2: "cuda:1", 4: "opencl:0", 10: "rocm:3", 13: "cuda_managed:0", 99: "device type 99:7"}[device[0]]
    x = numbers(*SHAPE)
    far = Producer(x, device_type=device[0], device_id=device[1])
    # With cp_attn._cuda, it is the driver that says no.
    refused_anywhere(ranks, far, ValueError, name, *([] if device[0] == 2 else ["cpu"]))
    assert far.made == far.deleted
    for caught in ranks.errors(lambda r: _C.attention(x, far, x, ranks.contexts[r])):
        assert type(caught) is ValueError and f"q is on cpu and k on {name}" in str(caught)


@pytest.mark.parametrize("device", [3, 11])
def test_host_memory_of_a_device(ranks, device):
    x = numbers(*SHAPE)
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, device_type=device))), same(ranks, x))


def shaped(*shape):
    """Return an array of any shape that has no memory."""
    empty = np.zeros([0] * len(shape), np.float32)
    return Producer(empty, strides=None, data=None, shape=(ctypes.c_int64 * len(shape))(*shape))


def test_sizes_beyond_memory(ranks):
    refused(ranks, Producer(numbers(*SHAPE), strides=[2**61, 1, 1, 1]), ValueError, "q")
    refused(ranks, Producer(numbers(*SHAPE), data=None), BufferError, "no memory")
    refused(ranks, Producer(numbers(*SHAPE), ndim=9), ValueError, "9 dimensions")
    for shape in ((2**62, 0, 2, 4), (2, 0, 2**31, 2**31), (1, 2**63 - 1, 0, 1), (2, -1, 2, 4), (-(2**63), 0, 1, 1)):
        refused(ranks, shaped(*shape), ValueError, "q")
        for odd in ((0,), (1,), (0, 1)):
            call = lambda r, s=shape, o=odd: ranks.contexts[r].gather(shaped(*(s if r in o else (1, 0, 2, 4))), 1)  # noqa: E731
            assert all(type(caught) is ValueError for caught in ranks.errors(call))
    # Each rank's part can be addressed, the whole cannot.
    for caught in ranks.errors(lambda r: ranks.contexts[r].gather(shaped(2**60, 0), 0)):
        assert type(caught) is ValueError and "larger" in str(caught)
    for caught in ranks.errors(lambda r: _C.attention(*[shaped(0, 2**57, 2, 4)] * 3, ranks.contexts[r])):
        assert type(caught) is ValueError


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**32 + 3, 2**40, 2**59])
def test_more_rows_than_an_int_counts(ranks, rows):
    """Of no columns, so that no memory is needed: the lengths come back whole."""
    for dim, shape in ((0, (rows, 0)), (1, (0, rows, 3))):
        if math.prod(n for n in shape if n) * 8 >= 2**63:
            continue
        parts = ranks.run(lambda r, dim=dim, shape=shape: ranks.contexts[r].shard(shaped(*shape), dim).shape[dim])
        assert parts == [rows - rows // 2, rows // 2]
        whole = ranks.run(lambda r, dim=dim, shape=shape: ranks.contexts[r].gather(shaped(*shape), dim).shape[dim])
        assert whole == [2 * rows] * 2
    if rows < 2**50:
        assert same(ranks, shaped(rows, 0, 2, 4)).shape == (rows, 0, 2, 4)
        assert same(ranks, shaped(2, 0, rows, 4), return_lse=True)[1].shape == (2, 0, rows)


@pytest.mark.parametrize("apart", [2**31 - 64, 2**31 + 64, 2**32])
def test_rows_further_apart_than_an_int_counts(ranks, apart):
    """Bytes of the system's that nobody touches lie in between."""
    without_pages = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on
    memory = mmap.mmap(-1, 3 * apart, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | without_pages)
    x = numbers(1, 3, 2, 4)
    far = np.ndarray(x.shape, np.float32, memory, strides=(0, apart, 16, 4))
    far[:] = x
    for given, near in ((far, x), (far[:, ::-1], x[:, ::-1])):
        for export in (given, Producer(given), Producer(given, versioned=False)):
            assert np.array_equal(as_numpy(same(ranks, export)), same(ranks, near.copy()))
            got = ranks.run(lambda r, x=export: ranks.contexts[r].gather(x, 1))[0]
            assert np.array_equal(as_numpy(got), np.concatenate([near, near], 1))
    mask = np.ndarray((1, 1, 3, 6), np.float32, memory, strides=(0, 0, apart, 4))
    assert np.array_equal(same(ranks, x, attn_mask=mask), same(ranks, x, attn_mask=mask.copy()))


@pytest.mark.parametrize("off", [1, 2])
def test_unaligned(ranks, off):
    """A number that starts between two addresses of numbers."""
    x, raw = numbers(*SHAPE), np.zeros(4 * math.prod(SHAPE) + 4, np.uint8)
    raw[off : -4 + off] = x.view(np.uint8).reshape(-1)
    odd = raw[off : -4 + off].view(np.float32).reshape(SHAPE)
    for given in (odd, Producer(odd), Producer(x, byte_offset=off), Producer(x, versioned=False, byte_offset=off)):
        refused(ranks, given, BufferError, "q", "aligned")
    for caught in ranks.errors(lambda r: ranks.contexts[r].gather(odd, 1)):
        assert type(caught) is BufferError and "aligned" in str(caught)


def test_versions(ranks):
    x = numbers(*SHAPE)
    for version in ((2, 0), (0, 8)):
        refused(ranks, Producer(x, version=version), BufferError, f"{version[0]}.{version[1]}")
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, version=(1, 99)))), same(ranks, x))


def test_no_deleter(ranks, monkeypatch):
    """DLPack allows it: then nobody is told."""
    x = numbers(*SHAPE)
    monkeypatch.setattr(sys.modules[__name__], "delete", DELETER())
    producer = Producer(x)
    assert np.array_equal(np.from_dlpack(same(ranks, producer)), same(ranks, x))
    assert (producer.made, producer.deleted) == (6, 0)
    LIVE.clear()


def test_what_is_no_producer(ranks):
    class Odd:
        def __init__(self, answer):
            self.answer = answer

        def __dlpack__(self, **keywords):
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    refused(ranks, "q", TypeError, "q must be an array", "str")
    refused(ranks, None, TypeError, "NoneType")
    refused(ranks, Odd(3), BufferError, "int", "capsule")
    refused(ranks, Producer, TypeError, "type")


def test_a_capsule_is_used_once(ranks):
    x = numbers(*SHAPE)

    class Same:
        def __init__(self):
            self.kept = Producer(x).capsule()

        def __dlpack__(self, **keywords):
            return self.kept

    own = [Same(), Same()]
    for caught in ranks.errors(lambda r: _C.attention(own[r], own[r], x, ranks.contexts[r])):
        assert type(caught) is BufferError and "k" in str(caught) and "used_dltensor" in str(caught)


@pytest.mark.parametrize("error", [ValueError("v"), BufferError("b"), TypeError("t"), OSError("o"), KeyError("k")])
def test_a_producers_own_exception_passes(ranks, error):
    class Refuses:
        def __dlpack__(self, **keywords):
            raise error

    x = numbers(*SHAPE)
    own = ranks.errors(lambda r: _C.attention(x, Refuses() if r else x, x, ranks.contexts[r]))
    assert own[1] is error
    assert "rank 1" in str(own[0]) and str(error) in str(own[0])
    assert type(own[0]) is type(error)


def test_nothing_is_kept_when_a_later_array_is_bad(ranks):
    x = Producer(numbers(*SHAPE))
    live = _C._mem_stats()[0]
    for _ in range(50):
        for caught in ranks.errors(lambda r: _C.attention(x, x, 3, ranks.contexts[r])):
            assert type(caught) is TypeError
    assert x.made == x.deleted == 200
    assert not LIVE and _C._mem_stats()[0] == live


# --- NumPy ---


def views_of(x):
    """Return x (4 axes) in all kinds of order: backwards, in steps, axes exchanged, one for many, from the middle."""
    return [
        x[:, ::-1],
        x[:, ::2],
        x[..., ::-2],
        x[:, :, ::-1, 1::3],
        x.transpose(0, 2, 1, 3),
        np.broadcast_to(x[:, :1], x.shape),
        np.broadcast_to(x[:1, :1, :1, :1], x.shape),
        np.asfortranarray(x),
        x[::-1, 1:, 1:3, 5:6],
    ]


class Subclass(np.ndarray):
    """What NumPy itself exports."""


WAYS = {
    "numpy": lambda x: x,
    "subclass": lambda x: x.view(Subclass),
    "versioned": lambda x: Producer(x, **element_type(x)),
    "plain": lambda x: Producer(x, versioned=False, **element_type(x)),
    "offset": lambda x: Producer(x, skip=7, **element_type(x)),
}


def element_type(x):
    return dict(code=6, bits=8) if x.dtype == bool else {}


@pytest.mark.parametrize("way", WAYS)
def test_any_memory_by_any_way(ranks, way):
    """As each of the arguments alone, as all of them, as a mask, and as what is cut and gathered."""
    way = WAYS[way]
    for view in views_of(numbers(2, 6, 4, 8)):
        copies = [numbers(*view.shape, seed=seed) for seed in range(3)]
        for odd in ((0,), (1,), (2,), (0, 1, 2)):
            given, compact = (
                [[make(view) if i in odd else x] * 2 for i, x in enumerate(copies)] for make in (way, np.copy)
            )
            assert np.array_equal(as_numpy(ranks.attention(*given)[0]), ranks.attention(*compact)[0])
        for dim in range(4):
            halves = np.array_split(view, 2, dim)
            for r, half in enumerate(ranks.run(lambda r, x=view, d=dim: ranks.contexts[r].shard(way(x), d))):
                assert np.array_equal(as_numpy(half), halves[r])
            for whole in ranks.run(lambda r, x=view, d=dim: ranks.contexts[r].gather(way(x), d)):
                assert np.array_equal(as_numpy(whole), np.concatenate([view, view], dim))
    x, wide = numbers(2, 6, 4, 8), numbers(2, 4, 6, 24)
    masks = [wide[..., ::2], wide[..., 12:][..., ::-1], wide[:, ::-1, ::-1, 1:13], np.asfortranarray(wide[..., :12])]
    masks += [np.broadcast_to(wide[:1, :1, :1, :12], (2, 4, 6, 12)), np.broadcast_to(wide[..., :1], (2, 4, 6, 12))]
    for mask in masks + [mask > 0 for mask in masks]:
        assert np.array_equal(same(ranks, x, attn_mask=way(mask)), same(ranks, x, attn_mask=mask.copy()))


def test_numpy_dtypes(ranks):
    x = numbers(*SHAPE)
    for dtype in (np.float16, np.float32, np.float64):
        out, lse = same(ranks, x.astype(dtype), return_lse=True)
        assert type(out) is np.ndarray and out.dtype == dtype
        assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32) and lse.shape == SHAPE[:3]
    refused(ranks, x.astype(">f4"), TypeError, ">f4")
    refused(ranks, x.astype(object), TypeError, "object")
    refused(ranks, x.astype(np.longdouble), TypeError, "longdouble" if np.longdouble(1).nbytes == 8 else "float128")
    raw = np.zeros(x.nbytes + 1, np.uint8)
    refused(ranks, raw[1:].view(np.float32).reshape(SHAPE), BufferError, "aligned")


def test_numpy_subclass_goes_through_dlpack(ranks):
    class Mine(np.ndarray):
        pass

    x = numbers(*SHAPE)
    out = same(ranks, x.view(Mine))
    assert type(out) is np.ndarray and np.array_equal(out, same(ranks, x))


def test_masked_arrays(ranks):
    x = numbers(*SHAPE)
    for mask in (x > 0, False, np.ma.nomask):
        array = np.ma.masked_array(x, mask)
        refused_anywhere(ranks, array, TypeError, "masked array", ".filled(", "attn_mask")
    refused_anywhere(ranks, np.ma.masked_array(np.ones(6, bool)), TypeError, "masked", arguments=["attn_mask"])

    class Mine(np.ma.MaskedArray):
        pass

    refused_anywhere(ranks, x.view(Mine), TypeError, "masked array", arguments=["k"])


def test_jax_arrays():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    script = Path(__file__).with_name("jax_arrays.py")
    done = subprocess.run([sys.executable, script], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- torch ---

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_torch_dtypes(ranks, dtype):
    x = torch.randn(SHAPE, dtype=torch.float64).to(getattr(torch, dtype))
    out, lse = same(ranks, x, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == x.dtype and out.shape == x.shape
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32) and lse.shape == x.shape[:3]
    view = x.transpose(1, 2)[:, :, :, ::2]
    assert torch.equal(same(ranks, view), same(ranks, view.contiguous()))


def test_torch_lazy_bits(ranks):
    z = torch.randn(SHAPE, dtype=torch.complex64)
    negative = z.conj().imag
    assert negative.is_neg()
    assert torch.equal(same(ranks, negative), same(ranks, negative.resolve_neg().clone()))
    whole = ranks.run(lambda r: ranks.contexts[r].gather(z.conj(), 1))[1]
    assert torch.equal(whole, torch.cat([z, z], 1).conj().resolve_conj())


def test_torch_types(ranks):
    class Mine(torch.Tensor):
        pass

    x = torch.randn(SHAPE)
    want = same(ranks, x)
    assert torch.equal(same(ranks, x.as_subclass(Mine)), want)
    with torch.no_grad():
        out = ranks.run(lambda r: torch.no_grad()(_C.attention)(*[torch.nn.Parameter(x)] * 3, ranks.contexts[r]))[0]
    assert torch.equal(out, want) and not out.requires_grad
    assert torch.equal(same(ranks, torch.empty(2, 0, 2, 4)), torch.empty(2, 0, 2, 4))


def test_torch_without_values(ranks):
    from torch._subclasses import FakeTensorMode

    refused(ranks, torch.empty(SHAPE, device="meta"), TypeError, "meta")
    with FakeTensorMode():
        fake = torch.empty(SHAPE)
    refused(ranks, fake, TypeError, "FakeTensor")


def torch_numbers(*shape, seed=0):
    return torch.from_numpy(numbers(*shape, seed=seed))


def without_memory():
    """Return {what: (tensor, words)}: what torch has no memory for that holds the values."""
    x = torch_numbers(*SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": (x.to_sparse(), ["sparse_coo", ".to_dense()"]),
            "sparse mask": (x.bool().to_sparse(), ["sparse_coo", ".to_dense()"]),
            "csr": (torch.eye(3).to_sparse_csr(), ["sparse_csr", ".to_dense()"]),
            "csc": (torch.eye(3).to_sparse_csc(), ["sparse_csc", ".to_dense()"]),
            "bsr": (torch.eye(4).to_sparse_bsr((2, 2)), ["sparse_bsr", ".to_dense()"]),
            "mkldnn": (x.to_mkldnn(), ["mkldnn", ".to_dense()"]),
            "nested": (torch.nested.nested_tensor([x[0], x[1, :2]]), ["nested", "to_padded_tensor"]),
            "jagged": (torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged), ["Nested"]),
            "quantized": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), ["quantized", ".dequantize()"]),
            "meta": (x.to("meta"), ["meta"]),
            "meta with grad": (x.to("meta").requires_grad_(), ["meta"]),
            "float8": (x.to(torch.float8_e4m3fn), ["torch.float8_e4m3fn"]),
            "bits": (torch.zeros(SHAPE, dtype=torch.uint16), ["torch.uint16"]),
            "lazy": (torch.nn.UninitializedParameter(requires_grad=False), ["UninitializedParameter"]),
            "lazy with grad": (torch.nn.UninitializedParameter(), ["UninitializedParameter"]),
        }


@pytest.mark.parametrize("what", without_memory())
def test_torch_without_memory(ranks, what):
    tensor, words = without_memory()[what]
    arguments = ["q", "k", "v", "x"] if what.endswith("grad") else ["q", "k", "v", "attn_mask", "x"]
    refused_anywhere(ranks, tensor, TypeError, *words, good=torch_numbers, arguments=arguments)


# Inside of what torch.func makes of a function, a tensor stands for other ones.
TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x)[0].sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x)[0].sum()))(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func(ranks, transform):
    wrap, x = TRANSFORMS[transform], torch_numbers(*SHAPE)
    # A mask that asks for a gradient is refused for that.
    arguments = ["q", "k", "v", "x"] + ["attn_mask"] * (transform in ("vmap", "functionalize"))
    for records in (False, True):

        def good(*shape, seed=0, records=records):
            return torch_numbers(*shape, seed=seed).requires_grad_(records)

        refused_anywhere(ranks, x, TypeError, "torch.func", wrap=wrap, good=good, arguments=arguments)


def test_torch_outputs_without_memory(ranks):
    """The inputs are in memory, but where the call is, torch makes no tensor that is."""
    from torch._subclasses import FakeTensorMode

    x = torch_numbers(*SHAPE)

    def in_fake_mode(call):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return call()

    for mode, error in (
        (in_fake_mode, BufferError),
        (lambda call: torch.func.grad(lambda z: (call(), z.sum())[1])(x), MemoryError),
        (lambda call: torch.func.functionalize(lambda z: (call(), z)[1])(x), BufferError),
    ):
        for odd in ((0,), (1,), (0, 1)):
            for run in (
                lambda c: _C.attention(x, x, x, c),
                lambda c: _C.attention(x, x, x, c, return_lse=True),
                lambda c: c.shard(x, 1),
                lambda c: c.gather(x, 1),
            ):

                def call(r, mode=mode, odd=odd, run=run):
                    return mode(lambda: run(ranks.contexts[r])) if r in odd else run(ranks.contexts[r])

                for caught in ranks.errors(call):
                    assert type(caught) is error and "output" in str(caught), repr(caught)
                    assert len(str(caught)) < 300 and "\n" not in str(caught)
                whole = torch.cat([x, x], 1)
                assert all(torch.equal(whole, got) for got in ranks.run(lambda r: ranks.contexts[r].gather(x, 1)))
    assert torch.equal(same(ranks, x), torch.from_numpy(same(ranks, x.numpy())))


# The first use of forward mode compiles with what torch itself calls deprecated.
of_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@of_torch
def test_torch_func_jvp():
    """Forward mode has one level for the whole process, so one rank alone is inside."""
    from torch.func import jvp

    with Ranks(2, ring_degree=2) as ranks:
        for seed, name in enumerate(("q", "k", "v")):
            given = dict(zip("qkv", (torch_numbers(*SHAPE, seed=3 * seed + i) for i in range(3)), strict=True))

            def call(r, name=name, given=given):
                run = lambda x: _C.attention(**given | {name: x}, context_or_config=ranks.contexts[r])  # noqa: E731
                return jvp(run, (given[name],), (given[name],)) if r else run(given[name])

            for caught in ranks.errors(call):
                assert isinstance(caught, (TypeError, NotImplementedError)) and name in str(caught), repr(caught)
                assert len(str(caught)) < 300
        same(ranks, numbers(*SHAPE))


@of_torch
@pytest.mark.parametrize("records", [False, True])
def test_forward_mode(records):
    from torch.autograd import forward_ad

    def good(*shape, seed=0):
        return torch_numbers(*shape, seed=seed).requires_grad_(records)

    with Ranks(2, ring_degree=2) as ranks, forward_ad.dual_level():
        for requires_grad in (False, True):
            x = torch_numbers(*SHAPE).requires_grad_(requires_grad)
            dual = forward_ad.make_dual(x, torch_numbers(*SHAPE, seed=1))
            words = "forward-mode", "unpack_dual", ".primal"
            refused_anywhere(ranks, dual, _C.NotSupported, *words, good=good, arguments=["q", "k", "v", "x"])
        mask = forward_ad.make_dual(torch.zeros(6), torch.ones(6))
        refused_anywhere(ranks, mask, _C.NotSupported, *words, good=good, arguments=["attn_mask"])
        assert torch.equal(same(ranks, forward_ad.unpack_dual(dual).primal.detach()), same(ranks, x.detach()))


def test_a_gradient_needs_torch_tensors(ranks):
    """Whatever is saved for the backward is torch's; the mask, which has no gradient, may be anybody's."""
    rng = np.random.default_rng(3)
    for asks in ("q", "k", "v"):
        others = [name for name in "qkv" if name != asks]
        for bad in others:
            for kind, word in ((lambda x: x, "numpy.ndarray"), (Producer, "Producer"), (lambda x: None, "NoneType")):
                for odd in ((0,), (1,), (0, 1)):
                    given = {name: numbers(*SHAPE, seed=int(rng.integers(99))) for name in "qkv"}

                    def call(r, asks=asks, bad=bad, kind=kind, odd=odd, given=given):
                        own = {name: torch.from_numpy(x) for name, x in given.items()}
                        own[asks] = own[asks].requires_grad_()
                        if r in odd:
                            own[bad] = kind(given[bad])
                        return _C.attention(**own, context_or_config=ranks.contexts[r])

                    for r, caught in enumerate(ranks.errors(call)):
                        assert type(caught) is TypeError, caught
                        assert all(w in str(caught) for w in (bad, word, "torch.Tensor", "requires")), caught
                        assert r in odd or f"rank {odd[0]}" in str(caught)
    x = numbers(*SHAPE)
    mask = rng.random((1, 6)) > 0.3

    def grad(r, mask):
        q = torch.tensor(x, requires_grad=True)
        _C.attention(q, torch.tensor(x), torch.tensor(x), ranks.contexts[r], attn_mask=mask).square().sum().backward()
        return q.grad

    ours, theirs, foreign = (ranks.run(lambda r, m=m: grad(r, m)) for m in (torch.tensor(mask), mask, NumpyMask(mask)))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, theirs, foreign, strict=True))


class NumpyMask:
    """A mask of a library that nobody knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)


def test_inference_tensors(ranks):
    """They are read like any other, but autograd cannot save them."""
    with torch.inference_mode():
        x = torch_numbers(*SHAPE)
        parameter = torch.nn.Parameter(torch_numbers(*SHAPE))
        mask = torch.ones(6, dtype=torch.bool)
    assert torch.equal(same(ranks, x), same(ranks, x.clone()))
    assert torch.equal(same(ranks, x, attn_mask=mask), same(ranks, x.clone()))

    def good(*shape, seed=0):
        return torch_numbers(*shape, seed=seed).requires_grad_()

    words = "inference", ".clone()"
    refused_anywhere(ranks, x, ValueError, *words, good=good, arguments=["q", "k", "v"])
    refused_anywhere(ranks, mask, ValueError, *words, good=good, arguments=["attn_mask"])
    refused_anywhere(ranks, parameter, ValueError, *words, good=torch_numbers, arguments=["q", "k", "v"])
    with torch.inference_mode():
        run = torch.inference_mode()(lambda r: _C.attention(good(*SHAPE), x, x, ranks.contexts[r], attn_mask=mask))
        assert all(not out.requires_grad for out in ranks.run(run))


def test_what_fails_before_the_gate_is_told_there(ranks, monkeypatch):
    """Autograd's way to it is Python, where anything may be raised."""
    from cp_attn import _torch

    x, odd = torch_numbers(*SHAPE), []
    for name in ("attention", "shard", "gather"):
        original = getattr(_torch, name)

        def fails(*args, original=original, **keywords):
            if threading.get_ident() in odd:
                raise LookupError("lost on the way")
            return original(*args, **keywords)

        monkeypatch.setattr(_torch, name, fails)
    for chosen in ((0,), (1,), (0, 1)):
        for run in (lambda x, c: _C.attention(x, x, x, c), lambda x, c: c.shard(x, 1), lambda x, c: c.gather(x, 1)):

            def call(r, chosen=chosen, run=run):
                if r in chosen:
                    odd.append(threading.get_ident())
                return run(x.clone().requires_grad_(), ranks.contexts[r])

            for r, caught in enumerate(ranks.errors(call)):
                assert type(caught) is LookupError and "lost on the way" in str(caught), repr(caught)
                assert r in chosen or f"rank {chosen[0]}" in str(caught)
            odd.clear()
            assert all(out.requires_grad for out in ranks.run(functools.partial(call, chosen=())))
    # What ends a process does not wait for the others.
    monkeypatch.setattr(_torch, "shard", lambda *args: sys.exit(3))
    with pytest.raises(SystemExit):
        ranks.contexts[0].shard(x.clone().requires_grad_(), 1)
    ranks.contexts[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks.contexts[0].gather(x.clone().requires_grad_(), 1)


def test_kinds_may_be_mixed(ranks):
    x = numbers(*SHAPE)
    mixed = ranks.attention([torch.from_numpy(x)] * 2, [x] * 2, [Producer(x)] * 2)[0]
    assert torch.equal(mixed, torch.from_numpy(same(ranks, x)))


# --- what calls keep ---


def held():
    """Return what a leak would add to: Python's blocks, the library's, and kilobytes of the process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return sys.getallocatedblocks(), _C._mem_stats()[0], pages * os.sysconf("SC_PAGESIZE") >> 10


def to_torch(x, requires_grad=False):
    return torch.from_numpy(x).requires_grad_(requires_grad and x.ndim == 4)


@pytest.mark.parametrize("way", [*WAYS, "torch", "torch with grad"])
def test_many_calls_keep_nothing(ranks, way):
    """Right ones and wrong ones: capsules that are consumed, and those that never are."""
    makers = WAYS | {"torch": to_torch, "torch with grad": lambda x: to_torch(x, True)}
    make, x, mask = makers[way], numbers(*SHAPE), numbers(2, 6)

    def calls(r):
        context = ranks.contexts[r]
        for n in range(250):
            _C.attention(make(x), make(x), make(x), context, attn_mask=make(mask), return_lse=bool(n % 2))
            context.gather(make(x), 1)
            context.shard(make(x), 1)
            for wrong in ((make(x), make(x), 3), (make(x), make(x[:1]), make(x))):
                with pytest.raises((TypeError, ValueError)):
                    _C.attention(*wrong, context)

    ranks.run(calls)
    before = held()
    ranks.run(calls)
    grown = [b - a for a, b in zip(before, held(), strict=True)]
    # One block for each round would be 500, on two ranks.
    assert grown[0] < 250 and grown[1] == 0 and grown[2] < 1024 and not LIVE, grown


# --- our own exports ---


def test_buffer_exports(ranks):
    buffer = same(ranks, Producer(numbers(*SHAPE)))
    want = np.from_dlpack(buffer).copy()
    assert buffer.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(buffer.__dlpack__(max_version=(1, 0)))
    assert 'dltensor"' in repr(buffer.__dlpack__())
    with pytest.raises(BufferError, match="dl_device"):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="copy"):
        buffer.__dlpack__(copy=True)
    taken = torch.from_dlpack(buffer)
    del buffer
    gc.collect()
    assert np.array_equal(taken.numpy(), want)
    assert repr(same(ranks, Producer(numbers(*SHAPE)))) == "<cp_attn.Buffer (2, 3, 2, 4) float32>"
    with pytest.raises(TypeError):
        _C.Buffer()


def test_buffers_are_freed(ranks):
    same(ranks, Producer(numbers(*SHAPE)))
    live = _C._mem_stats()[0]
    for _ in range(20):
        buffer = same(ranks, Producer(numbers(*SHAPE)))
        buffer.__dlpack__()
        np.from_dlpack(buffer)
        del buffer
    gc.collect()
    assert _C._mem_stats()[0] == live


def test_namespace_of_the_caller(ranks):
    """A library with from_dlpack gets its own type back."""

    class Space:
        from_dlpack = staticmethod(lambda buffer: ("mine", np.from_dlpack(buffer)))

    class Array(Producer):
        def __array_namespace__(self):
            return Space

    x = numbers(*SHAPE)
    kind, out = same(ranks, Array(x))
    assert kind == "mine" and np.array_equal(out, same(ranks, x))


def test_import_loads_no_array_library():
    code = "import sys, cp_attn; sys.exit(sum(m in sys.modules for m in ('numpy', 'torch', 'diffusers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
