"""Kernels of packages behind calls on simulated GPUs: stand-ins of their signatures, exact against float64.

A rank is a thread; tensors are torch's, on simulated GPUs (sim_tensor.py).
"""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import numpy as np  # noqa: E402
import sim_gpu as sim  # noqa: E402
import sim_tensor  # noqa: E402
import stand_ins  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402
from gpu_ranks import open_gpus  # noqa: E402
from sim_tensor import get, put  # noqa: E402
from thread_ranks import oracle  # noqa: E402

from cp_attn import _C, _packages  # noqa: E402
from cp_attn.models import dispatch  # noqa: E402
from cp_attn.models.exchange import Exchange  # noqa: E402

LIB = sim.LIB
PACKAGES = [name for name in _C._backends["cuda"] if "native" not in name]
FLASH = [name for name in PACKAGES if "sage" not in name]
SAGE = [name for name in PACKAGES if "sage" in name]
CONFIGS = {
    "ring2": {"ring_degree": 2},
    "ring3": {"ring_degree": 3, "ring_anything": True},
    "ulysses2": {"ulysses_degree": 2},
    "ulysses3": {"ulysses_degree": 3, "ulysses_anything": True},
    "unified2x2": {"ring_degree": 2, "ulysses_degree": 2},
}
# Every package where blocks are cut most, and one everywhere.
CASES = [(name, config) for name in FLASH for config in (CONFIGS if name == "flash" else ("ring3", "unified2x2"))]


@pytest.fixture
def packages(monkeypatch):
    _packages._functions.cache_clear()
    yield stand_ins.install(monkeypatch)
    _packages._functions.cache_clear()


@pytest.fixture
def gpus():
    with open_gpus() as start:
        yield start
    assert not sim_tensor.OWNED and not sim_tensor.BLOCKS.rows


@pytest.fixture
def gpus_of_ipc():
    with open_gpus("ipc") as start:
        yield start
    assert not sim_tensor.OWNED and not sim_tensor.BLOCKS.rows


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def lengths_of(config, rows):
    world = config.get("ring_degree", 1) * config.get("ulysses_degree", 1)
    is_any = any(name.endswith("anything") for name in config)
    return [rows + (r * 5) % 4 - 1 if is_any else rows for r in range(world)]


def whole(parts):
    return torch.cat(parts, 1)


def given(ranks, parts):
    """Return what rank r puts on its GPU of each whole tensor."""
    return lambda r: [put(x[r].contiguous(), r) for x in parts]


def attend(ranks, backend, q, k, v, lengths, kv_lengths=None, **keywords):
    """Return (out, lse), whole, of a call on all ranks."""
    parts = given(ranks, [q.split(lengths, 1), *(x.split(kv_lengths or lengths, 1) for x in (k, v))])

    def call(r):
        made = _C.attention(*parts(r), ranks.contexts[r], backend=backend, return_lse=True, **keywords)
        assert all(type(x) is sim_tensor.SimTensor for x in made)
        return [get(x) for x in made]

    return [whole(x) for x in zip(*ranks.run(call), strict=True)]


def naive(q, k, v, is_causal, scale=None):
    """Return out in q's dtype, as one process computes it in that dtype."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def assert_as_exact(found, want, plain, least=4):
    """Compare with float64, by the error of the plain method in that dtype; `least`: roundings that are allowed."""
    allowed = max(2 * (plain.double() - want).abs().max().item(), least * torch.finfo(plain.dtype).eps)
    assert (found.double() - want).abs().max().item() <= allowed


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("backend, config", CASES)
def test_forward(gpus, packages, backend, config, is_causal):
    config = CONFIGS[config]
    ranks, lengths = gpus(**config), lengths_of(config, 5)
    for heads, kv_heads, dtype, scale in ((12, 12, torch.bfloat16, None), (12, 4, torch.float16, 0.3)):
        q, k, v = (
            numbers(2, sum(lengths), n, 16, seed=n + i, dtype=dtype) for i, n in enumerate((heads, *[kv_heads] * 2))
        )
        want, want_lse = oracle(*(x.double().numpy() for x in (q, k, v)), None, is_causal, scale)
        keywords = {"is_causal": is_causal, "enable_gqa": True, "scale": scale}
        for _ in range(2):  # new to the context, then known to it
            out, lse = attend(ranks, backend, q, k, v, lengths, **keywords)
            assert_as_exact(out, torch.from_numpy(want), naive(q, k, v, is_causal, scale))
            np.testing.assert_allclose(lse.numpy(), want_lse, atol=1e-3 if dtype is torch.float16 else 8e-3)
    kinds = {name for name, _ in stand_ins.CALLS}
    assert kinds == {stand_ins.FUNCTIONS[backend]} and is_causal in {causal for _, causal in stand_ins.CALLS}


def gradients(q, k, v, dout, is_causal):
    """Return (dq, dk, dv) by torch's autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(naive(q, k, v, is_causal), (q, k, v), dout)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("backend, config", CASES)
