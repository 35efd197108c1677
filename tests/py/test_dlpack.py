"""Arrays in and out: producers made by hand, NumPy, torch. Two thread ranks take part in every call."""

import ctypes
import gc
import subprocess
import sys
import warnings

import numpy as np
import pytest
from thread_ranks import Ranks

from cp_attn import _C

# --- a producer of DLPack capsules whose every field can be set ---

PYTHON = ctypes.pythonapi
PYTHON.PyCapsule_New.restype = ctypes.py_object
PYTHON.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
PYTHON.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p
PYTHON.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Plain(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


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

    def __init__(self, array, versioned=True, strides="as they are", skip=0, major=1, flags=0, **fields):
        self.array, self.versioned, self.major, self.flags, self.fields = array, versioned, major, flags, fields
        self.made = self.deleted = 0
        self.skip = skip  # elements that byte_offset stands for
        self.strides = [s // array.itemsize for s in array.strides] if isinstance(strides, str) else strides

    def capsule(self):
        managed = Versioned() if self.versioned else Plain()
        managed.deleter = ctypes.cast(delete, ctypes.c_void_p)
        if self.versioned:
            managed.major, managed.minor, managed.flags = self.major, 0, self.flags
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


@pytest.fixture
def ranks():
    with Ranks(2, ring_degree=2) as ranks:
        yield ranks


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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
    x = numbers(1, 1, 2, 4)
    strides = [stride, stride, 4, 1]
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, strides=strides))), same(ranks, x))


def test_empty(ranks):
    x = np.zeros((2, 0, 2, 4), np.float32)
    out = np.from_dlpack(same(ranks, Producer(x, data=None, strides=[2**62, 7, 2**61, 1])))
    assert out.shape == x.shape
    assert same(ranks, x).shape == x.shape


def test_read_only(ranks):
    x = numbers(*SHAPE)
    want = same(ranks, x)
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, flags=1))), want)
    x.flags.writeable = False
    out = same(ranks, x)
    assert np.array_equal(out, want) and out.flags.writeable and not np.shares_memory(out, x)


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


def test_devices(ranks):
    x = numbers(*SHAPE)
    far = Producer(x, device_type=2, device_id=1)
    refused(ranks, far, ValueError, "cuda:1", "cpu")
    for caught in ranks.errors(lambda r: _C.attention(x, far, x, ranks.contexts[r])):
        assert type(caught) is ValueError and "q is on cpu and k on cuda:1" in str(caught)
    assert np.array_equal(np.from_dlpack(same(ranks, Producer(x, device_type=3))), same(ranks, x))


def test_sizes_beyond_memory(ranks):
    refused(ranks, Producer(numbers(*SHAPE), strides=[2**61, 1, 1, 1]), ValueError, "q")
    refused(ranks, Producer(numbers(*SHAPE), data=None), BufferError, "no memory")
    refused(ranks, Producer(numbers(*SHAPE), ndim=9), ValueError, "9 dimensions")


def test_versions(ranks):
    refused(ranks, Producer(numbers(*SHAPE), major=2), BufferError, "2.0")


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


@pytest.mark.parametrize("error", [ValueError("v"), BufferError("b"), TypeError("t"), OSError("o")])
def test_a_producers_own_exception_passes(ranks, error):
    class Refuses:
        def __dlpack__(self, **keywords):
            raise error

    x = numbers(*SHAPE)
    own = ranks.errors(lambda r: _C.attention(x, Refuses() if r else x, x, ranks.contexts[r]))
    assert own[1] is error
    assert "rank 1" in str(own[0]) and str(error) in str(own[0])
    assert type(own[0]) is (RuntimeError if isinstance(error, OSError) else type(error))


def test_nothing_is_kept_when_a_later_array_is_bad(ranks):
    x = Producer(numbers(*SHAPE))
    live = _C._mem_stats()[0]
    for _ in range(50):
        for caught in ranks.errors(lambda r: _C.attention(x, x, 3, ranks.contexts[r])):
            assert type(caught) is TypeError
    assert x.made == x.deleted == 200
    assert not LIVE and _C._mem_stats()[0] == live


# --- NumPy ---


def test_numpy_strides(ranks):
    x = numbers(2, 6, 4, 8)
    views = [
        x[:, ::-1],
        x[:, ::2],
        x[..., ::-2],
        x[:, :, ::-1, 1::3],
        x.transpose(0, 2, 1, 3),
        np.broadcast_to(x[:, :1], x.shape),
        np.asfortranarray(x),
        x[::-1, 1:, 1:3, 5:6],
    ]
    for view in views:
        assert np.array_equal(same(ranks, view), same(ranks, view.copy()))


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(ranks, torch.eye(3).to_sparse(), RuntimeError)


def test_kinds_may_be_mixed(ranks):
    x = numbers(*SHAPE)
    mixed = ranks.attention([torch.from_numpy(x)] * 2, [x] * 2, [Producer(x)] * 2)[0]
    assert torch.equal(mixed, torch.from_numpy(same(ranks, x)))


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
