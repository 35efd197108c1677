"""Every error: its class, its words, on every rank, and what can be done afterwards."""

import contextlib
import copy
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from footprint import footprint
from launch import clean_environ, free_port, launch, rank_environ, say
from thread_ranks import Ranks, cut, oracle

import cp_attn
from cp_attn import _C


def x(B=1, s=4, H=6, D=8, dtype="float32"):
    return np.ones((B, s, H, D), dtype)


@pytest.fixture(params=["ring", "ulysses"])
def ranks(request):
    with Ranks(2, **{f"{request.param}_degree": 2}) as ranks:
        yield ranks
        # Whatever a test has provoked: the context is as good as new.
        assert all((out == 1).all() for out in ranks.attention([x()] * 2, [x()] * 2, [x()] * 2))


def refused(ranks, call, error, *words, odd=None):
    """Call on both ranks; each raises exactly `error` with these words, those but `odd` with its number."""
    for rank, caught in enumerate(ranks.errors(call)):
        assert type(caught) is error, f"rank {rank}: {caught!r}"
        assert all(word in str(caught) for word in words), f"rank {rank}: {caught}"
        if odd is not None and rank != odd:
            assert f"rank {odd}" in str(caught), f"rank {rank}: {caught}"


# --- what is wrong with a call, whoever makes it ---

CALLS = [
    (lambda: (x()[0], x(), x()), {}, ValueError, ["q has 3 dimensions", "(4, 6, 8)", "4"]),
    (lambda: (x(), x()[..., None], x()), {}, ValueError, ["k has 5 dimensions", "4"]),
    (lambda: (x(), x(), np.float32(3)), {}, TypeError, ["v must be an array"]),
    (lambda: (x(dtype="int32"),) * 3, {}, TypeError, ["int32", "float32", "bfloat16"]),
    (lambda: (x(dtype="complex64"),) * 3, {}, TypeError, ["complex64"]),
    (lambda: (x(), x(dtype="float64"), x()), {}, TypeError, ["k has dtype float64", "float32"]),
    (lambda: (x(), x(), x(dtype="float16")), {}, TypeError, ["v has dtype float16", "float32"]),
    (lambda: (x(B=2), x(), x()), {}, ValueError, ["batch", "2", "1"]),
    (lambda: (x(), x(), x(B=3)), {}, ValueError, ["batch", "1", "3"]),
    (lambda: (x(), x(s=3), x()), {}, ValueError, ["sequence lengths of k and v", "3", "4"]),
    (lambda: (x(), x(H=3), x(H=2)), {"enable_gqa": True}, ValueError, ["heads of k and v", "3", "2"]),
    (lambda: (x(D=4), x(), x()), {}, ValueError, ["head dims of q and k", "4", "8"]),
    (lambda: (x(), x(H=2), x(H=2)), {}, ValueError, ["6", "2", "enable_gqa"]),
    (lambda: (x(), x(H=4), x(H=4)), {"enable_gqa": True}, ValueError, ["6", "4", "divided"]),
    (lambda: (x(D=0),) * 3, {}, ValueError, ["at least 1"]),
    (lambda: (x(H=0),) * 3, {}, ValueError, ["at least 1"]),
    (lambda: (x(),) * 3, {"scale": float("nan")}, ValueError, ["scale", "nan", "finite"]),
    (lambda: (x(),) * 3, {"scale": -float("inf")}, ValueError, ["scale", "-inf"]),
    (lambda: (x(),) * 3, {"scale": "0.5"}, TypeError, ["scale", "str"]),
    (lambda: (x(),) * 3, {"scale": 1j}, TypeError, ["scale", "complex"]),
    (lambda: (x(),) * 3, {"scale": 10**400}, ValueError, ["scale", "float"]),
    (lambda: (x(),) * 3, {"scale": 1e39}, ValueError, ["scale=1e+39", "float32"]),
    (lambda: (x(),) * 3, {"scale": np.float64(-3.5e38)}, ValueError, ["scale=-3.5e+38", "float32"]),
    (lambda: (x(dtype="float16"),) * 3, {"scale": 1e300}, ValueError, ["scale=1e+300", "float16", "float32"]),
    (lambda: (x(),) * 3, {"dropout_p": 10**400}, ValueError, ["dropout_p", "float"]),
    (lambda: (x(),) * 3, {"dropout_p": 0.1}, ValueError, ["dropout_p", "0.1"]),
    (lambda: (x(),) * 3, {"backend": None}, TypeError, ["backend", "NoneType"]),
    (lambda: (x(),) * 3, {"backend": "flex"}, ValueError, ["backend='flex'", "native", "_flash_3_hub", "sage"]),
    (lambda: (x(),) * 3, {"backend": "\ud800"}, ValueError, ["backend='\\ud800'", "native"]),
    (lambda: (x(),) * 3, {"backend": "flash"}, ValueError, ["'flash' cannot run on cpu", "are native, _native_math"]),
    (lambda: (x(),) * 3, {"kv": "whole"}, ValueError, ["kv='whole'", "'sharded'", "'replicated'"]),
    (lambda: (x(),) * 3, {"kv": None}, ValueError, ["kv=None"]),
    (lambda: (x(),) * 3, {"is_causal": np.ones(3)}, ValueError, ["ambiguous"]),
    (lambda: (x(),) * 3, {"seq_lens": (4, 4, 4)}, ValueError, ["seq_lens", "3 lengths", "2 ranks"]),
    (lambda: (x(),) * 3, {"seq_lens": 4}, TypeError, ["seq_lens", "sequence", "int"]),
    (lambda: (x(),) * 3, {"seq_lens": itertools.count()}, TypeError, ["seq_lens", "sequence", "count"]),
    (lambda: (x(),) * 3, {"seq_lens": {4, 5}}, TypeError, ["seq_lens", "sequence", "set"]),
    (lambda: (x(),) * 3, {"seq_lens": {0: 4, 1: 4}}, TypeError, ["seq_lens", "sequence", "dict"]),
    (lambda: (x(),) * 3, {"seq_lens": (4, "4")}, TypeError, ["seq_lens", "str"]),
    (lambda: (x(),) * 3, {"seq_lens": (4, 4.0)}, TypeError, ["seq_lens", "float"]),
    (lambda: (x(s=1),) * 3, {"seq_lens": (True, True)}, TypeError, ["seq_lens", "bool"]),
    (lambda: (x(s=1),) * 3, {"seq_lens": np.ones(2, bool)}, TypeError, ["seq_lens", "bool"]),
    (lambda: (x(),) * 3, {"seq_lens": (2**70, 4)}, ValueError, ["seq_lens"]),
    (lambda: (x(),) * 3, {"seq_lens": (4, 4), "kv_lens": "44"}, TypeError, ["kv_lens", "str"]),
    (lambda: (x(),) * 3, {"kv_lens": (4, 4)}, ValueError, ["kv_lens", "seq_lens"]),
    (lambda: (x(), x(s=2), x(s=2)), {"seq_lens": (4, 4), "kv_lens": (4, 4)}, ValueError, ["kv_lens", "length is 2"]),
    (lambda: (x(),) * 3, {"attn_mask": "mask"}, TypeError, ["attn_mask", "str"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((1, 8), np.int64)}, TypeError, ["attn_mask", "int64", "bool"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((1, 8))}, TypeError, ["attn_mask", "float64", "float32"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((4, 8), bool)}, ValueError, ["attn_mask", "batch axis is 4"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((1, 2, 1, 8), bool)}, ValueError, ["attn_mask", "head axis is 2", "6"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((), bool)}, ValueError, ["attn_mask", "0 dimensions"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((1, 3), bool)}, ValueError, ["attn_mask", "3"]),
    (lambda: (x(),) * 3, {"attn_mask": np.ones((1, 1, 3, 8), bool)}, ValueError, ["attn_mask", "3"]),
    (lambda: (x(),) * 3, {"mask": None}, TypeError, ["unexpected keyword argument 'mask'"]),
    (lambda: (x(),) * 3, {"q": x()}, TypeError, ["multiple values for argument 'q'"]),
]


