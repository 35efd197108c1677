"""Kill, stop, delay, interrupt and mislead ranks at random points for a given time, and count what must not happen."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "py"))
from launch import free_port, rank_environ  # noqa: E402

FAULTS = ("none", "kill", "exit", "stop", "pause", "delay", "interrupt", "mislead")
HOWS = ("operation", "causal", "dtype", "heads", "mask", "python")
HANG = 25.0  # seconds after which a scene is one
STOPPED, PAUSED = 2.0, 0.3  # the timeout that a stop outlasts, and a stop that no timeout notices


def make_scene(seed, faults):
    """Return what happens in a scene; the same for the same seed and faults."""
    rng = random.Random(seed)
    world = rng.choice((2, 2, 3, 4))
    kinds = [dict(ring_degree=world), dict(ulysses_degree=world)] + [dict(ring_degree=2, ulysses_degree=2)] * (
        world == 4
    )
    config = rng.choice(kinds)
    anything = rng.random() < 0.5
    if anything:
        flag = {("ring_degree",): "ring_anything", ("ulysses_degree",): "ulysses_anything"}
        config = config | {flag.get(tuple(config), "unified_anything"): True}
    elif config.get("ulysses_degree") == 3:
        config = dict(ring_degree=3)  # four heads
    fault, calls = rng.choice(faults), rng.randint(3, 40)
    return dict(
        seed=seed,
        world=world,
        config=config,
        anything=anything,
        fault=fault,
        how=rng.choice(HOWS),
        rank=rng.randrange(world),
        call=rng.randrange(calls),
        calls=calls,
        timeout=STOPPED if fault == "stop" else 60.0,
    )


class Outcome:
    """What is wrong with a scene, by kind, and how long the others took to notice a death."""

    def __init__(self):
        self.hangs, self.wrong, self.notice = [], [], None


def play(scene, port):
    """Run a scene and return its outcome."""
    ranks = []
    for rank in range(scene["world"]):
        command = [sys.executable, str(HERE / "rank.py"), json.dumps(scene)]
        environ = rank_environ(rank, scene["world"], port)
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    victim, outcome, deadline = ranks[scene["rank"]], Outcome(), time.monotonic() + HANG
    if scene["fault"] in ("stop", "pause"):
        _continue(scene, victim, [p for p in ranks if p is not victim], deadline)
    lines = []
    for rank, process in enumerate(ranks):
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            outcome.hangs.append(f"rank {rank} still ran after {HANG} s: {err.decode()[-500:]}")
        lines.append([json.loads(line) for line in out.decode().splitlines() if line.startswith("{")])
        is_killed = rank == scene["rank"] and scene["fault"] in ("kill", "exit")
        if not is_killed and not any("end" in line for line in lines[-1]):
            outcome.wrong.append(f"rank {rank} ended with exit code {process.returncode}: {err.decode()[-700:]}")
    if not outcome.hangs and not outcome.wrong:
        _judge(scene, lines, outcome)
    return outcome


def _continue(scene, victim, others, deadline):
    """Let a stopped rank go on: soon, or only when the others have given it up."""
    while victim.poll() is None and _state(victim.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.005)
    if scene["fault"] == "pause":
        time.sleep(PAUSED)
    else:
        while any(p.poll() is None for p in others) and time.monotonic() < deadline - 5:
            time.sleep(0.02)
    if victim.poll() is None:
        victim.send_signal(signal.SIGCONT)


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _judge(scene, lines, outcome):
    """Say what is not as it must be."""
    fault, victim = scene["fault"], scene["rank"]
    hurt = next((line["hurt"] for line in lines[victim] if "hurt" in line), None)
    allowed = {
        "kill": ("CommError", "done"),
        "exit": ("CommError", "done"),
        "stop": ("CommTimeout", "done"),
        "interrupt": ("CommError", "done"),
    }.get(fault, ("done",))
    for rank, said in enumerate(lines):
        end = next((line for line in said if "end" in line), {})  # a late signal may speak after it
        if rank == victim and fault in ("kill", "exit"):
            continue
        if rank == victim and fault in ("stop", "interrupt"):
            # Stopped or interrupted before, in or after its last call that the others need.
            if end.get("end") not in ("done", "KeyboardInterrupt", "CommTimeout", "CommError"):
                outcome.wrong.append(f"rank {rank}, which was hurt: {end}")
            continue
        if end.get("end") not in allowed:
            outcome.wrong.append(f"rank {rank}: {end}")
        elif end["end"] != "done":
            if f"rank {victim}" not in end["text"]:
                outcome.wrong.append(f"rank {rank} does not name rank {victim}: {end['text']}")
            if end["text"] not in end["again"] and end["again"] not in end["text"]:
                outcome.wrong.append(f"rank {rank} says another reason later: {end['text']!r}, {end['again']!r}")
            if fault in ("kill", "exit"):
                outcome.notice = max(outcome.notice or 0.0, end["at"] - hurt)
    if fault == "mislead":
        _judge_misled(lines, outcome)


def _judge_misled(lines, outcome):
    """All ranks must have raised the same at the call in question; KeyError is what the rank itself may say."""
    said = [next((line for line in rank if "misled" in line), None) for rank in lines]
    if None in said:
        outcome.wrong.append(f"ranks {[i for i, line in enumerate(said) if line is None]} were misled and went on")
    elif len({line["misled"] for line in said}) > 1:
        outcome.wrong.append(f"ranks raised different errors: {said}")


def leftovers(port, files):
    """Return what a scene has left: processes, which alone can hold its sockets and windows, and files."""
    deadline = time.monotonic() + 3
    while (found := [*processes(port), *(shared_files() - files)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def processes(port):
    """Return the processes, children of ranks included, that have a scene's rendezvous in their environment."""
    mark, found = f"MASTER_PORT={port}".encode(), []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append(f"process {environ.parent.name}")
        except OSError:
            continue  # gone, or another user's
    return found


