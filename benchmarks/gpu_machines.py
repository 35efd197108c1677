"""Where benchmarks.gpu_single runs: a GPU, which is timed, or the simulated one, which is not."""

import ctypes
import statistics
import time

import torch

from . import gpu_library


class Gpu:
    """The current GPU of torch, whose tensors both sides work on."""

    is_timed = True

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability()
        self.library = gpu_library.Library(gpu_library.build_for_gpu(f"{major}{minor}"), self.device.index)
        self.name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        self.ours = self.theirs = self.put

    def put(self, tensor):
        return tensor.to(self.device)

    def address(self, tensor):
        return tensor.data_ptr()

    def get(self, tensor):
        return tensor.cpu()

    def stream(self):
        return torch.cuda.current_stream().cuda_stream

    def ms(self, function):
        """Milliseconds of the GPU, from its coming to the work to its end."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def host_us(self, function):
        """Microseconds until the work has been enqueued, behind an idle GPU."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e6

    def transient_bytes(self, function):
        """The most that torch's allocator gave beyond what it had given before and what the function returns."""
        function()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = function()
        torch.cuda.synchronize()
        returned = kept.untyped_storage().nbytes() if kept is not None else 0
        return torch.cuda.max_memory_allocated() - before - returned


class Block:
    """A tensor's numbers in the memory of the simulated GPU."""

    def __init__(self, cuda, tensor):
        self.cuda, self.shape, self.dtype = cuda, tensor.shape, tensor.dtype
        self.memory = ctypes.c_void_p()
        self.bytes = tensor.nbytes
        self.source = tensor.contiguous()
        assert cuda.cudaMalloc(ctypes.byref(self.memory), self.bytes) == 0
        assert cuda.cudaMemcpy(self.memory, self.source.data_ptr(), self.bytes, 1) == 0

    def __del__(self):
        self.cuda.cudaFree(self.memory)


class Simulated:
    """Ours on the simulated GPU, with kernels that run on the host; theirs on the CPU. Times would say nothing."""

    is_timed = False
    name = "simulated GPU"

    def __init__(self):
        path = gpu_library.build_for_simulation()
        self.library = gpu_library.Library(path)
        self.cuda = ctypes.CDLL(path.with_name("libnccl.so.2"))
        self.cuda.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.cuda.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.cuda.cudaFree.argtypes = [ctypes.c_void_p]
        self.cuda.simgpu_set_delay.argtypes = [ctypes.c_int]
        self.cuda.simgpu_set_delay(0)

    def ours(self, tensor):
        return Block(self.cuda, tensor)

    def theirs(self, tensor):
        return tensor

    def address(self, block):
        return block.memory.value

    def get(self, value):
        if isinstance(value, torch.Tensor):
            return value
        assert self.cuda.cudaDeviceSynchronize() == 0
        tensor = torch.empty(value.shape, dtype=value.dtype)
        assert self.cuda.cudaMemcpy(tensor.data_ptr(), value.memory, value.bytes, 2) == 0
        return tensor

    def stream(self):
        return None  # the default one

    def ms(self, function):
        function()

    host_us = transient_bytes = ms


def medians(measure, sides, rounds):
    """[median of each side], measured in turns; None where the machine measures nothing."""
    for function in sides:
        measure(function)
    taken = [[measure(function) for function in sides] for _ in range(rounds)]
    columns = zip(*taken, strict=True)
    return [None if None in column else statistics.median(column) for column in columns]