def test_backward(gpus, packages, backend, config, is_causal):
    config = CONFIGS[config]
    ranks, lengths = gpus(**config), lengths_of(config, 5)
    q, dout = (numbers(2, sum(lengths), 12, 16, seed=i) for i in range(2))
    k, v = (numbers(2, sum(lengths), 4, 16, seed=i) for i in range(2, 4))
    out, lse = attend(ranks, backend, q, k, v, lengths, is_causal=is_causal, enable_gqa=True)
    exact = gradients(*(x.double() for x in (q, k, v, dout)), is_causal)
    plain = gradients(q, k, v, dout, is_causal)
    found = differentiate(ranks, backend, (q, k, v, out, lse, dout), lengths, is_causal=is_causal)
    for one, want, rough in zip(found, exact, plain, strict=True):
        assert_as_exact(one, want, rough)
    assert stand_ins.FUNCTIONS[backend] + "_backward" in {name for name, _ in stand_ins.CALLS}


def differentiate(ranks, backend, tensors, lengths, kv_lengths=None, dlse=None, is_causal=False):
    """Return (dq, dk, dv), whole, of a call on all ranks; `tensors`: q, k, v, out, lse, dout."""
    rows = [x.split(kv_lengths or lengths if i in (1, 2) else lengths, 1) for i, x in enumerate(tensors)]
    parts = given(ranks, rows if dlse is None else [*rows, dlse.split(lengths, 1)])

    def call(r):
        own = parts(r) if dlse is not None else [*parts(r), None]
        rest = None, is_causal, None, True, "sharded", backend
        return [get(x) for x in _C._attention_backward(ranks.contexts[r], *own, *rest)]

    return map(whole, zip(*ranks.run(call), strict=True))


@pytest.mark.parametrize("backend, config", [case for case in CASES if case[0] == "flash"])
def test_windows_of_other_gpus(gpus_of_ipc, packages, backend, config):
    """Keys and values that are read there come to the package's GPU."""
    test_forward(gpus_of_ipc, packages, backend, config, True)
    test_backward(gpus_of_ipc, packages, backend, config, True)


@pytest.mark.parametrize("rows, keys", [(7, 4), (3, 6)])
@pytest.mark.parametrize("backend", ["flash", "_flash_3_varlen_hub"])
def test_causal_with_other_lengths(gpus, packages, backend, rows, keys):
    """Some rows of a block see none of its keys, and some see all."""
    ranks = gpus(ring_degree=3)
    q, dout = (numbers(2, 3 * rows, 4, 16, seed=i) for i in range(2))
    k, v = (numbers(2, 3 * keys, 4, 16, seed=i) for i in range(2, 4))
    lengths = [rows] * 3, [keys] * 3
    out, lse = attend(ranks, backend, q, k, v, *lengths, is_causal=True)
    want = oracle(*(x.double().numpy() for x in (q, k, v)), None, True)[0]
    assert_as_exact(out, torch.from_numpy(want), naive(q, k, v, True))
    exact, plain = (gradients(*(x.to(t) for x in (q, k, v, dout)), True) for t in (torch.float64, torch.bfloat16))
    found = differentiate(ranks, backend, (q, k, v, out, lse, dout), *lengths, is_causal=True)
    for one, want, rough in zip(found, exact, plain, strict=True):
        assert_as_exact(one, want, rough)


