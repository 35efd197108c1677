"""Arrays on simulated GPUs (tests/simgpu/): what CUDA tensors are to cp_attn, where there is no GPU.

Importing this puts the simulated `cp_attn._cuda` in the place of the built one, for the whole process.
"""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from dlpack_structs import PYTHON, Tensor, Versioned

import cp_attn

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "simgpu" / "plain" / "module"
CUDA = 2  # DLPack's number
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


def build():
    """Build the simulated module where it is not there or not new."""
    command = [
        "make",
        "--no-print-directory",
        "-C",
        ROOT / "tests" / "simgpu",
        "module",
        f"VENV_PYTHON={sys.executable}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def load():
    """Return (the simulated CUDA runtime and NCCL, `cp_attn._cuda` upon it)."""
    spec = importlib.util.spec_from_file_location("cp_attn._cuda", FOLDER / "_cuda.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["cp_attn._cuda"] = cp_attn._cuda = module
    return ctypes.CDLL(FOLDER / "libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW), module


build()
LIB, MODULE = load()


class Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "launches copies copied_bytes memsets set_bytes records awaits host_waits allocations frees groups sends "
            "receives sent_bytes"
        ).split()
    ]


class Live(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("blocks", "streams", "events", "comms", "mappings", "graphs")]


LIB.simgpu_stats.restype = Stats
LIB.simgpu_live.restype = Live
LIB.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIB.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
LIB.simgpu_set_peer_access.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_bool]
LIB.simgpu_fail_call.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
LIB.simnccl_fail_after.argtypes = [ctypes.c_int64]
for name in ("cudaFree", "cudaStreamSynchronize", "cudaStreamDestroy", "cudaGraphDestroy", "cudaGraphExecDestroy"):
    getattr(LIB, name).argtypes = [ctypes.c_void_p]
LIB.cudaStreamBeginCapture.argtypes = [ctypes.c_void_p, ctypes.c_int]
LIB.cudaStreamEndCapture.argtypes = LIB.cudaGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
LIB.cudaGraphInstantiate.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong]


def check(error):
    assert error == 0, f"CUDA error {error}"


class Stream:
    """A stream of a device, that no other stream waits for."""

    def __init__(self, device):
        self.handle = ctypes.c_void_p()
        check(LIB.cudaSetDevice(device))
        check(LIB.cudaStreamCreateWithFlags(ctypes.byref(self.handle), 1))

    def wait(self):
        check(LIB.cudaStreamSynchronize(self.handle))

    def close(self):
        check(LIB.cudaStreamDestroy(self.handle))


@contextlib.contextmanager
def unbound_by_captures():
    """Let the thread do what captures forbid: as torch's allocator, it knows what it does."""
    mode = ctypes.c_int(2)
    check(LIB.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    yield
    check(LIB.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)))


class Memory:
    """A block of a device; while a graph is captured there it is the graph's, and given back with it, as torch's is."""

    def __init__(self, device, bytes):
        self.device, self.bytes = device, bytes
        self.address = ctypes.c_void_p()
        self.graph = Graph.under_way.get(device)
        check(LIB.cudaSetDevice(device))
        with unbound_by_captures():
            check(LIB.cudaMalloc(ctypes.byref(self.address), max(bytes, 1)))
        if self.graph is not None:
            self.graph.pool.append(self.address)

    def __del__(self):
        if self.graph is None:
            with unbound_by_captures():
                check(LIB.cudaFree(self.address))


class Graph:
    """What the current stream of a device is given within a `with` block, to be launched; as torch.cuda.graph."""

    under_way = {}

    def __init__(self, device):
        self.device, self.pool, self.exec = device, [], ctypes.c_void_p()

    def __enter__(self):
        check(LIB.cudaSetDevice(self.device))
        check(LIB.cudaStreamBeginCapture(Fast.streams[self.device].handle, 0))
        self.under_way[self.device] = self
        return self

    def __exit__(self, *exception):
        del self.under_way[self.device]
        graph = ctypes.c_void_p()
        check(LIB.cudaStreamEndCapture(Fast.streams[self.device].handle, ctypes.byref(graph)))
        check(LIB.cudaGraphInstantiate(ctypes.byref(self.exec), graph, 0))
        check(LIB.cudaGraphDestroy(graph))

    def launch(self):
        check(LIB.cudaSetDevice(self.device))
        check(LIB.cudaGraphLaunch(self.exec, Fast.streams[self.device].handle))

    def close(self):
        check(LIB.cudaSetDevice(self.device))
        check(LIB.cudaDeviceSynchronize())
        check(LIB.cudaGraphExecDestroy(self.exec))
        for address in self.pool:
            check(LIB.cudaFree(address))