@pytest.mark.parametrize("make,keywords,error,words", CALLS)
def test_wrong_on_all_ranks(ranks, make, keywords, error, words):
    refused(ranks, lambda r: cp_attn.attention(*make(), ranks.contexts[r], **keywords), error, *words)


@pytest.mark.parametrize("make,keywords,error,words", CALLS[:-4] + CALLS[-2:])
@pytest.mark.parametrize("odd", [0, 1])
def test_wrong_on_one_rank(ranks, make, keywords, error, words, odd):
    """The rank's own exception keeps its words; the others hear of it, whatever they asked for."""

    def call(r):
        if r == odd:
            return cp_attn.attention(*make(), ranks.contexts[r], **keywords)
        return cp_attn.attention(x(), x(), x(), ranks.contexts[r])

    refused(ranks, call, error, *words, odd=odd)


@pytest.mark.parametrize(
    "keywords",
    [{"is_causal": True}, {"scale": 0.5}, {"return_lse": True}, {"kv": "replicated"}, {"backend": "_native_math"}],
)
def test_calls_that_differ(ranks, keywords):
    refused(
        ranks,
        lambda r: cp_attn.attention(x(), x(), x(), ranks.contexts[r], **(keywords if r else {})),
        ValueError,
        "rank 1",
    )


def test_dtypes_that_differ(ranks):
    dtypes = "float32", "float16"
    refused(
        ranks, lambda r: cp_attn.attention(*[x(dtype=dtypes[r])] * 3, ranks.contexts[r]), TypeError, *dtypes, "rank 1"
    )


def test_operations_that_differ(ranks):
    def call(r):
        return ranks.contexts[r].gather(x(), 1) if r else cp_attn.attention(x(), x(), x(), ranks.contexts[r])

    refused(ranks, call, ValueError, "gather", "attention", "rank 1")


def test_uneven_lengths_name_the_way_out(ranks):
    flag = "ring_anything" if ranks.config.ring_degree > 1 else "ulysses_anything"
    refused(ranks, lambda r: cp_attn.attention(*[x(s=4 + r)] * 3, ranks.contexts[r]), ValueError, "4", "5", flag)