def shared_files():
    """Return the files in /dev/shm that could be ours."""
    return {str(p) for p in Path("/dev/shm").iterdir() if "cp" in p.name.lower() and "attn" in p.name.lower()}


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="how long to go on")
    parser.add_argument("--seed", type=int, default=None, help="of the first scene; drawn if not given")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="this one only; may be given again")
    parser.add_argument("--scenes", type=int, default=None, help="stop after so many")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    counts, bad, noticed, files = Counter(), Counter(), [], shared_files()
    end = time.monotonic() + args.seconds
    with tqdm(total=round(args.seconds), unit="s", disable=not os.isatty(2)) as bar:
        while time.monotonic() < end and sum(counts.values()) != args.scenes:
            scene = make_scene(seed + sum(counts.values()), args.fault or FAULTS)
            start, port = time.monotonic(), free_port()
            outcome = play(scene, port)
            left = leftovers(port, files)
            counts[scene["fault"]] += 1
            bad.update(hangs=len(outcome.hangs), wrong=len(outcome.wrong), leftovers=len(left))
            noticed += [outcome.notice] if outcome.notice is not None else []
            for sentence in (*outcome.hangs, *outcome.wrong, *left):
                tqdm.write(f"--seed {scene['seed']} --scenes 1: {scene['fault']}: {sentence}", file=sys.stdout)
            bar.update(min(round(time.monotonic() - start, 1), max(0, bar.total - bar.n)))
    print(f"first seed {seed}; " + ", ".join(f"{name} {counts[name]}" for name in FAULTS))
    if noticed:
        print(f"a death was noticed after {median(noticed):.3f} s (median), {max(noticed):.3f} s (worst)")
    print(
        f"scenes {sum(counts.values())}, hangs {bad['hangs']}, wrong answers and endings {bad['wrong']}, "
        f"leftovers {bad['leftovers']}"
    )
    sys.exit(1 if sum(bad.values()) else 0)


if __name__ == "__main__":
    main()
