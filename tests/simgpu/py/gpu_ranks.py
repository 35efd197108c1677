"""Ranks on simulated GPUs, for tests."""

import contextlib
import gc
import os
import time

import sim_gpu as sim
from thread_ranks import Ranks

GPUS = 6


def world_of(config):
    return config.get("ring_degree", 1) * config.get("ulysses_degree", 1)


@contextlib.contextmanager
def open_gpus(transport="nccl"):
    """Yield what starts ranks of a config, on a GPU each; nothing is left on the GPUs behind them."""
    os.environ["CP_ATTN_TRANSPORT"] = transport
    sim.LIB.simgpu_reset()
    sim.LIB.simgpu_set_device_count(GPUS)
    opened = []
    sim.Fast.streams = [sim.Stream(device) for device in range(GPUS)]

    def start(**config):
        opened.append(Ranks(world_of(config), **config))
        return opened[-1]

    yield start
    for ranks in opened:
        ranks.close()
    gc.collect()
    for stream in sim.Fast.streams:
        stream.wait()
        stream.close()
    sim.Fast.streams = {}
    live = sim.LIB.simgpu_live()
    end = time.monotonic() + 5
    while live.comms + live.events + live.blocks > 0 and time.monotonic() < end:  # what graphs held goes after them
        time.sleep(0.001)
        live = sim.LIB.simgpu_live()
    assert (live.blocks, live.streams, live.events, live.comms) == (0, 0, 0, 0)
    assert (live.mappings, live.graphs) == (0, 0)
    assert sim.LIB.simgpu_violations() == 0
    sim.LIB.simgpu_reset()  # the work may have been dry
    del os.environ["CP_ATTN_TRANSPORT"]