def test_promised_lengths(ranks):
    with Ranks(2, ring_degree=2, ring_anything=True) as any_length:
        refused(
            any_length,
            lambda r: cp_attn.attention(*[x(s=4 + r)] * 3, any_length.contexts[r], seq_lens=(4, 4 + r)),
            ValueError,
            "rank",
        )
        calls = any_length.errors(
            lambda r: cp_attn.attention(*[x(s=4 + r)] * 3, any_length.contexts[r], seq_lens=np.array([4, 5]))
        )
        assert calls == [None, None]


@pytest.mark.parametrize("method", ["shard", "gather"])
@pytest.mark.parametrize(
    "arguments,error,words",
    [
        (lambda: (x(), 4), ValueError, ["dim=4", "4 dimensions", "(1, 4, 6, 8)"]),
        (lambda: (x(), -5), ValueError, ["dim=-5"]),
        (lambda: (x(), 2**70), ValueError, ["dim="]),
        (lambda: (x(), 1.0), TypeError, ["dim", "float"]),
        (lambda: (x(), True), TypeError, ["dim", "bool"]),
        (lambda: (x(), np.bool_(True)), TypeError, ["dim", "bool"]),
        (lambda: (x(), np.float64(1)), TypeError, ["dim", "float64"]),
        (lambda: (x(), None), TypeError, ["dim", "NoneType"]),
        (lambda: (x(), np.int64(-5)), ValueError, ["dim=-5", "4 dimensions"]),
        (lambda: (x(), 10**5000), ValueError, ["dim", "4 dimensions"]),
        (lambda: (np.ones(()), 0), ValueError, ["0 dimensions"]),
        (lambda: ("x", 0), TypeError, ["x must be an array", "str"]),
        (lambda: (x(),), TypeError, ["dim"]),
        (lambda: (x(), 1, 2), TypeError, ["positional"]),
        (lambda: (np.zeros((2, 2), "U3"), 0), TypeError, ["<U3"]),
        (lambda: (np.zeros((1,) * 9), 0), ValueError, ["9 dimensions", "8"]),
    ],
)
def test_cuts(ranks, method, arguments, error, words):
    refused(ranks, lambda r: getattr(ranks.contexts[r], method)(*arguments()), error, *words)
    for odd in (0, 1):
        refused(
            ranks,
            lambda r, odd=odd: getattr(ranks.contexts[r], method)(*(arguments() if r == odd else (x(), 0))),
            error,
            odd=odd,
        )


@pytest.mark.parametrize("method", ["shard", "gather"])
def test_cuts_that_differ(ranks, method):
    pairs = [
        ((x(), 0), (x(), 1)),
        ((x(), 0), (x(dtype="float64"), 0)),
        ((x(), 0), (x(D=7), 0)),
        ((x(), 0), (x()[0], 0)),
    ]
    for calls in pairs + ([((x(), 1), (x(s=5), 1))] if method == "shard" else []):
        error = TypeError if calls[0][0].dtype != calls[1][0].dtype else ValueError
        refused(ranks, lambda r, calls=calls: getattr(ranks.contexts[r], method)(*calls[r]), error, "rank 1")


# --- agree ---


def test_agree(ranks):
    assert ranks.run(lambda r: ranks.contexts[r].agree()) == [None, None]
    assert ranks.run(lambda r: ranks.contexts[r].agree(None, "the same")) == [None, None]
    refused(ranks, lambda r: ranks.contexts[r].agree(text=f"text {r}"), ValueError, "rank 1")
    refused(ranks, lambda r: ranks.contexts[r].agree(text=r), TypeError, "text", "int")
    refused(ranks, lambda r: ranks.contexts[r].agree("error"), TypeError, "error", "str")


class OwnKeyError(KeyError):
    pass


# Built-in classes, and those of cp_attn, keep their type on every rank; one that derives from such a class comes as
# that class and is named in the text.
KEPT = [
    *(ArithmeticError, AssertionError, AttributeError, BlockingIOError, BrokenPipeError, BufferError, ConnectionError),
    *(ConnectionRefusedError, DeprecationWarning, EOFError, FileExistsError, FileNotFoundError, FloatingPointError),
    *(FutureWarning, ImportError, IndexError, IsADirectoryError, KeyError, LookupError, MemoryError, NameError),
    *(ModuleNotFoundError, NotImplementedError, OSError, OverflowError, PermissionError, RecursionError),
    *(ReferenceError, RuntimeError, RuntimeWarning, SystemError, TimeoutError, TypeError, UserWarning, ValueError),
    *(ZeroDivisionError, _C.NotSupported, _C.DeviceError, _C.CommError, _C.CommTimeout, _C.InternalError),
]
OTHERS = [
    (OwnKeyError("bad plan"), KeyError, "OwnKeyError"),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad plan"), ValueError, "UnicodeDecodeError"),
    (FileNotFoundError(2, "bad plan", "file"), FileNotFoundError, "Errno 2"),
    (KeyboardInterrupt("bad plan"), RuntimeError, "KeyboardInterrupt"),
    (SystemExit("bad plan"), RuntimeError, "SystemExit"),
    (StopIteration("bad plan"), RuntimeError, "StopIteration"),
    (Exception("bad plan"), RuntimeError, "Exception"),
    (_C.Error("bad plan"), RuntimeError, "Error"),
]


