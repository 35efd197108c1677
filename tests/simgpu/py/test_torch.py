"""torch's ops by its C ABI, as cuda/torch_*.c calls them: on the torch that is installed, which needs no GPU.

Numbers come from the CPU's op, whose call differs from CUDA's in the op alone; CUDA's ops run on meta tensors, which
shows that torch takes their arguments and that their results have the shapes that are read. Merging, finishing and what
stands in for out are the kernels of cuda/ on the simulated GPU.
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
        *((name, ctypes.c_void_p) for name in "q k v state dout lse delta dq dk dv".split()),
        *((name, ctypes.c_int64) for name in "batch rows keys heads kv_heads dim value_dim".split()),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int32) for name in "dtype is_causal is_first".split()),
        *((name, ctypes.c_void_p) for name in "out lse_out".split()),
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


def block_of(q, k, v, scale):
    """Return a block of the queries with keys to be set."""
    batch, rows, heads, dim = q.shape
    block = Block(q=q.data_ptr(), batch=batch, rows=rows, heads=heads, dim=dim, scale=scale, dtype=DTYPES[q.dtype])
    block.kv_heads, block.value_dim = k.shape[2], v.shape[3]
    return block


def attend(q, k, v, blocks, scale, has_ends=False):
    """Return (out, lse) of q with the blocks (first key, end, is_causal) of k and v, one after the other.

    `has_ends`: the first one begins the state and the last one makes the result, without the state where they are one.
    """
    batch, rows, heads, dim = q.shape
    state = torch.full((batch, heads, rows, v.shape[3] + 2), torch.nan, dtype=sums(q.dtype))
    if not has_ends:
        state[..., -1] = 0  # the empty state: nothing else in it counts
    out = torch.full((batch, rows, heads, v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full((batch, rows, heads), torch.nan, dtype=sums(q.dtype))
    block = block_of(q, k, v, scale)
    block.state = state.data_ptr()
    for i, (first, end, is_causal) in enumerate(blocks):
        parts = [x[:, first:end].contiguous() for x in (k, v)]
        block.k, block.v = (part.data_ptr() for part in parts)
        block.keys, block.is_causal = end - first, is_causal
        block.is_first = has_ends and i == 0
        if has_ends and i == len(blocks) - 1:
            block.out, block.lse_out = out.data_ptr(), lse.data_ptr()
        check(LIB.probe_attend(ctypes.byref(block)))
    if not has_ends:
        check(LIB.probe_finish(ctypes.byref(block), ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(lse.data_ptr())))
    elif len(blocks) == 1:
        assert state.isnan().all()
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
    assert all(map(torch.equal, (out, lse), attend(q, k, v, blocks, scale, has_ends=True)))
    truth, truth_lse = naive(q.double(), k.double(), v.double(), seen, scale)
    plain = naive(q, k, v, seen, scale)[0]
    eps = torch.finfo(dtype).eps
    allowed = max(2 * float((plain - truth).abs().max()), (4 if dtype.itemsize == 2 else 32) * eps)
    assert float((out - truth).abs().max()) <= allowed
    assert float((lse - truth_lse).abs().max()) <= max(64 * torch.finfo(sums(dtype)).eps, eps / 8)


def gradients(q, k, v, dout, lse, delta, blocks, scale):
    """Return (dq, dk, dv), in the dtype of sums, of the blocks one after the other."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=sums(q.dtype)) for x in (q, k, v))
    block = block_of(q, k, v, scale)
    block.dout, block.lse, block.delta, block.dq = (x.data_ptr() for x in (dout, lse, delta, dq))
    for first, end, is_causal in blocks:
        parts = [x[:, first:end].contiguous() for x in (k, v, dk, dv)]
        block.k, block.v, block.dk, block.dv = (part.data_ptr() for part in parts)
        block.keys, block.is_causal = end - first, is_causal
        check(LIB.probe_gradient(ctypes.byref(block)))
        dk[:, first:end], dv[:, first:end] = parts[2:]
    return dq, dk, dv


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("grouped", "one kv head")])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_gradients_on_the_cpu(name, dtype, is_causal):
    """With what stands in for out they are as good as with out itself; rows without a key have none."""
    batch, rows, heads, kv_heads, dim, cuts = SHAPES[name]
    if is_causal:
        cuts = [*cuts[:-1], rows]
    keys = sum(cuts)
    torch.manual_seed(keys * dim + 1)
    q, dout = (torch.randn(batch, rows, heads, dim, dtype=torch.float64).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, keys, kv_heads, dim, dtype=torch.float64).to(dtype) for _ in range(2))
    ends = np.cumsum(cuts).tolist()
    blocks = [(end - cut, end, is_causal and end == keys) for end, cut in zip(ends, cuts, strict=True)]
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows if is_causal else keys)
    scale = 1.3 / dim**0.5
    wide = [x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v)]
    out, lse = naive(*wide, seen, scale)
    is_dead = torch.rand(batch, rows, heads) < 0.2
    truth = torch.autograd.grad(out, wide, dout.double() * ~is_dead[..., None])
    own_out = out.detach().to(dtype)  # as a forward pass leaves it
    lse = lse.detach().masked_fill(is_dead, -torch.inf).to(sums(dtype))
    delta = (own_out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    got = gradients(q, k, v, dout, lse, delta, blocks, scale)
    plain = plain_gradients(q, k, v, dout * ~is_dead[..., None], own_out, seen, scale)
    eps = torch.finfo(dtype).eps
    for x, right, naive_x in zip(got, truth, plain, strict=True):
        size = float(right.abs().max())
        few = (2 if dtype.itemsize == 2 else 32) * eps * size
        assert float((x - right).abs().max()) <= max(2 * float((naive_x - right).abs().max()), few)
    assert not got[0][is_dead].any()


def plain_gradients(q, k, v, dout, out, seen, scale):
    """Return (dq, dk, dv) by the textbook's formula in q's dtype."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    slopes = torch.einsum("bqhd,bkhd->bhqk", dout, v) - (out * dout).sum(-1).transpose(1, 2)[..., None]
    slopes = weights * slopes * scale
    return (
        torch.einsum("bhqk,bkhd->bqhd", slopes, k),
        torch.einsum("bhqk,bqhd->bkhd", slopes, q),
        torch.einsum("bhqk,bqhd->bkhd", weights, dout),
    )


CORE = ctypes.CDLL(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
CAPSULE = ctypes.pythonapi.PyCapsule_New
CAPSULE.restype, CAPSULE.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
POINTER_OF = ctypes.pythonapi.PyCapsule_GetPointer
POINTER_OF.restype, POINTER_OF.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

# Arguments: a tensor, an optional one, int32, int64, double, int32s and their number, the scale; results: a tensor and
# int64.
KINDS = {
    **dict.fromkeys("to", ctypes.c_void_p),
    "i": ctypes.c_int32,
    **dict.fromkeys("lc", ctypes.c_int64),
    "d": ctypes.c_double,
    "w": ctypes.POINTER(ctypes.c_int32),
    "s": ctypes.POINTER(ctypes.c_double),
    "T": ctypes.POINTER(ctypes.c_void_p),
    "L": ctypes.POINTER(ctypes.c_int64),
}
ENTRIES = {
    "cudnn": ("_scaled_dot_product_cudnn_attention", "tttoidiisTTTTLLTTT"),
    "flash_gradient": ("_scaled_dot_product_flash_attention_backward", "ttttttttlldittsTTT"),
    "efficient_gradient": ("_scaled_dot_product_efficient_attention_backward", "tttttttttdwcisTTTT"),
}


def lent(handle):
    """Return the tensor of a handle that stays its owner's; None for one that is undefined."""
    own = ctypes.c_void_p()
    assert CORE.aoti_torch_new_tensor_handle(ctypes.c_void_p(handle), ctypes.byref(own)) == 0
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(CAPSULE(own.value, None, None))


def hand_out(tensor, place):
    if tensor is None:
        assert CORE.aoti_torch_new_uninitialized_tensor(place) == 0
    else:
        place[0] = POINTER_OF(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
    LIB.probe_born(ctypes.c_void_p(place[0]))


def argument(kind, value):
    if kind == "t":
        return lent(value)
    if kind == "o":
        assert value is None
        return None
    return [bool(x) for x in value[:4]] if kind == "w" else bool(value) if kind == "i" else value


def entry_of(name, kinds):
    """Return an entry of torch's C ABI for CUDA that calls the op by Python."""
    op = getattr(torch.ops.aten, name)

    def call(*values):
        given = [(kind, x) for kind, x in zip(kinds, values, strict=True) if kind.islower() and kind not in "cs"]
        places = [(kind, x) for kind, x in zip(kinds, values, strict=True) if kind.isupper()]
        results = op(*(argument(*pair) for pair in given), scale=values[kinds.index("s")][0])
        for (kind, place), result in zip(places, results, strict=True):
            if kind == "T":
                hand_out(result, place)
            else:
                place[0] = result
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int32, *(KINDS[kind] for kind in kinds))(call)


@pytest.fixture
def entries():
    made = {field: entry_of(*what) for field, what in ENTRIES.items()}
    for field, entry in made.items():
        assert LIB.probe_set_entry(field.encode(), entry)
    return made


def run_on_meta(block, generation, cudnn, is_gradient):
    """Return the name of the op that was chosen and has run."""
    name = ctypes.create_string_buffer(128)
    check(LIB.probe_meta(ctypes.byref(block), generation, cudnn, is_gradient, name))
    return name.value.decode()


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
    block = meta_block(dtype, dim, value_dim, kv_heads, is_causal)
    assert run_on_meta(block, generation, 0, False) == op


def meta_block(dtype, dim, value_dim, kv_heads, is_causal):
    block = Block(batch=2, rows=45, keys=45 if is_causal else 33, heads=6, kv_heads=kv_heads, dim=dim)
    block.value_dim, block.scale, block.dtype, block.is_causal = value_dim, 0.3, DTYPES[dtype], is_causal
    return block


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "dtype, dim, value_dim, kv_heads, op",
    [
        (torch.bfloat16, 128, 128, 6, "_scaled_dot_product_flash_attention"),
        (torch.float16, 64, 64, 2, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 64, 128, 6, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 64, 64, 6, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 64, 64, 2, ""),
    ],
)
def test_cudas_gradients_on_meta_tensors(entries, dtype, dim, value_dim, kv_heads, op, is_causal):
    """Torch takes them in this order, what is left out too, and dq, dk and dv are as q, k and v."""
    assert run_on_meta(meta_block(dtype, dim, value_dim, kv_heads, is_causal), 90, 91501, True) == op


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_cudnns_op_on_meta_tensors(entries, kv_heads, is_causal):
    block = meta_block(torch.bfloat16, 128, 128, kv_heads, is_causal)
    assert run_on_meta(block, 90, 91501, False) == "_scaled_dot_product_cudnn_attention"