def test_a_gradient_of_the_lse(gpus, packages):
    """Is the plain kernel's: no package is asked for it."""
    ranks = gpus(ring_degree=2)
    q, k, v, dout = (numbers(1, 8, 2, 16, seed=i) for i in range(4))
    dlse = numbers(1, 8, 2, seed=4, dtype=torch.float32)
    out, lse = attend(ranks, "flash", q, k, v, [4, 4])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact_lse = (leaves[0].transpose(1, 2) @ leaves[1].permute(0, 2, 3, 1) / 4).logsumexp(-1).transpose(1, 2)
    loss = (naive(*leaves, False) * dout.double()).sum() + (exact_lse * dlse.double()).sum()
    exact = torch.autograd.grad(loss, leaves)
    for found, want in zip(
        differentiate(ranks, "flash", (q, k, v, out, lse, dout), [4, 4], dlse=dlse), exact, strict=True
    ):
        torch.testing.assert_close(found.double(), want, atol=0.03, rtol=0.03)
    assert {name for name, _ in stand_ins.CALLS} == {"flash_2"}


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("config", ["ring2", "ring3", "ulysses2", "unified2x2"])
@pytest.mark.parametrize("backend", SAGE)
def test_sage(gpus, packages, backend, config, is_causal):
    """Quantised: as near as one call of it on the whole is, and its lse's base and scale are read rightly."""
    config = CONFIGS[config]
    ranks, lengths = gpus(**config), lengths_of(config, 6)
    q, k, v = (numbers(1, sum(lengths), 4, 16, seed=i) for i in range(3))
    k += 2  # the mean over the keys is in the lse
    want, want_lse = oracle(*(x.double().numpy() for x in (q, k, v)), None, is_causal)
    out, lse = attend(ranks, backend, q, k, v, lengths, is_causal=is_causal)
    np.testing.assert_allclose(out.double().numpy(), want, atol=0.06)
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=0.06)
    assert {name for name, _ in stand_ins.CALLS} == {"sage"}


def test_strides(gpus, packages):
    """Rows that are not whole words, and numbers that are not side by side, are copied for the package."""
    ranks = gpus(ring_degree=2)
    for first, step in ((4, 1), (0, 2)):
        q, k, v = (numbers(1, 8, 2, 40, seed=i) for i in range(3))
        views = [x[..., first : first + 16 * step : step] for x in (q, k, v)]
        want = oracle(*(x.double().numpy() for x in views))[0]

        def call(r, whole=(q, k, v), first=first, step=step):
            own = [put(x[:, 4 * r : 4 * r + 4].contiguous(), r) for x in whole]
            return get(
                _C.attention(
                    *[x[..., first : first + 16 * step : step] for x in own], ranks.contexts[r], backend="flash"
                )
            )

        out = whole(ranks.run(call))
        assert_as_exact(out, torch.from_numpy(want), naive(*views, False))


def refused(ranks, backend, error, *words, x=None, kv=None, make=put, **keywords):
    """Check that all ranks raise the same, and that the context goes on."""
    x = numbers(1, 4, 4, 16) if x is None else x
    kv = x if kv is None else kv

    def call(r):
        q, k, v = (make(y, r) for y in (x, kv, kv))
        return _C.attention(q, k, v, ranks.contexts[r], backend=backend, **keywords)

    caught = ranks.errors(call)
    for one in caught:
        assert type(one) is error, repr(one)
        assert all(word in str(one) for word in words), str(one)
    return caught


def works(ranks, backend="flash"):
    x = numbers(1, 4 * ranks.world, 2, 16, seed=9)
    out, _ = attend(ranks, backend, x, x, x, [4] * ranks.world)
    assert_as_exact(out, torch.from_numpy(oracle(*[x.double().numpy()] * 3)[0]), naive(x, x, x, False))