@pytest.mark.parametrize(
    "error,others,word", [(kind("bad plan"), kind, "bad plan") for kind in KEPT] + OTHERS, ids=lambda x: repr(x)[:40]
)
def test_an_error_keeps_its_identity(ranks, error, others, word):
    for odd in (0, 1):
        caught = ranks.errors(lambda r, odd=odd: ranks.contexts[r].agree(error if r == odd else None))
        assert caught[odd] is error
        heard = caught[1 - odd]
        assert type(heard) is others and all(w in str(heard) for w in (f"rank {odd}", "bad plan", word)), heard
        assert (type(error).__name__ in str(heard)) == (others is not type(error)), heard
    both = ranks.errors(lambda r: ranks.contexts[r].agree(ValueError(f"of {r}")))
    assert [str(e) for e in both] == ["of 0", "rank 0: of 0"]


@pytest.mark.parametrize("error", [KeyError("bad plan"), FileNotFoundError("bad plan"), _C.NotSupported("bad plan")])
def test_an_error_of_the_way_to_the_meeting_keeps_its_type(error):
    config = _C.ContextParallelConfig(3)
    with ThreadPoolExecutor(3) as pool:
        key = f"meeting {os.getpid()} {error!r}"
        join = [
            pool.submit(_C.Context, config, rank=r, world=3, key=key, error=error if r == 1 else None) for r in range(3)
        ]
        caught = [future.exception() for future in join]
    assert caught[1] is error
    assert all(type(e) is type(error) and "bad plan" in str(e) for e in caught)
    assert all("rank 1" in str(e) for e in (caught[0], caught[2]))


def test_long_and_odd_texts(ranks):
    for text in ("ü" * 600, "\ud800", "%s%n"):
        caught = ranks.errors(lambda r, text=text: ranks.contexts[r].agree(ValueError(text) if r else None))
        assert [type(e) for e in caught] == [ValueError, ValueError]


# --- classes ---


def test_classes():
    assert issubclass(cp_attn.CommTimeout, (cp_attn.CommError)) and issubclass(cp_attn.CommTimeout, TimeoutError)
    assert issubclass(_C.NotSupported, NotImplementedError)
    for name in ("CommError", "CommTimeout", "DeviceError", "InternalError", "NotSupported"):
        error = getattr(_C, name)
        assert issubclass(error, cp_attn.Error) and error.__module__ == "cp_attn"
        again = error("words")
        assert str(again) == "words" and again.args == ("words",)
    assert str(pickle.loads(pickle.dumps(cp_attn.CommError("words")))) == "words"


# --- the context ---


def test_closed():
    with Ranks(2, ring_degree=2) as ranks:
        context = ranks.contexts[0]
        assert (context.rank, context.world_size, context.ring_rank, context.ulysses_rank) == (0, 2, 0, 0)
        assert context.config is ranks.config and not context.closed and "rank 0 of 2, open" in repr(context)
        with ranks.contexts[1] as other:
            assert other is ranks.contexts[1]
        assert other.closed and "closed" in repr(other)
        other.close()
        for call in (lambda: cp_attn.attention(x(), x(), x(), other), lambda: other.shard(x(), 0), other.agree):
            with pytest.raises(RuntimeError, match="closed"):
                call()
        with pytest.raises(cp_attn.CommError, match="rank 1"):
            cp_attn.attention(x(), x(), x(), context)
        with pytest.raises(cp_attn.CommError, match="broken"):
            context.gather(x(), 1)


def test_construction():
    config = _C.ContextParallelConfig(2, 3)
    for keywords in (dict(rank=0, world=2), dict(rank=6, world=6), dict(rank=-1, world=6)):
        with pytest.raises(ValueError, match="ring_degree=2, ulysses_degree=3"):
            _C.Context(config, key="k", **keywords)
    with pytest.raises(TypeError):
        _C.Context("config", rank=0, world=6, key="k")
    with pytest.raises(TypeError):
        type("Child", (_C.Context,), {})
    with pytest.raises(TypeError, match="context_or_config"):
        cp_attn.attention(x(), x(), x())
    with pytest.raises(TypeError, match="str"):
        cp_attn.attention(x(), x(), x(), "context")


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, copy.deepcopy, lambda c: copy.deepcopy({"model": [c]})])
def test_a_context_is_not_copied(ranks, copy_of):
    for context in ranks.contexts:
        with pytest.raises(TypeError) as caught:
            copy_of(context)
        assert all(word in str(caught.value) for word in ("Context", "disable_parallelism", "cp_attn.init", "process"))


def test_ranks_of_unified_contexts():
    with Ranks(4, ring_degree=2, ulysses_degree=2) as ranks:
        assert [(c.ring_rank, c.ulysses_rank) for c in ranks.contexts] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_one_thread_at_a_time():
    """The GIL is free while a rank waits, and nobody else gets into its context or closes it."""
    with Ranks(2, ring_degree=2, timeout=3.0) as ranks:
        context, caught = ranks.contexts[0], []

        def wait():
            try:
                cp_attn.attention(x(), x(), x(), context)
            except cp_attn.CommTimeout as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.5)
        for call in (context.agree, context.close, lambda: cp_attn.attention(x(), x(), x(), context)):
            with pytest.raises(RuntimeError, match="busy"):
                call()
        waiting.join()
        assert "rank 1" in str(caught[0]) and "attention" in str(caught[0])


