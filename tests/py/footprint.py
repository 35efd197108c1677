"""What a process holds of the system, so that a test can see that it holds no more later."""

import gc
import os
import sys
from pathlib import Path

from cp_attn import _C

# What Python, torch and the allocator move by, in as many calls as the tests make; threads may be on their way out.
NOISE = {"memory": 1 << 20, "objects": 400, "threads": 4}


def footprint():
    """Return what this process holds now."""
    gc.collect()
    memory = Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1]
    return {
        "memory": int(memory.split()[0]) << 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "windows": Path("/proc/self/maps").read_text().count("/memfd:cp_attn"),
        "objects": sys.getallocatedblocks(),
        "blocks": _C._mem_stats()[0],
    }


def grown(before, after):
    """Return what `after` has more of than `before`."""
    return {name: (old, after[name]) for name, old in before.items() if after[name] > old + NOISE.get(name, 0)}


def names():
    """Return the names that only a leftover or a live context has, on the whole machine: files, sockets that listen."""
    files = {p.name for p in Path("/dev/shm").iterdir() if "cp" in p.name.lower() and "attn" in p.name.lower()}
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    return files | {name for name in sockets if "cp_attn" in name}