def test_refusals(gpus, packages):
    """Of what a package does not take: before any data moves, with the backend, the reason and one that can."""
    ranks, native = gpus(ring_degree=2), "'native' can"
    x, single = numbers(1, 4, 4, 16), numbers(1, 4, 4, 16, dtype=torch.float32)
    for backend in PACKAGES:
        name = f"backend '{backend}' cannot answer this call: "
        refused(ranks, backend, _C.NotSupported, name + "it takes bfloat16 and float16, not float32", native, x=single)
        refused(
            ranks, backend, _C.NotSupported, name + "it takes head dims up to", ", not 12;", x=x[..., :12].contiguous()
        )
        refused(ranks, backend, _C.NotSupported, name, "not 264; " + native, x=numbers(1, 4, 4, 264))
        mask = torch.ones(1, 8, dtype=torch.bool)
        refused(ranks, backend, _C.NotSupported, name + "it takes no attn_mask; " + native, attn_mask=put(mask, 0))
        caught = ranks.errors(
            lambda r, b=backend: _C.attention(
                put(x, r), put(x, r), put(x[..., :8].contiguous(), r), ranks.contexts[r], backend=b
            )
        )
        assert all(name + "it needs values of the head dim, 16, not 8" in str(e) for e in caught)
        refused(ranks, backend, _C.NotSupported, "takes tensors of torch alone", "'native'", make=as_numpy)
        assert not stand_ins.CALLS
    for backend in SAGE:
        refused(
            ranks,
            backend,
            _C.NotSupported,
            "a key head for each of the 4",
            kv=x[:, :, :2].contiguous(),
            enable_gqa=True,
        )
    works(ranks)


def as_numpy(x, rank):
    return sim.Fast(x.float().numpy(), rank)


@pytest.mark.parametrize("backend", SAGE)
def test_sage_has_no_gradient(gpus, packages, backend):
    """It is said before anything is computed, also where the backward is called without a forward."""
    ranks, x = gpus(ring_degree=2), numbers(1, 4, 4, 16)
    words = f"backend '{backend}' has no gradient; 'native' has one, and so have flash, flash_hub"
    refused(ranks, backend, _C.NotSupported, words, make=lambda x, r: put(x, r).requires_grad_())
    lse = numbers(1, 4, 4, dtype=torch.float32)

    def call(r):
        tensors = [put(y, r) for y in (x, x, x, x, lse, x)]
        return _C._attention_backward(ranks.contexts[r], *tensors, None, None, False, None, False, "sharded", backend)

    assert all(type(e) is _C.NotSupported and words in str(e) for e in ranks.errors(call))
    assert not stand_ins.CALLS
    works(ranks)


@pytest.mark.parametrize("generation, taken", [(75, []), (80, "flash sage"), (90, "flash sage 3"), (100, "flash")])
def test_generations(packages, generation, taken):
    """Of GPUs: what runs there is asked, anything else is refused with the generation's name."""
    for backend in PACKAGES:
        is_taken = "3" in taken if "_3" in backend else backend.split("_")[0] in taken
        arguments = backend, "bfloat16", 64, 64, 8, 8, False, False, generation
        if is_taken:
            _packages.check(*arguments)
            continue
        with pytest.raises(_C.NotSupported, match=f"{backend}.*does not run on a GPU of sm_{generation}; 'native' can"):
            _packages.check(*arguments)


def test_the_table_has_every_package():
    assert list(_packages.TABLE) == PACKAGES


def test_a_package_that_is_missing(gpus, monkeypatch):
    """On one rank or on all: an agreed ImportError that names it, and the context goes on."""
    ranks = gpus(ring_degree=2)
    for backend in PACKAGES:
        _packages._functions.cache_clear()
        refused(ranks, backend, ImportError, f"backend '{backend}' cannot be loaded: ", "'native' needs no package")
    stand_ins.install(monkeypatch)
    works(ranks)