class CallsInside:
    """An array whose export makes a call of its own."""

    def __init__(self, array, call):
        self.array, self.call = array, call

    def __dlpack__(self, **keywords):
        self.call()
        return self.array.__dlpack__(**keywords)


@pytest.mark.parametrize("inner", ["close", "agree", "attention", "gather", "_memory", "collect"])
@pytest.mark.parametrize("outer", ["attention", "mask", "gather", "shard"])
def test_a_call_inside_a_call(ranks, inner, outer):
    """A producer's Python code may do anything; a call on the same context is told so at once, on all ranks."""

    def call(r):
        context = ranks.contexts[r]
        inside = {
            "attention": lambda: cp_attn.attention(x(), x(), x(), context),
            "gather": lambda: context.gather(x(), 1),
            "collect": gc.collect,
        }.get(inner) or getattr(context, inner)
        given = np.ones((1, 8), np.float32) if outer == "mask" else x()
        given = CallsInside(given, inside) if r else given
        if outer == "attention":
            return cp_attn.attention(x(), given, x(), context)
        if outer == "mask":
            return cp_attn.attention(x(), x(), x(), context, attn_mask=given)
        return getattr(context, outer)(given, 1)

    if inner == "collect":
        ranks.run(call)
    else:
        refused(ranks, call, RuntimeError, "busy", odd=1)


@contextlib.contextmanager
def counting():
    """Let a thread count meanwhile, and demand that it was never held up."""
    over, late = threading.Event(), []

    def count():
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.002)
            late.append(time.monotonic() - last)
            last = time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(count)
        try:
            yield
        finally:
            over.set()
            counted.result()
    assert len(late) > 20 and max(late) < 0.5, (len(late), max(late))


def test_other_threads_go_on_while_a_rank_waits():
    """For the others to come, in calls of every kind; and for nobody, where a context is closed or collected."""
    config, key = _C.ContextParallelConfig(2, timeout=20.0), f"waits {os.getpid()}"
    with ThreadPoolExecutor(1) as pool, counting():
        first = pool.submit(_C.Context, config, rank=0, world=2, key=key)
        time.sleep(0.3)
        contexts = [_C.Context(config, rank=1, world=2, key=key), first.result()]
        for call in (
            lambda c: cp_attn.attention(x(), x(), x(), c),
            lambda c: c.gather(x(), 1),
            lambda c: c.shard(x(), 1),
            lambda c: c.agree(),
        ):
            waits = pool.submit(call, contexts[1])
            time.sleep(0.2)
            assert not waits.done()
            call(contexts[0])
            waits.result()
        waits = pool.submit(cp_attn.attention, x(), x(), x(), contexts[1])
        time.sleep(0.2)
        start = time.monotonic()
        contexts[0] = None  # nobody else has it: it is collected while its peer is in a call
        assert time.monotonic() - start < 0.5
        assert "rank 1 is gone" in str(waits.exception()) and isinstance(waits.exception(), cp_attn.CommError)


def test_a_broken_context_is_collected():
    with Ranks(2, ring_degree=2) as ranks:
        live = _C._mem_stats()[0]
        key = f"collected {os.getpid()}"
        made = ranks.run(lambda r: _C.Context(ranks.config, rank=r, world=2, key=key))
        assert _C._mem_stats()[0] > live
        del made
        assert _C._mem_stats()[0] == live


def leftovers():
    """Return the open descriptors of this process, its mappings of what ranks share, and the core's blocks."""
    holds = footprint()
    return [holds[name] for name in ("descriptors", "windows", "blocks")]


def listeners():
    """Return the names under which ranks of this process can be met."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the list itself
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/net/unix") as sockets:
        rows = [line.split() for line in sockets if "@cp_attn-" in line]
    return {row[-1] for row in rows if f"socket:[{row[6]}]" in own}


def test_contexts_leave_nothing():
    """Closed, dropped, broken, or never met: no descriptor, no mapping, no name."""
    before = leftovers()

    def wrong(ranks):
        ranks.errors(lambda r: None if r else cp_attn.attention(x(), x(), x(), ranks.contexts[r]))

    def right(ranks):
        ranks.attention(*[[x(H=12)] * ranks.world] * 3)

    for world in (2, 3, 4):
        for use in (right, wrong, lambda ranks: ranks.contexts.clear()):
            with Ranks(world, ring_degree=world, timeout=0.1) as ranks:
                assert leftovers() != before
                use(ranks)
        with ThreadPoolExecutor(world) as pool:
            config, key = _C.ContextParallelConfig(world), f"leftovers {os.getpid()} {world}"
            errors = [ValueError("own") if r else None for r in range(world)]
            for r, error in enumerate(errors):
                pool.submit(_C.Context, config, rank=r, world=world, key=key, error=error)
    assert leftovers() == before


# --- memory ---


def test_refused_calls_keep_nothing(ranks):
    call = CALLS[2][0]
    run = lambda r: cp_attn.attention(*call(), ranks.contexts[r])  # noqa: E731
    ranks.errors(run)
    live = _C._mem_stats()[0]
    for _ in range(200):
        ranks.errors(run)
    assert _C._mem_stats()[0] == live


def test_every_allocation_may_fail():
    """The k-th allocation of a context's first calls fails: a MemoryError where it was, no block left anywhere."""
    start = _C._mem_stats()[0]

    def calls(context):
        out = cp_attn.attention(x(), x(), x(), context)
        context.gather(Foreign(out), 1)
        context.gather(out[..., ::2].transpose(), 1)  # axes that do not merge: needs a copy
        context.shard(out, 1)

    for k in range(1000):
        with Ranks(2, ring_degree=2, timeout=10.0) as ranks:
            _C._mem_fail_after(k)
            try:
                caught = [type(e) for e in ranks.errors(lambda r, ranks=ranks: calls(ranks.contexts[r]))]
            finally:
                _C._mem_fail_after(-1)
        assert _C._mem_stats()[0] == start, k
        if caught == [type(None)] * 2:
            break
        assert caught == [MemoryError] * 2, (k, caught)
    assert k > 5


