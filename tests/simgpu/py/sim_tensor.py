"""Tensors of torch that are on simulated GPUs, as far as cp_attn can tell, and on the CPU for torch itself.

Torch computes at once what a GPU would compute later: a tensor that cp_attn lends is handed over when all work of the
current stream has been done, and memory that torch would take back in the order of that stream is taken back so.
"""

import bisect
import ctypes

import sim_gpu as sim
import torch
from dlpack_structs import PYTHON, Tensor, Versioned
from sim_gpu import CUDA, LIB, Memory, check

for name, types in {
    "cudaMallocAsync": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p],
    "cudaFreeAsync": [ctypes.c_void_p, ctypes.c_void_p],
    "cudaGetDevice": [ctypes.c_void_p],
}.items():
    getattr(LIB, name).argtypes = types

CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int32: (0, 32)}
CODES |= {torch.float64: (2, 64), torch.uint8: (1, 8), torch.bool: (6, 8)}
DTYPES = {code: dtype for dtype, code in CODES.items()}
OWNED = {}  # managed tensors by address, with what they own


class Blocks:
    """Which device the live blocks are on, by address."""

    def __init__(self):
        self.starts, self.rows = [], {}

    def add(self, address, bytes, device):
        bisect.insort(self.starts, address)
        self.rows[address] = address + max(bytes, 1), device

    def remove(self, address):
        self.starts.remove(address)
        del self.rows[address]

    def device_of(self, address):
        """Return the device, or that of the thread for memory of torch's own."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at >= 0 and address < self.rows[self.starts[at]][0]:
            return self.rows[self.starts[at]][1]
        return current_device()


BLOCKS = Blocks()


def current_device():
    found = ctypes.c_int()
    check(LIB.cudaGetDevice(ctypes.byref(found)))
    return found.value


def synchronize(device):
    check(LIB.cudaStreamSynchronize(sim.Fast.streams[device].handle))


class Block(Memory):
    """A block of a device that knows where it is."""

    def __init__(self, device, bytes):
        super().__init__(device, bytes)
        BLOCKS.add(self.address.value, bytes, device)

    def __del__(self):
        BLOCKS.remove(self.address.value)
        super().__del__()


class StreamBlock:
    """A block in the order of the current stream, as torch's allocator has them."""

    def __init__(self, device, bytes):
        self.stream, self.address = sim.Fast.streams[device].handle, ctypes.c_void_p()
        check(LIB.cudaMallocAsync(ctypes.byref(self.address), max(bytes, 1), self.stream))
        check(LIB.cudaStreamSynchronize(self.stream))
        BLOCKS.add(self.address.value, bytes, device)

    def __del__(self):
        BLOCKS.remove(self.address.value)
        check(LIB.cudaFreeAsync(self.address, self.stream))


class Loan:
    """A managed tensor of somebody else's."""

    def __init__(self, managed):
        self.managed = managed

    def __del__(self):
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.managed.deleter)(ctypes.addressof(self.managed))


def over(address, shape, strides, dtype, owner):
    """Return a tensor of that memory; `owner` lives as long as it."""
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if extent == 0:
        return torch.empty(tuple(shape), dtype=dtype).as_subclass(SimTensor)
    memory = type("Bytes", (ctypes.c_char * (extent * dtype.itemsize),), {}).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(shape), tuple(strides)).as_subclass(SimTensor)


def empty(shape, dtype, device=None):
    """Return a packed tensor whose memory is taken back in the order of the current stream, or is a graph's."""
    device = current_device() if device is None else device
    count = torch.Size(shape).numel()
    strides = torch.empty(tuple(shape), device="meta").stride()
    kind = Block if device in sim.Graph.under_way else StreamBlock
    block = kind(device, count * dtype.itemsize)
    return over(block.address.value, shape, strides, dtype, block)


# --- the exchange table ---


def fill(tensor, out):
    shape, strides = ((ctypes.c_int64 * tensor.ndim)(*numbers) for numbers in (tensor.shape, tensor.stride()))
    tensor.described = shape, strides  # borrowed by `out`
    out.data, out.byte_offset = tensor.data_ptr(), 0
    out.device_type, out.device_id = CUDA, BLOCKS.device_of(tensor.data_ptr())
    out.ndim, out.shape, out.strides, out.lanes = tensor.ndim, shape, strides, 1
    out.code, out.bits = CODES[tensor.dtype]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address):
    OWNED.pop(address)


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_void_p
)
def _allocate(prototype, out, context, set_error):
    wanted = prototype.contents
    made = empty([wanted.shape[i] for i in range(wanted.ndim)], DTYPES[wanted.code, wanted.bits], wanted.device_id)
    managed = Versioned()
    managed.major, managed.deleter = 1, ctypes.cast(_delete, ctypes.c_void_p)
    fill(made, managed.tensor)
    OWNED[ctypes.addressof(managed)] = managed, made
    out[0] = ctypes.addressof(managed)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def _to_object(address, out):
    if address in OWNED:
        _, made = OWNED.pop(address)
    else:
        managed = Versioned.from_address(address)
        tensor = managed.tensor
        synchronize(tensor.device_id)
        shape, strides = ([numbers[i] for i in range(tensor.ndim)] for numbers in (tensor.shape, tensor.strides))
        made = over(tensor.data, shape, strides, DTYPES[tensor.code, tensor.bits], Loan(managed))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    out[0] = id(made)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
def _describe(tensor, out):
    fill(tensor, out.contents)
    return 0


_FUNCTIONS = [ctypes.cast(f, ctypes.c_void_p) for f in (_allocate, _to_object, _describe, sim._current_stream)]
_TABLE = sim.Exchange(1, 3, None, _FUNCTIONS[0], None, *_FUNCTIONS[1:])


class SimTensor(torch.Tensor):
    """A tensor on a simulated GPU; views and results of it are too."""

    __dlpack_c_exchange_api__ = PYTHON.PyCapsule_New(ctypes.addressof(_TABLE), sim._NAME, None)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.empty_like:
            return empty(args[0].shape, args[0].dtype)
        return super().__torch_function__(function, types, args, kwargs or {})


def put(x, device):
    """Return a CPU tensor's values as they lie, written in the order of the device's current stream."""
    packed = x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)),), (1,))
    block = Block(device, packed.nbytes)
    stream = sim.Fast.streams[device].handle
    check(LIB.cudaMemcpyAsync(block.address, packed.data_ptr(), packed.nbytes, 1, stream))
    block.source = packed  # the copy may not have happened
    return over(block.address.value, x.shape, x.stride(), x.dtype, block)


def get(tensor):
    """Return the values, once all work of the tensor's device has been done."""
    check(LIB.cudaSetDevice(BLOCKS.device_of(tensor.data_ptr())))
    check(LIB.cudaDeviceSynchronize())
    return tensor.detach().as_subclass(torch.Tensor).clone()
