"""What calls take beyond inputs and outputs: no more than the formulas of benchmarks/memory.py, nor more each time."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import clean_environ
from thread_ranks import Ranks, cut, oracle

ROOT = Path(__file__).parents[2]
TOKENS, HEADS, DIM = 384, 96, 128
MIB = 2**20


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The benchmark's table: {(variant, ranks, direction): row}; it must find nothing wrong itself."""
    file = tmp_path_factory.mktemp("memory") / "rows.json"
    runs = [f"--run={run}" for run in ("ring:2", "ring:4", "ulysses:4", "unified_anything:4", "replicated:2")]
    size = ["--shape", f"{TOKENS}x{HEADS}x{DIM}", "--small-calls", "1000"]
    command = [sys.executable, "-m", "benchmarks.memory", *runs, *size, "--check", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["variant"], row["world"], row["direction"]): row for row in found}


# What the ratios are, rounded up: well below 1.2 something may double unseen.
RATIOS = {
    ("ring", "forward"): 0.5,
    ("ring", "backward"): 0.9,
    ("ulysses", "forward"): 0.7,
    ("ulysses", "backward"): 1.2,
    ("unified_anything", "forward"): 0.75,
    ("unified_anything", "backward"): 1.15,
    ("replicated", "forward"): 1.1,
    ("replicated", "backward"): 1.1,
}


def test_ratios(rows):
    assert len(rows) == 10
    for (variant, world, direction), row in rows.items():
        assert 0.3 < row["ratio"] <= RATIOS[variant, direction], (variant, world, direction, row)
        assert row["c15"] is None or row["c15"] <= 0.7, row


def test_the_system_and_the_library_count_alike(rows):
    for key, row in rows.items():
        assert abs(row["extra"] - row["counted"]) < MIB, (key, row)
        assert row["blocks"] == 0, (key, row)


def test_small_calls_add_nothing(rows):
    for key, row in rows.items():
        assert abs(row["growth"]) < MIB // 4, (key, row)


def test_formulas(rows):
    """By hand, for equal shares: a block of k and v, a state, rows of q, in bytes."""
    for world in (2, 4):
        own = TOKENS // world * HEADS * DIM * 4
        state = TOKENS // world * HEADS * (DIM + 2) * 4
        assert rows["ring", world, "forward"]["formula"] == 3 * 2 * own + state
        assert rows["ring", world, "backward"]["formula"] == 3 * own + 2 * 2 * own + 4 * own
    # A rank of four computes a quarter of the heads, for all rows.
    assert rows["ulysses", 4, "forward"]["formula"] == 2 * 4 * own
    assert rows["ulysses", 4, "backward"]["formula"] == 3 * own + 2 * 2 * own // 4 + 4 * own
    for row in rows.values():
        terms = (product.split("*") for product in row["arithmetic"].split(" + "))
        assert row["formula"] == sum(np.prod([int(factor) for factor in term]) for term in terms)


def test_memory_falls_as_ranks_grow(rows):
    for direction in ("forward", "backward"):
        two, four = (rows["ring", world, direction]["extra"] for world in (2, 4))
        assert 1.9 < two / four < 2.1, direction


def test_a_context_holds_what_its_largest_call_needs():
    rng = np.random.default_rng(0)
    with Ranks(2, ring_degree=2) as ranks:
        assert ranks.run(lambda r: ranks.contexts[r]._memory()) == [(0, 0)] * 2
        held = []
        for tokens in (64, 256, 64):
            x = cut(rng.standard_normal((1, tokens, 2, 16), dtype="float32"), [tokens // 2] * 2)
            ranks.attention(x, x, x)
            held.append(ranks.contexts[0]._memory())
        assert 0 < held[0][0] < held[1][0] and 0 < held[0][1] < held[1][1] and held[2] == held[1]
        context = ranks.contexts[0]
    with pytest.raises(RuntimeError, match="closed"):
        context._memory()


@pytest.mark.parametrize("is_causal, lengths", [(False, [30, 5]), (True, [2050, 20])])
def test_replicated_keys_are_taken_in_pieces(is_causal, lengths):
    """More keys than are packed at a time, some of them hidden by a mask that crosses the pieces."""
    rng = np.random.default_rng(1)
    keys = 5000
    q = rng.standard_normal((1, sum(lengths), 2, 8), dtype="float32")
    k, v = rng.standard_normal((2, 1, keys, 1, 8), dtype="float32")
    mask = rng.random((1, 1, 1, keys)) < 0.5
    wanted, wanted_lse = oracle(q, k, v, mask, is_causal)
    with Ranks(2, ring_degree=2, ring_anything=True) as ranks:
        answers = ranks.attention(
            cut(q, lengths),
            [k] * 2,
            [v] * 2,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=True,
            kv="replicated",
            return_lse=True,
        )
    np.testing.assert_allclose(np.concatenate([out for out, _ in answers], 1), wanted, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([lse for _, lse in answers], 1), wanted_lse, atol=1e-5)
