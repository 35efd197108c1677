"""Where the time of a call goes, from the trace of all ranks; beside it what the schedule asks for."""

import json
import os
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from . import core, gpu_costs
from .rows import Ours
from .shapes import cut

# In the order of the table. What is left of a call is "rest": records, looking for the plan, the executor.
PARTS = {
    "skew wait": "at the gate, until all ranks have come",
    "data wait": "later, for what another rank has not published or sent",
    "pack": "own keys into the kernel's layout",
    "transfer": "copies from and to windows, or messages",
    "compute": "attention or its gradient; a ring reads others' keys here, in place",
    "merge": "gradients of several ranks are added up; a forward merges as it computes",
    "rest": "the gate's records, the executor",
}
KINDS = {
    "PACK": "pack",
    "COPY": "transfer",
    "SEND": "transfer",
    "RECV": "transfer",
    "ZERO": "compute",
    "ATTEND": "compute",
    "DELTA": "compute",
    "GRAD": "compute",
    "FINISH": "compute",
    "REDUCE": "merge",
}
WAIT, CALLS = "wait", ("attention", "attention backward")


@contextmanager
def trace(rank):
    """The file to which the contexts that are made inside write, on all ranks of this host."""
    folder = tempfile.TemporaryDirectory() if rank == 0 else None
    path = [str(Path(folder.name) / "trace.json") if folder else None]
    dist.broadcast_object_list(path, 0)
    before = os.environ.get("CP_ATTN_TRACE")
    os.environ["CP_ATTN_TRACE"] = path[0]
    try:
        yield Path(path[0])
    finally:
        os.environ.pop("CP_ATTN_TRACE")
        if before is not None:
            os.environ["CP_ATTN_TRACE"] = before
        if folder:
            folder.cleanup()


def read(path):
    """The spans of a trace, and {pid: rank}."""
    entries = json.loads(path.read_text().rstrip(",\n") + "]")  # the array stays open
    ranks = {
        entry["pid"]: int(entry["args"]["name"].removeprefix("rank "))
        for entry in entries
        if entry["name"] == "process_name"
    }
    return [entry for entry in entries if entry["ph"] == "X"], ranks


def parts_of(spans):
    """The spans of one call on one rank: microseconds of the call, and of its parts."""
    (call,) = (span for span in spans if span["name"] in CALLS)
    inside = sorted((span for span in spans if span is not call), key=lambda span: span["ts"])
    parts, is_past_gate = dict.fromkeys(PARTS, 0.0), False
    for span in inside:
        if span["name"] == WAIT:
            parts["data wait" if is_past_gate else "skew wait"] += span["dur"]
            continue
        is_past_gate = is_past_gate or "step" in span["args"]
        if span["name"] in KINDS:
            parts[KINDS[span["name"]]] += span["dur"]
    parts["rest"] = call["dur"] - sum(parts.values())
    return call["dur"], parts


def table_of(path, steps, layers):
    """One entry a rank: milliseconds a step in its last `steps` steps of `layers` calls, forward and backward."""
    spans, ranks = read(path)
    calls = defaultdict(list)
    for span in spans:
        if span["cat"] in CALLS:
            calls[span["pid"], span["cat"], span["args"]["call"]].append(span)
    latest = defaultdict(list)
    for pid, op, number in sorted(calls):
        latest[pid, op].append(calls[pid, op, number])
    entries = {rank: {"rank": rank, "ms": 0.0, "parts": dict.fromkeys(PARTS, 0.0)} for rank in ranks.values()}
    for (pid, _), each in latest.items():
        entry = entries[ranks[pid]]
        for one in each[-steps * layers :]:
            whole, parts = parts_of(one)
            entry["ms"] += whole * 1e-3 / steps
            for part, us in parts.items():
                entry["parts"][part] += us * 1e-3 / steps
    return [entries[rank] for rank in sorted(entries)]


def costs_of(device, case, cc):
    """What a call asks of each rank: launches, which are steps that compute or move, and bytes from other ranks."""
    if device.kind == "cuda":
        (count,) = gpu_costs.count_ours([case], timeout=300)
        launches = count["launches"] + count["copies"] + count["memsets"]
        return [{"launches": launches, "peer_bytes": count["sent_bytes"]}] * len(case.rows)
    variant = "anything" if case.is_anything else "even"
    numbers = map(str, (case.ring, case.ulysses, variant, case.dtype, case.heads, case.dim, *case.rows))
    command = [core.build("bench_schedule", cc), case.op, *numbers]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    costs = [json.loads(line) for line in done.stdout.splitlines()]
    return [cost | {"launches": sum(count for op, count in cost["steps"].items() if op in KINDS)} for cost in costs]


def step_costs(row, shape, degrees, device, args):
    """{rank: a step's launches and peer_bytes}."""
    totals, rows = defaultdict(Counter), cut(shape.tokens, row["ranks"])
    for op in ("attention", "backward") if args.backward else ("attention",):
        case = gpu_costs.Case(op, shape.name, row["backend"], *degrees, shape.heads, shape.dim, rows, args.dtype)
        for rank, cost in enumerate(costs_of(device, case, args.cc)):
            totals[rank].update({name: shape.layers * cost[name] for name in ("launches", "peer_bytes")})
    return totals


def locate(rows, shape, problem, args, device, slow):
    """On rank 0, an entry for each way of ours to share that ran; `slow` is (rank, milliseconds) or None."""
    slow_rank, late_ms = slow or (None, 0.0)
    for row in rows:
        if row["library"] != Ours.library or row["backend"] == "none" or row["ms"] is None:
            continue
        with trace(problem.rank) as path:
            traced = Ours(problem, device, row["backend"])
            degrees = traced.context.config.mesh_shape
            for _ in range(1 + args.steps):
                dist.barrier()
                for _ in range(shape.layers):
                    time.sleep(late_ms * 1e-3 if problem.rank == slow_rank else 0.0)
                    traced.call()
            traced.close()
            dist.barrier()
            if problem.rank == 0:
                costs = step_costs(row, shape, degrees, device, args)
                by_rank = [entry | costs[entry["rank"]] for entry in table_of(path, args.steps, shape.layers)]
                about = {"slow": f"rank {slow_rank} sleeps {late_ms:g} ms" if slow else None, "by_rank": by_rank}
                yield row | about
