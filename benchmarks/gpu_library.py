"""One rank's call on one GPU without peers, as benchmarks/bench_gpu.c makes it: built, loaded, called."""

import ctypes
import subprocess
import sys

from .provenance import ROOT


class Call(ctypes.Structure):
    """struct bench_call."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("ordinal", "ring", "ulysses", "without_attention")),
        *((name, ctypes.c_int64) for name in ("batch", "rows", "heads", "dim")),
        ("dtype", ctypes.c_char * 16),
    ]


def make(folder, *words):
    command = ["make", "--no-print-directory", "-j2", "-C", ROOT / folder, "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench_gpu.c cannot be built:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def build_for_gpu(generation):
    """Build with nvcc for GPUs of that generation, 90 for example; the library's path."""
    folder = ROOT / "build" / "benchmarks" / f"sm_{generation}"
    make("cuda", f"ARCHS={generation}", f"BUILD={folder}")
    return folder / "bench_gpu.so"


def build_for_simulation():
    """Build upon the simulated GPU (tests/simgpu/); the library's path."""
    make("tests/simgpu", "MODE=plain", "CC=gcc", "CXX=g++", f"VENV_PYTHON={sys.executable}")
    return ROOT / "build" / "simgpu" / "plain" / "module" / "bench_gpu.so"


class Library:
    """`ordinal`: of the GPU that it is used on."""

    def __init__(self, path, ordinal=0):
        self.c, self.ordinal = ctypes.CDLL(path), ordinal
        address = ctypes.c_void_p
        self.c.bench_open.argtypes = [ctypes.POINTER(Call), ctypes.POINTER(address)]
        self.c.bench_run.argtypes = [address] * 6
        self.c.bench_merge.argtypes = [address, ctypes.c_int, *[address] * 4]
        self.c.bench_close.argtypes = [ctypes.POINTER(address)]
        self.c.bench_workspace_bytes.argtypes = self.c.bench_kernel.argtypes = [address]
        self.c.bench_workspace_bytes.restype = ctypes.c_int64
        self.c.bench_kernel.restype = self.c.bench_error.restype = ctypes.c_char_p

    def check(self, code):
        if code:
            raise RuntimeError(self.c.bench_error().decode())


class Rank:
    """Rank 0 of ring x ulysses ranks that hold `rows` rows each; what it receives is what it sends (comm_mirror.h)."""

    def __init__(self, library, ring, ulysses, shape, dtype, *, without_attention=False):
        self.library, self.handle = library, ctypes.c_void_p()
        call = Call(library.ordinal, ring, ulysses, without_attention, *shape, dtype.encode())
        library.check(library.c.bench_open(ctypes.byref(call), ctypes.byref(self.handle)))
        self.workspace_bytes = library.c.bench_workspace_bytes(self.handle)
        self.kernel = library.c.bench_kernel(self.handle).decode()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.library.c.bench_close(ctypes.byref(self.handle))

    def run(self, q, k, v, out, stream):
        """Enqueue the call; addresses of contiguous (batch, rows, heads, dim)."""
        self.library.check(self.library.c.bench_run(self.handle, q, k, v, out, stream))

    def merge(self, outs, lses, out, stream):
        """Enqueue the merge of a library kernel's answers, with lses (batch, rows, heads), into out."""
        blocks = len(outs)
        arrays = [(ctypes.c_void_p * blocks)(*addresses) for addresses in (outs, lses)]
        self.library.check(self.library.c.bench_merge(self.handle, blocks, *arrays, out, stream))