class Foreign:
    """An array of a library that cannot allocate: answers to it are in memory of our own."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)


@pytest.mark.parametrize("world", [2, 3])
def test_a_gather_without_memory_for_its_output(world):
    """Its size is everybody's, so it can only be allocated once all are there; all raise, and all go on."""
    rng = np.random.default_rng(21)
    with Ranks(world, ring_degree=world, timeout=20.0) as ranks:
        for round in range(30):
            dim, dtype = rng.integers(3), rng.choice(["float32", "uint8", "complex128"])
            shape, lengths = [int(n) for n in rng.integers(1, 5, 3)], rng.integers(0, 5, world)
            parts = []
            for n in lengths:
                shape[dim] = n
                parts.append(Foreign(rng.integers(0, 99, shape).astype(dtype)))
            want = np.concatenate([part.array for part in parts], dim)

            def call(r, parts=parts, dim=dim):
                return ranks.contexts[r].gather(parts[r], dim)

            live = None
            for fails in (0, 1, None):
                if fails is not None:
                    if round % 2:  # a signature that is known: nothing else is allocated
                        ranks.run(call)
                    live = _C._mem_stats()[0] if live is None else live
                    _C._mem_fail_after(fails if round % 2 else world * 4 + fails)
                try:
                    caught = ranks.errors(call)
                finally:
                    _C._mem_fail_after(-1)
                if fails is None or caught == [None] * world:
                    assert caught == [None] * world
                    continue
                assert [type(e) for e in caught] == [MemoryError] * world, caught
                assert sum("rank" in str(e) for e in caught) >= world - 1 and "bytes" in str(caught[0])
            assert all(np.array_equal(np.from_dlpack(whole), want) for whole in ranks.run(call))


# --- programs of right and wrong calls ---


class Raises:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **keywords):
        raise self.error


# What is given in the place of an array, and what all ranks get for it.
WRONG = [
    (lambda x: Raises(KeyError("own")), KeyError),
    (lambda x: Raises(ZeroDivisionError("own")), ZeroDivisionError),
    (lambda x: Raises(FileNotFoundError(2, "own")), FileNotFoundError),
    (lambda x: Raises(_C.NotSupported("own")), _C.NotSupported),
    (lambda x: Raises(OwnKeyError("own")), KeyError),
    (lambda x: np.ma.masked_array(x), TypeError),
    (lambda x: x.astype("M8[s]"), TypeError),
    (lambda x: x[..., None, None, None, None, None], ValueError),
    (lambda x: "array", TypeError),
]


