"""The rows of one shape, measured in turns."""

import statistics
from dataclasses import asdict

import torch
import torch.distributed as dist

from .judge import TOLERANCE, gathered, judge, reference
from .rows import Ours, Problem, rows_of


def attempt(call, allowed):
    """(what it returns, None), or (None, why): what one rank raises counts for all."""
    result = why = None
    try:
        result = call()
    except allowed as error:
        text = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {text[0] if text else ''}"
    why = next(filter(None, gathered(why)), None)
    return (None if why else result), why


def problem_of(shape, tokens, dtype, is_backward, place):
    generator = torch.Generator().manual_seed(tokens)
    size = 1, tokens, shape.heads, shape.dim
    whole = [
        torch.randn(size, generator=generator).to(getattr(torch, dtype)).to(place)
        for _ in range(4 if is_backward else 3)
    ]
    return Problem(tuple(whole), dist.get_rank(), dist.get_world_size())


class Entry:
    """A row of the table and what was measured of it."""

    def __init__(self, library, backend, make, facts):
        self.make, self.row, self.times = make, None, []
        # cp_attn refuses what it cannot run with a ValueError, and anything else is a defect.
        self.allowed = ValueError if library == Ours.library else Exception
        blank = dict.fromkeys(("ms", "least_ms", "most_ms", "peak_bytes", "error", "note", "cores"))
        self.facts = {"library": library, "backend": backend} | facts | blank

    def prepare(self, problem, small, device, wanted, tolerance):
        """Make the row and let it answer once, which is when its memory is taken, or note why it cannot."""
        attempt(lambda: self.call_once(small, device), self.allowed)  # brings in the code
        before = device.memory()
        self.row, why = attempt(lambda: self.make(problem, device), self.allowed)
        if why is None:
            taken, why = attempt(lambda: device.peak(self.row.call, before), self.allowed)
        if why is None:
            answers, peak = taken
            peak = max(gathered(peak))
            self.facts["error"], why = judge(self.row, answers, wanted, tolerance)
        if why is None:
            self.facts |= {"peak_bytes": peak, "cores": min(self.row.cores, device.cores())}
        else:
            self.close()
            self.facts["note"] = why

    def call_once(self, problem, device):
        row = self.make(problem, device)
        try:
            row.call()
        finally:
            row.close()

    def time(self, device, layers):
        """One step; the slowest rank's seconds."""
        if self.row is None:
            return
        dist.barrier()
        seconds = device.seconds(lambda: [self.row.call() for _ in range(layers)])
        self.times.append(max(gathered(seconds)))

    def close(self):
        if self.row is not None:
            self.row.close()
            self.row = None

    def is_wrong(self):
        return self.facts["library"] == Ours.library and (self.facts["note"] or "").startswith("wrong")

    def finish(self):
        ms = [seconds * 1e3 for seconds in self.times]
        if ms:
            self.facts |= {"ms": statistics.median(ms), "least_ms": min(ms), "most_ms": max(ms)}
        return self.facts


def compare(rows):
    """Add what follows from several rows: speed-up and efficiency over the library's single rank, time over ours."""
    times = {(row["library"], row["backend"]): row["ms"] for row in rows}
    for row in rows:
        alone = times.get(("cp_attn" if row["library"] == "cp_attn" else "torch", "none"))
        backend = row["backend"].split(",")[0]
        ours = times.get(("cp_attn", backend)) or times.get(("cp_attn", f"{backend}_anything"))
        ms = row["ms"]
        row["steps_a_second"] = 1e3 / ms if ms else None
        row["speed_up"] = alone / ms if ms and alone else None
        row["efficiency"] = row["speed_up"] / row["cores"] if row["speed_up"] else None
        row["times_ours"] = ms / ours if ms and ours and row["library"] != "cp_attn" else None
    return rows


def measure(shape, args, device, progress):
    """(the problem of a shape, its rows, whether one of ours is wrong)."""
    progress.set_description(shape.name)
    problem = problem_of(shape, shape.tokens, args.dtype, args.backward, device.place)
    small = problem_of(shape, 16 * problem.world, args.dtype, args.backward, device.place)
    wanted = reference(problem)
    facts = asdict(shape) | {
        "ranks": problem.world,
        "device": device.kind,
        "dtype": args.dtype,
        "direction": "forward and backward" if args.backward else "forward",
        "steps": args.steps,
    }
    entries = [Entry(*row, facts) for row in rows_of(args.backend, args.peers, device, problem.world)]
    for entry in entries:
        entry.prepare(problem, small, device, wanted, TOLERANCE[args.dtype])
        progress.update()
    for step in range(args.steps):
        for entry in entries if step % 2 == 0 else reversed(entries):
            entry.time(device, shape.layers)
            progress.update()
    for entry in entries:
        entry.close()
    rows = compare([entry.finish() for entry in entries])
    return problem, rows, any(entry.is_wrong() for entry in entries)
