"""torch's ops by its C ABI, as cuda/torch_*.c calls them: on the torch that is installed, which needs no GPU.

Numbers come from the CPU's op, whose call differs from CUDA's in the op alone; CUDA's ops run on meta tensors, which
shows that torch takes their arguments and that their results have the shapes that are read. Merging and finishing are
the kernels of cuda/ on the simulated GPU.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sim_gpu as sim

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
LIB = ctypes.CDLL(sim.FOLDER / "torch_probe.so")
LIB.probe_error.restype = ctypes.c_char_p
LIB.probe_open.restype = ctypes.c_bool

# The order of csrc/tensor/dtype.h.
DTYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}


class Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k v state".split()),
        *((name, ctypes.c_int64) for name in "batch rows keys heads kv_heads dim value_dim".split()),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int32) for name in "dtype is_causal".split()),
    ]


@pytest.fixture(autouse=True)
def probe():
    assert LIB.probe_open()
    yield
    assert LIB.probe_alive() == 0


def check(code):
    assert code == 0, LIB.probe_error().decode()


def sums(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def attend(q, k, v, blocks, scale):
    """Return (out, lse) of q with the blocks (first key, end, is_causal) of k and v, one after the other."""
    batch, rows, heads, dim = q.shape
    state = torch.full((batch, heads, rows, v.shape[3] + 2), torch.nan, dtype=sums(q.dtype))
    state[..., -1] = 0  # the empty state: nothing else in it counts
    block = Block(q.data_ptr(), 0, 0, state.data_ptr(), batch, rows, 0, heads, k.shape[2], dim, v.shape[3], scale)
    block.dtype = DTYPES[q.dtype]
    for first, end, is_causal in blocks:
        parts = [x[:, first:end].transpose(1, 2).contiguous() for x in (k, v)]
        block.k, block.v = (part.data_ptr() for part in parts)
        block.keys, block.is_causal = end - first, is_causal
        check(LIB.probe_attend(ctypes.byref(block)))
    out = torch.full((batch, rows, heads, v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full((batch, rows, heads), torch.nan, dtype=sums(q.dtype))
    check(LIB.probe_finish(ctypes.byref(block), ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(lse.data_ptr())))
    return out, lse


def naive(q, k, v, seen, scale):
    """Return (out, lse), computed in q's dtype; `seen` (rows, keys) says who sees whom."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * scale
    scores = scores.masked_fill(~seen[None, :, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0)
    return torch.einsum("bqhk,bkhd->bqhd", weights, v), lse


SHAPES = {  # batch, rows, heads, kv heads, dim, cuts of the keys
    "one block": (2, 17, 3, 3, 16, [33]),
    "blocks": (2, 40, 2, 2, 64, [40, 7, 1, 64]),
    "one row": (1, 1, 4, 4, 8, [5, 9]),
    "uneven": (3, 19, 5, 5, 128, [18, 20]),
    "grouped": (2, 24, 6, 2, 32, [24, 11]),
    "one kv head": (1, 30, 4, 1, 72, [12, 12, 12]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_numbers_on_the_cpu(name, dtype, is_causal):
    batch, rows, heads, kv_heads, dim, cuts = SHAPES[name]
    if is_causal:  # what comes before, the diagonal; what comes after is seen by no row
        cuts = [*cuts[:-1], rows]
    keys = sum(cuts)
    torch.manual_seed(keys * dim)
    q = torch.randn(batch, rows, heads, dim, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(batch, keys, kv_heads, dim, dtype=torch.float64).to(dtype) for _ in range(2))
    ends = np.cumsum(cuts).tolist()
    blocks = [(end - cut, end, is_causal and end == keys) for end, cut in zip(ends, cuts, strict=True)]
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows if is_causal else keys)
    scale = 1.3 / dim**0.5
    out, lse = attend(q, k, v, blocks, scale)
    truth, truth_lse = naive(q.double(), k.double(), v.double(), seen, scale)
    plain = naive(q, k, v, seen, scale)[0]
    eps = torch.finfo(dtype).eps
    allowed = max(2 * float((plain - truth).abs().max()), (4 if dtype.itemsize == 2 else 32) * eps)
    assert float((out - truth).abs().max()) <= allowed
    assert float((lse - truth_lse).abs().max()) <= max(64 * torch.finfo(sums(dtype)).eps, eps / 8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "dtype, dim, value_dim, kv_heads, generation, op",
    [
        (torch.bfloat16, 128, 128, 6, 90, "_scaled_dot_product_flash_attention"),
        (torch.float16, 64, 64, 2, 80, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 64, 128, 6, 90, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 64, 64, 6, 90, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 64, 64, 2, 90, ""),
        (torch.float64, 64, 64, 6, 90, ""),
        (torch.bfloat16, 64, 64, 6, 75, ""),
    ],
)
def test_cudas_ops_on_meta_tensors(dtype, dim, value_dim, kv_heads, generation, op, is_causal):
    """torch takes the arguments, and its results are as they are read: (B, H, S, D), (B, H, S or more), dtypes."""
    rows = 45
    block = Block(None, None, None, None, 2, rows, rows, 6, kv_heads, dim, value_dim, 0.3, DTYPES[dtype], is_causal)
    name = ctypes.create_string_buffer(128)
    check(LIB.probe_meta(ctypes.byref(block), generation, name))
    assert name.value.decode() == op


def test_what_torch_refuses_is_an_error_without_leftovers():
    """Values of another dim than the CPU's op takes: torch says no, and its words are in the error."""
    q, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 16)
    with pytest.raises(AssertionError, match="torch cannot _scaled.*_for_cpu: .*head size.*; CP_ATTN_CUDA_K"):
        attend(q, q, v, [(0, 4, False)], 1.0)


CUDA_ENTRIES = (
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_cuda__scaled_dot_product_flash_attention",
    "aoti_torch_cuda__scaled_dot_product_efficient_attention",
)


@pytest.mark.parametrize(
    "has_torch, entries, is_found",
    [(True, CUDA_ENTRIES, True), (True, CUDA_ENTRIES[:2], False), (True, (), False), (False, CUDA_ENTRIES, False)],
    ids=["whole", "an entry is missing", "torch without CUDA", "no torch"],
)
def test_which_torch_is_used(tmp_path, has_torch, entries, is_found):
    """One that is loaded and has CUDA, for which a library of that name stands here."""
    library = tmp_path / "libtorch_cuda.so"
    source = "".join(f"void {name}(void);\nvoid {name}(void) {{}}\n" for name in entries)
    command = [shutil.which("gcc") or shutil.which("clang"), "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run([*command, "-Wl,-soname,libtorch_cuda.so"], input=source, text=True, check=True)
    program = f"""
import ctypes
{"import torch" if has_torch else ""}
{f"ctypes.CDLL({str(library)!r})" if entries else ""}
print(ctypes.CDLL({str(sim.FOLDER / "torch_probe.so")!r}).probe_loaded() & 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == str(int(is_found)), done.stderr


def test_declarations_are_torchs_own():
    """Our declarations of the C ABI against the headers of the torch that is installed."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    folder = Path(torch.__file__).parent / "include"
    flags = "-std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-deprecated-declarations".split()
    paths = [f"-I{ROOT / 'cuda'}", f"-I{ROOT / 'csrc'}", "-isystem", folder]
    command = [compiler, *flags, *paths, ROOT / "cuda" / "torch_check.cc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