def step(ranks, rng):
    """Make a random call, right or wrong on some ranks, and check what becomes of it."""
    world = ranks.world
    operation, place = rng.choice(["attention", "shard", "gather"]), 0
    lengths, H = rng.integers(0, 5, world), int(rng.integers(1, 4))
    whole = [rng.standard_normal((2, lengths.sum(), H, 4)) for _ in range(3)]
    parts = [whole] * world if operation == "shard" else [*zip(*(cut(x, lengths) for x in whole), strict=True)]
    if operation == "attention":
        place = rng.integers(3)
    odd = rng.choice(world, rng.integers(1, world + 1), replace=False).tolist() if rng.random() < 0.6 else []
    wrong, error = WRONG[rng.integers(len(WRONG))]
    is_causal, foreign = bool(rng.integers(2)), rng.random() < 0.3

    def call(r):
        arrays = [Foreign(x) for x in parts[r]] if foreign and not odd else list(parts[r])
        if r in odd:
            arrays[place] = wrong(arrays[place])
        if operation == "attention":
            return cp_attn.attention(*arrays, ranks.contexts[r], is_causal=is_causal)
        return getattr(ranks.contexts[r], operation)(arrays[0], 1)

    if odd:
        for r, caught in enumerate(ranks.errors(call)):
            assert isinstance(caught, error) if r in odd else type(caught) is error, (r, odd, repr(caught))
            assert r in odd or f"rank {min(odd)}: " in str(caught), (r, odd, caught)
        return
    if operation == "attention":
        want = cut(oracle(*whole, is_causal=is_causal)[0], lengths)
    else:
        want = np.array_split(whole[0], world, 1) if operation == "shard" else [whole[0]] * world
    for got, expected in zip(ranks.run(call), want, strict=True):
        np.testing.assert_allclose(np.from_dlpack(got), expected, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_programs(world, kind):
    """Whatever came before: a right call gives the right answer, a wrong one the same error to all."""
    rng = np.random.default_rng(world)
    with Ranks(world, timeout=20.0, **{f"{kind}_degree": world, f"{kind}_anything": True}) as ranks:
        for _ in range(200):
            step(ranks, rng)


# --- strangers ---

# Connects to all names, says something, and tells what it got; as another user where it is told so.
STRANGER = """
import json, os, socket, sys, time
names, user = json.loads(sys.argv[1]), int(sys.argv[2])
if user:
    os.setresuid(user, user, user)
tries, got = 0, []
for name in names:
    for said in (b"", b"x", b"cp_attn" * 200):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.connect("\\0" + name)
        s.settimeout(0.1)
        tries += 1
        try:
            s.send(said)
            data, descriptors, _, _ = socket.recv_fds(s, 4096, 8)
            got += [data] * bool(data) + descriptors
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
print(tries, got)
"""


@pytest.mark.parametrize("user", ["the same", "another"])
def test_strangers_get_nothing_and_disturb_nobody(user):
    """Processes that connect where ranks meet: before all are there, and while they compute."""
    number = 65534 * (user == "another")
    if number and os.geteuid():
        pytest.skip("only root can play another user")

    def stranger(names):
        names = json.dumps([name[1:] for name in names])
        command = [sys.executable, "-c", STRANGER, names, str(number)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")

    before, key = listeners(), f"strangers {os.getpid()} {user}"
    config = _C.ContextParallelConfig(3, timeout=20.0)
    with ThreadPoolExecutor(3) as pool:
        join = [pool.submit(_C.Context, config, rank=r, world=3, key=key) for r in range(2)]
        while len(listeners() - before) < 2:
            time.sleep(0.01)
        early = stranger(listeners() - before)
        assert early.communicate(timeout=30)[0] == "6 []\n"
        assert not any(future.done() for future in join)
        start = time.monotonic()
        join.append(pool.submit(_C.Context, config, rank=2, world=3, key=key))
        contexts = [future.result() for future in join]
        assert time.monotonic() - start < 2
        late = stranger(listeners() - before)
        while late.poll() is None:
            for out in pool.map(lambda c: cp_attn.attention(x(), x(), x(), c), contexts):
                assert (out == 1).all()
        assert late.communicate()[0] == "9 []\n"
        for context in contexts:
            context.close()


def test_a_place_that_is_taken():
    """By a process of an earlier run, or by a second one of the same rank: said at once, to it alone."""
    with Ranks(2, ring_degree=2) as ranks:
        key = f"taken {os.getpid()}"
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda r: _C.Context(ranks.config, rank=r, world=2, key=key), range(2)))
        for rank in (0, 1):
            start = time.monotonic()
            with pytest.raises(cp_attn.CommError, match=f"rank {rank} of 2 is already taken"):
                _C.Context(ranks.config, rank=rank, world=2, key=key)
            assert time.monotonic() - start < 2
        with ThreadPoolExecutor(2) as pool:
            assert all((out == 1).all() for out in pool.map(lambda c: cp_attn.attention(x(), x(), x(), c), made))


# --- processes: signals, forks, ends ---


def test_processes():
    ranks = launch("test_errors.py", 2, "own", timeout=120)
    for rank in ranks:
        assert rank.code == 0, rank.err
        assert rank.line(forked=[0, 0, 0])
        assert [line["short"] for line in rank.lines if "short" in line] == ["of memory"]
    assert ranks[0].line(interrupted=True)
    assert "rank 0" in ranks[1].line(other=True)["text"]


