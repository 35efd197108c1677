"""One rank of a soak scene: calls with answers to check, and what it does to itself on the way. Prints JSON lines."""

import json
import os
import signal
import sys
import threading
import time

import numpy as np
from launch import say
from thread_ranks import oracle

import cp_attn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class WrongAnswer(Exception):
    """An answer that is not the right one."""


def lengths(rng, anything):
    """Return the rows of every rank; in the uneven variants some have none."""
    if not anything:
        return [int(rng.integers(1, 40))] * WORLD
    rows = [int(n) for n in rng.integers(0, 40, WORLD)]
    return rows if any(rows) else [1] * WORLD


def check(got, want):
    if got.shape != want.shape or not np.allclose(got, want, rtol=0, atol=1e-9):
        raise WrongAnswer(f"{got.shape} for {want.shape}, off by {np.abs(got - want).max() if got.size else 0}")


def one_call(context, scene, number):
    """Do what all ranks do in this call, but for a rank that misleads the others."""
    rng = np.random.default_rng([scene["seed"], number])
    rows = lengths(rng, scene["anything"])
    first = sum(rows[:RANK])
    q, k, v = rng.standard_normal((3, 1, sum(rows), 4, 8))
    mine = [np.ascontiguousarray(x[:, first : first + rows[RANK]]) for x in (q, k, v)]
    kind, is_causal = rng.integers(3), bool(rng.integers(2))
    misled = scene["fault"] == "mislead" and number == scene["call"]
    if misled and RANK == scene["rank"]:
        how = scene["how"]
        if how == "operation":
            return context.shard(np.zeros((WORLD, 2)), 0)
        if how == "causal":
            is_causal, kind = not is_causal, 0
        if how == "dtype":
            mine, kind = [x.astype(np.float32) for x in mine], 0
        if how == "heads":
            mine, kind = [x[:, :, :3] for x in mine], 0
        if how == "mask":
            return cp_attn.attention(*mine, context, is_causal=is_causal, attn_mask=np.ones(3, bool))
        if how == "python":
            return context.agree(KeyError("a rank's own error"))
    elif misled:
        kind = 0
    if kind == 0:
        out = cp_attn.attention(*mine, context, is_causal=is_causal)
        check(out, oracle(q, k, v, is_causal=is_causal)[0][:, first : first + rows[RANK]])
    elif kind == 1:
        check(context.gather(mine[0], 1), q)
    elif sum(rows) >= WORLD and (scene["anything"] or sum(rows) % WORLD == 0):
        check(context.shard(q, 1), np.array_split(q, WORLD, 1)[RANK])


def hurt(scene):
    """Do to this process what the scene wants, at a random point of the call that comes."""
    rng = np.random.default_rng([scene["seed"], 77])
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP, "interrupt": signal.SIGINT}
    if scene["fault"] == "exit":
        say(hurt=time.time())
        os._exit(9)
    elif scene["fault"] == "delay":
        time.sleep(float(rng.uniform(0, 1)))
    elif scene["fault"] in signals:

        def send():
            time.sleep(float(rng.uniform(0, 0.002)))
            say(hurt=time.time())
            os.kill(os.getpid(), signals[scene["fault"]])

        threading.Thread(target=send).start()


def play(scene):
    """Return how it ended."""
    config = cp_attn.ContextParallelConfig(**scene["config"], timeout=scene["timeout"])
    with cp_attn.init(config) as context:
        for number in range(scene["calls"]):
            try:
                if RANK == scene["rank"] and number == scene["call"]:
                    hurt(scene)
                one_call(context, scene, number)
            except (ValueError, TypeError, KeyError) as error:
                if scene["fault"] != "mislead" or number != scene["call"]:
                    raise
                say(misled=type(error).__name__, text=str(error))
            except (cp_attn.CommError, cp_attn.CommTimeout) as error:
                at = time.time()
                try:
                    context.gather(np.zeros((1, 2)), 0)
                except (cp_attn.CommError, cp_attn.CommTimeout) as again:
                    return dict(end=type(error).__name__, text=str(error), again=str(again), at=at)
                raise WrongAnswer("a broken context went on") from error
        if scene["fault"] == "interrupt" and RANK == scene["rank"]:
            time.sleep(0.05)  # the signal may come after the last call
    return dict(end="done")


if __name__ == "__main__":
    try:
        line = play(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        line = dict(end="KeyboardInterrupt")
    except WrongAnswer as error:
        line = dict(end="WrongAnswer", text=str(error))
    say(**line)