class Array:
    """An array on a GPU whose library hands out capsules, for work on the default stream."""

    stream = None

    def __init__(self, values, device):
        # As it lies: axes with any strides, as long as they cover one block.
        base = values
        while isinstance(base.base, np.ndarray):
            base = base.base
        self.memory = Memory(device, base.nbytes)
        self.exports = []
        self.shape, self.dtype = values.shape, values.dtype
        self.strides = [s // values.itemsize for s in values.strides]
        self.offset = values.ctypes.data - base.ctypes.data
        stream = self.stream.handle if self.stream else None
        check(LIB.cudaMemcpyAsync(self.memory.address, base.ctypes.data, base.nbytes, 1, stream))
        self.source = base  # the copy may not have happened

    def write(self, values):
        """Copy other values of the same layout into it."""
        check(LIB.cudaSetDevice(self.memory.device))
        stream = self.stream.handle if self.stream else None
        check(LIB.cudaMemcpyAsync(self.memory.address, values.ctypes.data, values.nbytes, 1, stream))
        self.source = values

    def fill(self, tensor):
        """Write what DLPack says of this array."""
        self.c_shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        self.c_strides = (ctypes.c_int64 * len(self.shape))(*self.strides)
        tensor.data, tensor.byte_offset = self.memory.address.value, self.offset
        tensor.device_type, tensor.device_id = CUDA, self.memory.device
        tensor.ndim = len(self.shape)
        tensor.code, tensor.bits, tensor.lanes = CODES[self.dtype.kind], self.dtype.itemsize * 8, 1
        tensor.shape, tensor.strides = self.c_shape, self.c_strides

    def __dlpack_device__(self):
        return CUDA, self.memory.device

    def __dlpack__(self, *, stream=None, max_version=None):
        managed = Versioned()
        self.exports.append(managed)  # kept with the array, which the caller keeps for the call
        managed.major, managed.minor = 1, 0
        managed.context = managed.deleter = None
        self.fill(managed.tensor)
        return PYTHON.PyCapsule_New(ctypes.addressof(managed), b"dltensor_versioned", None)


# --- a library with an exchange table ---

REFUSE = None  # one-dimensional arrays of this many bytes or more are refused; None: nothing is
OWNED = {}  # managed tensors by address, with what they own


ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address):
    OWNED.pop(address)


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_void_p
)
def _allocate(prototype, out, context, set_error):
    wanted = prototype.contents
    assert wanted.device_type == CUDA
    shape = [wanted.shape[axis] for axis in range(wanted.ndim)]
    if REFUSE is not None and len(shape) == 1 and shape[0] >= REFUSE:
        ERROR(set_error)(context, b"MemoryError", b"this GPU is full up\nby a long way")
        return -1
    kind = {code: kind for kind, code in CODES.items()}[wanted.code]
    made = Fast.empty(shape, np.dtype(f"{kind}{wanted.bits // 8}"), wanted.device_id)
    managed = Versioned()
    managed.major = 1
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    made.fill(managed.tensor)
    OWNED[ctypes.addressof(managed)] = managed, made
    out[0] = ctypes.addressof(managed)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def _to_object(address, out):
    _, made = OWNED.pop(address)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    out[0] = id(made)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
def _describe(array, out):
    array.fill(out.contents)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _current_stream(device_type, device, out):
    out[0] = Fast.streams[device].handle.value
    return 0


class Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


_FUNCTIONS = [ctypes.cast(f, ctypes.c_void_p) for f in (_allocate, _to_object, _describe, _current_stream)]
_NAME = b"dlpack_exchange_api"  # a capsule borrows its name
_TABLE = Exchange(1, 3, None, _FUNCTIONS[0], None, *_FUNCTIONS[1:])


class Fast(Array):
    """An array whose library has DLPack's exchange table and a current stream on each device, as torch has."""

    streams = {}
    __dlpack_c_exchange_api__ = PYTHON.PyCapsule_New(ctypes.addressof(_TABLE), _NAME, None)

    def __init__(self, values, device):
        self.stream = self.streams[device]
        super().__init__(values, device)

    @classmethod
    def empty(cls, shape, dtype, device):
        made = cls.__new__(cls)
        made.exports = []
        made.memory = Memory(device, int(np.prod(shape)) * dtype.itemsize)
        made.shape, made.dtype, made.offset = tuple(shape), dtype, 0
        made.strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        return made


def to_numpy(array):
    """Return the values of a GPU array or of a `cp_attn.Buffer`, once all work of its device has been done."""
    if isinstance(array, Array):
        tensor = Tensor()
        array.fill(tensor)
        device = array.memory.device
    else:
        device = array.__dlpack_device__()[1]
        capsule = array.__dlpack__(max_version=(1, 0))
        address = PYTHON.PyCapsule_GetPointer(id(capsule), b"dltensor_versioned")
        tensor = Versioned.from_address(address).tensor
    check(LIB.cudaSetDevice(device))
    check(LIB.cudaDeviceSynchronize())
    kind = {code: kind for kind, code in CODES.items()}[tensor.code]
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    flat = np.empty(shape, np.dtype(f"{kind}{tensor.bits // 8}"))
    ctypes.memmove(flat.ctypes.data, tensor.data, flat.nbytes)
    return flat