# how a rank ends: (what it does, its exit code)
ENDS = {
    "exit": (lambda context: sys.exit(5), 5),
    "exit after two closes": (lambda context: (context.close(), context.close(), sys.exit(4)), 4),
    "exception": (lambda context: 1 / 0, 1),
    "exit at once": (lambda context: os._exit(7), 7),
    "killed": (lambda context: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "terminated": (lambda context: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    "exit with a thread in a call": (lambda context: sys.exit(6), 6),
}


@pytest.mark.parametrize("end, world", [(end, 3) for end in ENDS] + [("killed", 2), ("exit", 4), ("exception", 6)])
def test_ends(end, world):
    """Without close: its exit code stays its own, and those that wait for it hear of its end within a second.

    Before that, a ring is the first thing that these processes do together.
    """
    ranks = launch("test_errors.py", world, "ends", end, timeout=60)
    assert ranks[-1].code == ENDS[end][1], ranks[-1].err
    ended = ranks[-1].line(ends=True)["at"]
    for rank in ranks[:-1]:
        assert rank.code == 0, rank.err
        line = rank.line(error="CommError")
        assert f"rank {world - 1} is gone" in line["text"] and "attention, call " in line["text"], line
        assert "broken" in line["again"] and f"rank {world - 1} is gone" in line["again"], line
        assert line["at"] - ended < 1.5, line["at"] - ended


def ends(context, end):
    cp_attn.attention(x(), x(), x(), context)
    has_thread = end == "exit with a thread in a call"
    if context.rank == context.world_size - 1:
        if has_thread:
            threading.Thread(target=cp_attn.attention, args=(x(), x(), x(), context), daemon=True).start()
        time.sleep(0.3)
        say(ends=True, at=time.time())
        ENDS[end][0](context)
    if has_thread:
        time.sleep(0.6)  # it is still waiting when its process ends
    try:
        cp_attn.attention(x(), x(), x(), context)
    except cp_attn.CommError as error:
        at = time.time()
        with pytest.raises(cp_attn.CommError) as again:
            context.gather(x(), 1)
        say(error=type(error).__name__, text=str(error), again=str(again.value), at=at)
    context.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", ["init", "attention", "gather"])
def test_signals_while_waiting(where, number):
    """One of two ranks waits for the other, who does not come: a signal does what it always does, within a second."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "waits", where],
            env=rank_environ(r, 2, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(1 if where == "init" else 2)
    ]
    try:
        assert "ready" in ranks[0].stdout.readline()
        time.sleep(0.5)
        ranks[0].send_signal(number)
        start = time.monotonic()
        out, err = ranks[0].communicate(timeout=20)
        assert time.monotonic() - start < 1.5
        if number == signal.SIGINT:
            assert ranks[0].returncode == 0 and json.loads(out) == {"interrupted": where}, out + err
        else:
            assert ranks[0].returncode == -signal.SIGTERM, err
        if where != "init":
            out, err = ranks[1].communicate("go\n", timeout=20)
            assert ranks[1].returncode == 0 and "rank 0" in json.loads(out.splitlines()[-1])["heard"], out + err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def waits(where):
    """Rank 0 waits for rank 1, who does nothing until it is told to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may hand on that it is ignored
    config = cp_attn.ContextParallelConfig(ring_degree=2, timeout=60.0)
    call = {
        "init": lambda context: cp_attn.init(config),
        "attention": lambda context: cp_attn.attention(x(), x(), x(), context),
        "gather": lambda context: context.gather(x(), 1),
    }[where]
    context = None if where == "init" else cp_attn.init(config)
    say(ready=True)
    if context is not None and context.rank == 1:
        sys.stdin.readline()
        try:
            call(context)
        except cp_attn.CommError as error:
            say(heard=str(error))
        return
    try:
        call(context)
    except KeyboardInterrupt:
        say(interrupted=where)


def main(what, *args):
    if what == "waits":
        return waits(*args)
    world = int(os.environ["WORLD_SIZE"])
    context = cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=world, timeout=60.0))
    return ends(context, *args) if what == "ends" else own(context)


def own(context):
    cp_attn.attention(x(), x(), x(), context)
    codes = []
    for leave in (os._exit, sys.exit):  # at once, and with all that Python does at its end
        child = os.fork()
        if child == 0:
            try:
                cp_attn.attention(x(), x(), x(), context)
            except RuntimeError as error:
                leave(0 if "fork" in str(error) else 1)
            leave(2)
        codes.append(os.waitpid(child, 0)[1])
        cp_attn.attention(x(), x(), x(), context)
    worker = multiprocessing.get_context("fork").Process(target=context.close)
    worker.start()
    worker.join()
    say(forked=[*codes, worker.exitcode])
    cp_attn.attention(x(), x(), x(), context)
    short_of_memory(context)
    if context.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            cp_attn.attention(x(), x(), x(), context)
        except KeyboardInterrupt:
            say(interrupted=time.monotonic() - start < 3)
    else:
        time.sleep(2)
        try:
            cp_attn.attention(x(), x(), x(), context)
        except cp_attn.CommError as error:
            say(other=True, text=str(error))


def short_of_memory(context):
    """Rank 1 may not have what the whole takes, NumPy's and torch's."""
    part = np.full((48 << 20) // 4, context.rank, np.float32)
    kinds = [part]
    try:
        import torch

        kinds.append(torch.from_numpy(part))
    except ImportError:
        pass
    for x in kinds:
        for is_known in (False, True):
            limits = resource.getrlimit(resource.RLIMIT_AS)
            if context.rank == 1:
                pages = int(open("/proc/self/statm").read().split()[0])
                # The window takes pages, not addresses: it has reserved them.
                resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), limits[1]))
            try:
                context.gather(x, 0)
                say(short=f"{type(x)}: it fitted")
            except MemoryError as error:
                assert ("rank 1" in str(error)) == (context.rank == 0), error
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limits)
            whole = context.gather(x, 0)
            assert [int(whole[0]), int(whole[-1]), len(whole)] == [0, 1, 2 * len(x)], is_known
    say(short="of memory")


def test_no_sub_interpreters():
    code = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as i
    me = i.create()
    result = i.exec(me, "import cp_attn._C")
    sys.exit(0 if result is not None and "ImportError" in result.formatted else 1)
import _xxsubinterpreters as i
try:
    i.run_string(i.create(), "import cp_attn._C")
except i.RunFailedError as e:
    sys.exit(0 if "ImportError" in str(e) else 1)
sys.exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
