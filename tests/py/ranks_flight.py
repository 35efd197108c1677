"""One rank: scenes in which ranks are late or stopped while others wait. Prints a JSON line for each."""

import os
import signal
import sys
import time

import numpy as np
from launch import say

import cp_attn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def attend(context, rows=64):
    x = np.random.default_rng(RANK).standard_normal((1, rows, WORLD, 16)).astype(np.float32)
    return cp_attn.attention(x, x, x, context)


def pids(context):
    """Return every rank's process id."""
    return context.gather(np.array([os.getpid()]), dim=0).tolist()


def wait_for_state(pid, letter):
    while open(f"/proc/{pid}/stat").read().rpartition(") ")[2][0] != letter:
        time.sleep(0.01)


def error_of(call, *arguments):
    try:
        call(*arguments)
    except cp_attn.CommError as e:
        return type(e).__name__, str(e)
    return None, None


def late(context):
    """The last rank sleeps outside; all others wait for it."""
    attend(context)
    if RANK == WORLD - 1:
        time.sleep(2.0)
    return error_of(attend, context)


def stopped_outside(context):
    """Rank 1 is stopped by the system between two calls."""
    everybody = pids(context)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return error_of(attend, context)
    result = error_of(attend, context)
    if RANK == 0:
        os.kill(everybody[1], signal.SIGCONT)
    return result


def stopped_inside(context):
    """Rank 1 waits in a call for the last rank, and is stopped there; the last rank never comes."""
    everybody = pids(context)
    if RANK == WORLD - 1:
        time.sleep(2.5)
    elif RANK == 0:
        wait_for_state(everybody[1], "S")
        time.sleep(0.3)
        os.kill(everybody[1], signal.SIGSTOP)
    result = error_of(attend, context)
    if RANK == 0:
        os.kill(everybody[1], signal.SIGCONT)
    return result


def traced(context):
    for rows in (64, 64, 200):
        attend(context, rows)
    pids(context)
    return None, None


def main(names):
    for name in names:
        with cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=WORLD, timeout=1.0)) as context:
            kind, text = globals()[name](context)
            if name != "traced":
                context.close()
        say(scene=name, kind=kind, text=text, pid=os.getpid(), failed=None)


if __name__ == "__main__":
    main(sys.argv[1:])
