"""Threads of a rank: how many, that they compute the same, and that they end."""

import functools

import pytest
from launch import launch

from cp_attn import _threads


@pytest.mark.parametrize(
    "environ, local_ranks, torch_threads, cores, expected",
    [
        ({}, 2, 0, 8, 4),  # nobody has asked: the cores are shared out
        ({}, 2, 8, 8, 4),  # torch's default is a thread for each core, on every rank
        ({}, 2, 3, 8, 3),
        ({}, 16, 0, 8, 1),
        ({}, 0, 0, 8, 8),
        ({"OMP_NUM_THREADS": "6"}, 2, 0, 8, 6),
        ({"OMP_NUM_THREADS": "6"}, 2, 5, 8, 5),  # torch.set_num_threads(5) came later
        ({"OMP_NUM_THREADS": " 6,2"}, 2, 0, 8, 6),
        ({"OMP_NUM_THREADS": "many"}, 2, 0, 8, 4),
        ({"OMP_NUM_THREADS": "0"}, 2, 0, 8, 4),
        ({"OMP_NUM_THREADS": "999999"}, 2, 0, 8, _threads.MOST),
        ({"OMP_NUM_THREADS": "6", "CP_ATTN_THREADS": "3"}, 2, 5, 8, 3),
        ({"CP_ATTN_THREADS": ""}, 2, 0, 8, 4),
    ],
)
def test_number(environ, local_ranks, torch_threads, cores, expected):
    assert _threads.count(local_ranks, environ, torch_threads, cores) == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "1025", "99999", "1.5"])
def test_wrong_number(value):
    with pytest.raises(ValueError, match=f"CP_ATTN_THREADS is {value!r}; a number of threads from 1 to 1,024"):
        _threads.count(2, {"CP_ATTN_THREADS": value}, 0, 8)


@functools.cache
def ranks(case, threads):
    found = launch("ranks_threads.py", 2, case, CP_ATTN_THREADS=threads)
    return [rank.line(case=case) for rank in found]


@pytest.mark.parametrize("case", ["ring", "ulysses"])
def test_exact(case):
    """As exact as torch in one piece, forward and backward; forward the same bits with any number of threads."""
    alone = ranks(case, "1")
    for threads in ("2", "3"):
        for line, one in zip(ranks(case, threads), alone, strict=True):
            assert line["threads"] == int(threads)
            assert line["worst"] < 3.0, line
            assert line["sums"] == one["sums"]


def test_threads_start_with_the_first_call_and_end_with_the_context():
    for line, one in zip(ranks("ring", "3"), ranks("ring", "1"), strict=True):
        assert line["running"] == one["running"] + 2
        assert line["made_early"] == one["made_early"]
        assert line["left"] == one["left"]


def test_wrong_number_on_one_rank():
    """All ranks hear of it."""
    found = launch(
        "ranks_threads.py", 2, "ring", where=lambda rank: ["env", "CP_ATTN_THREADS=" + ("none" if rank else "1")]
    )
    for rank in found:
        assert "CP_ATTN_THREADS is 'none'" in rank.err