def test_backends_that_differ(gpus, packages):
    ranks, x = gpus(ring_degree=2), numbers(1, 4, 4, 16)
    names = "flash", "native"
    caught = ranks.errors(lambda r: _C.attention(*[put(x, r)] * 3, ranks.contexts[r], backend=names[r]))
    for one in caught:
        assert type(one) is ValueError and "rank 1 differs from rank 0 in backend: " in str(one)
        assert "backend flash" in str(one)
    works(ranks)


class Strange(ValueError):
    """What a package may raise."""


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_package_that_raises(gpus, packages, direction):
    """In the middle of a call: it is the call's error, the context is broken for all ranks, and says why."""
    ranks, x = gpus(ring_degree=2, timeout=10), numbers(1, 4, 4, 16)
    lse = numbers(1, 4, 4, dtype=torch.float32)

    def fail(*arguments):
        raise Strange("this kernel has had enough")

    setattr(packages.interface, f"_wrapped_flash_attn_{direction}", fail)

    def call(r):
        if direction == "forward":
            return _C.attention(*[put(x, r)] * 3, ranks.contexts[r], backend="flash")
        tensors = [put(y, r) for y in (x, x, x, x, lse, x)]
        return _C._attention_backward(ranks.contexts[r], *tensors, None, None, False, None, False, "sharded", "flash")

    caught = ranks.errors(call)
    assert any(type(e.__cause__) is Strange for e in caught)
    for one in caught:
        assert type(one) is ValueError and "backend 'flash': Strange: this kernel has had enough" in str(one), repr(one)
    for one in ranks.errors(call):
        assert type(one) is _C.CommError and "broken" in str(one) and "had enough" in str(one)


def answers(**change):
    """Return flash-attn's forward with other results: name of the result, and what becomes of it."""

    def forward(*arguments):
        out, lse, *rest = stand_ins._flash_attn_forward(*arguments)
        results = {"out": out, "lse": lse}
        results |= {name: f(results[name]) for name, f in change.items()}
        return results["out"], results["lse"], *rest

    return forward


@pytest.mark.parametrize(
    "change, words",
    [
        ({"out": lambda x: x[:, 1:]}, ["out of shape (1, 3, 4, 16)", "expected were 4 rows"]),
        ({"out": lambda x: x[..., :8]}, ["out of shape (1, 4, 4, 8)"]),
        ({"out": lambda x: x.float()}, ["out of shape", "float32", "bfloat16"]),
        ({"lse": lambda x: x[..., :3]}, ["lse of shape (1, 3, 4)"]),
        ({"lse": lambda x: x[..., None]}, ["lse of shape"]),
        ({"lse": lambda x: x.double()}, ["lse of shape", "float64"]),
        ({"out": stand_ins.plain}, ["out of shape", "on cpu"]),
        ({"out": lambda x: None}, ["out must be an array"]),
    ],
    ids=["rows", "dims", "dtype", "lse rows", "lse axes", "lse dtype", "device", "nothing"],
)
def test_a_package_that_answers_something_else(gpus, packages, change, words):
    ranks, x = gpus(ring_degree=2, timeout=10), numbers(1, 4, 4, 16)
    packages.interface._wrapped_flash_attn_forward = answers(**change)
    caught = ranks.errors(lambda r: _C.attention(*[put(x, r)] * 3, ranks.contexts[r], backend="flash"))
    assert all(caught), caught
    for one in caught:
        assert "backend 'flash'" in str(one) and all(word in str(one) for word in words), str(one)


def test_an_interrupted_package(gpus, packages):
    """Ctrl-C in a package's Python is the interrupted rank's KeyboardInterrupt and a CommError of the others."""
    ranks, x = gpus(ring_degree=2, timeout=10), numbers(1, 4, 4, 16)

    def forward(*arguments):
        raise KeyboardInterrupt

    def call(r):
        if r == 1:
            return _C.attention(*[put(x, r)] * 3, ranks.contexts[r], backend="flash")
        try:
            return _C.attention(*[put(x, r)] * 3, ranks.contexts[r], backend="flash")
        except KeyboardInterrupt:
            return "interrupted"

    packages.interface._wrapped_flash_attn_forward = lambda *arguments: (
        forward()
        if sim_tensor.BLOCKS.device_of(arguments[0].data_ptr()) == 0
        else stand_ins._flash_attn_forward(*arguments)
    )
    futures = ranks._start(call)
    assert futures[0].result() == "interrupted"
    for one in ranks.errors(call):
        assert type(one) is _C.CommError and "rank 0 was interrupted" in str(one), repr(one)