def test_what_torch_refuses_is_an_error_without_leftovers():
    """Values of another dim than the CPU's op takes: torch says no, and its words are in the error."""
    q, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 16)
    with pytest.raises(AssertionError, match="torch cannot _scaled.*_for_cpu: .*head size.*; CP_ATTN_CUDA_K"):
        attend(q, q, v, [(0, 4, False)], 1.0)


CUDA_ENTRIES = (
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_cuda__scaled_dot_product_flash_attention",
    "aoti_torch_cuda__scaled_dot_product_efficient_attention",
    "aoti_torch_cuda__scaled_dot_product_cudnn_attention",
    "aoti_torch_cuda__scaled_dot_product_flash_attention_backward",
    "aoti_torch_cuda__scaled_dot_product_efficient_attention_backward",
)


@pytest.mark.parametrize(
    "has_torch, entries, is_found",
    [(True, CUDA_ENTRIES, True), (True, CUDA_ENTRIES[:-1], False), (True, (), False), (False, CUDA_ENTRIES, False)],
    ids=["whole", "an entry is missing", "torch without CUDA", "no torch"],
)
def test_which_torch_is_used(tmp_path, has_torch, entries, is_found):
    """One that is loaded and has CUDA, for which a library of that name stands here."""
    source = "".join(f"void {name}(void);\nvoid {name}(void) {{}}\n" for name in entries)
    library = library_of(tmp_path, "libtorch_cuda.so", source)
    load = f"ctypes.CDLL({str(library)!r})" if entries else ""
    answer = ask_probe(("import torch\n" if has_torch else "") + load, "probe_loaded() & 1")
    assert answer == str(int(is_found))


