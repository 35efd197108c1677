"""Thousands of calls and of contexts leave a process as it was, and contexts side by side do not mix.

The scenes are those of ranks_long.py; here are those whose ranks are threads.
"""

import functools
import time

import numpy as np
import pytest
from footprint import footprint, grown, names
from launch import launch, lines
from thread_ranks import Ranks

pytest.importorskip("diffusers")

SCENES = {
    2: ("calls_ring", "calls_ulysses", "many_contexts", "alternately", "in_threads", "models"),
    3: ("calls_ring", "calls_ulysses", "many_contexts"),
}
FEW = 50  # names of contexts that other programs may have at the moment; a thousand would show


@functools.cache
def ranks(world):
    known = names()
    started = launch("ranks_long.py", world, *SCENES[world], timeout=240)
    assert_nothing_left(known)
    return started


def assert_nothing_left(known):
    """Wait a little: what has just been closed may still have its name."""
    deadline = time.monotonic() + 3
    while len(left := names() - known) > FEW and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(left) <= FEW, (len(left), sorted(left)[:5])


@pytest.mark.parametrize("world, scene", [(world, scene) for world, names in SCENES.items() for scene in names])
def test_scene(world, scene):
    assert len(list(lines(ranks(world), scene=scene))) == world


@pytest.mark.parametrize("world, config", [(2, dict(ring_degree=2)), (3, dict(ulysses_degree=3))])
def test_many_contexts_of_threads(world, config):
    known, x = names(), np.ones((1, 2, 3, 4))
    for number in range(1000):
        if number == 200:
            before = footprint()
        with Ranks(world, **config) as ranks:
            assert all((out == 1).all() for out in ranks.attention([x] * world, [x] * world, [x] * world))
    assert not grown(before, footprint()), grown(before, footprint())
    assert_nothing_left(known)