def test_a_slow_package_holds_nobody_up(gpus, packages):
    """One rank's package waits, in Python and without the GIL, until the other rank has come through its own call."""
    ranks, x = gpus(ring_degree=2, timeout=20), numbers(1, 4, 4, 16)
    arrived = threading.Event()

    def forward(*arguments):
        rank = sim_tensor.BLOCKS.device_of(arguments[0].data_ptr())
        if rank == 1:
            arrived.set()
        assert arrived.wait(10)
        return stand_ins._flash_attn_forward(*arguments)

    packages.interface._wrapped_flash_attn_forward = forward
    ranks.run(lambda r: get(_C.attention(*[put(x, r)] * 3, ranks.contexts[r], backend="flash")))


def test_memory_that_runs_out(gpus, packages):
    """At any allocation of a call that is known: all ranks raise, nobody waits, and nothing is left."""
    x, lives = numbers(1, 4, 2, 16), set()
    for count in range(100):
        ranks = gpus(ring_degree=2, timeout=20)
        works(ranks)
        given = [([put(x, r) for _ in range(3)], context) for r, context in enumerate(ranks.contexts)]
        _C._mem_fail_after(count)
        caught = ranks.errors(lambda r, given=given: _C.attention(*given[r][0], given[r][1], backend="flash"))
        _C._mem_fail_after(-1)
        ranks.close()
        if not any(caught):
            break
        assert any(type(e) is MemoryError and "cannot allocate" in str(e) for e in caught), caught
        del given, caught
        gc.collect()
        lives.add(_C._mem_stats()[0])
    assert 8 < count < 99 and len(lives) == 1


class Mark(dispatch.Marker):
    """What stands in a processor's _parallel_config, without a model around it."""

    def __init__(self, context):
        self.exchange = Exchange(context)

    def attend(self, arguments, backend):
        return dispatch.attend(self.exchange, arguments, backend)


def test_through_diffusers(gpus, packages):
    """A processor's own backend, and that of the context manager, are whose kernel computes."""
    ranks, x = gpus(ring_degree=2), numbers(1, 8, 2, 16)
    want = torch.from_numpy(oracle(*[x.double().numpy()] * 3)[0])
    marks = [Mark(context) for context in ranks.contexts]

    def call(r, backend=None):
        own = [put(x[:, 4 * r : 4 * r + 4].contiguous(), r) for _ in range(3)]
        return get(attention_dispatch.dispatch_attention_fn(*own, backend=backend, parallel_config=marks[r]))

    dispatch.install()
    try:
        for backend in PACKAGES:
            stand_ins.CALLS.clear()
            assert_as_exact(whole(ranks.run(lambda r, b=backend: call(r, b))), want, naive(x, x, x, False), least=16)
            with attention_dispatch.attention_backend(backend):
                assert_as_exact(whole(ranks.run(call)), want, naive(x, x, x, False), least=16)
            assert [name for name, _ in stand_ins.CALLS] == [stand_ins.FUNCTIONS[backend]] * 8
        stand_ins.CALLS.clear()
        assert_as_exact(whole(ranks.run(call)), want, naive(x, x, x, False))
        assert not stand_ins.CALLS
    finally:
        dispatch.uninstall()


def test_native_names(gpus):
    """Need no package, and are exact; unlike packages they take float32, masks and any dims."""
    ranks, x = gpus(ring_degree=2), numbers(1, 8, 2, 6, dtype=torch.float32)
    want = oracle(*[x.numpy()] * 3)[0]
    for backend in _C._backends["cuda"]:
        if "native" in backend:
            out, _ = attend(ranks, backend, x, x, x, [4, 4])
            np.testing.assert_allclose(out.numpy(), want, atol=1e-5)