def library_of(folder, name, source):
    """Compile a shared library of that name, which is loaded under it."""
    command = [shutil.which("gcc") or shutil.which("clang"), "-shared", "-fPIC", "-x", "c", "-", "-o", folder / name]
    subprocess.run([*command, f"-Wl,-soname,{name}"], input=source, text=True, check=True)
    return folder / name


def ask_probe(before, call):
    """Return what a call of the probe says in a new process, as text."""
    program = f"import ctypes\n{before}\nprint(ctypes.CDLL({str(sim.FOLDER / 'torch_probe.so')!r}).{call})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("has_cudnn", [True, False])
def test_the_version_of_cudnn_is_that_of_the_copy_that_is_loaded(tmp_path, has_cudnn):
    source = "".join(f"void {name}(void);\nvoid {name}(void) {{}}\n" for name in CUDA_ENTRIES)
    cuda = library_of(tmp_path, "libtorch_cuda.so", source)
    version = "unsigned long cudnnGetVersion(void);\nunsigned long cudnnGetVersion(void) { return 91501; }\n"
    cudnn = library_of(tmp_path, "libcudnn.so.9", version)
    load = f"import torch\nctypes.CDLL({str(cuda)!r})\n" + (f"ctypes.CDLL({str(cudnn)!r})" if has_cudnn else "")
    assert ask_probe(load, "probe_cudnn()") == ("91501" if has_cudnn else "0")


def test_declarations_are_torchs_own():
    """Our declarations of the C ABI against the headers of the torch that is installed."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    folder = Path(torch.__file__).parent / "include"
    flags = "-std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-deprecated-declarations".split()
    paths = [f"-I{ROOT / 'cuda'}", f"-I{ROOT / 'csrc'}", "-isystem", folder]
    command = [compiler, *flags, *paths, ROOT / "cuda" / "torch_check.cc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
