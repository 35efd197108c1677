"""Start ranks the way torchrun does, and collect the JSON lines that they print."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# What any launcher would set: no test may inherit it.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "SLURM_")


@dataclass
class Rank:
    """What became of one rank."""

    rank: int
    code: int
    lines: list
    err: str

    def line(self, **having):
        """Return the first line with these values; fail with what the rank said on stderr if there is none."""
        for line in self.lines:
            if all(line.get(key) == value for key, value in having.items()):
                return line
        raise AssertionError(f"rank {self.rank} (exit {self.code}) printed no line with {having}\n{self.err[-3000:]}")


def lines(ranks, **having):
    """Yield every rank's line with these values; fail with what it says of a failure."""
    for rank in ranks:
        line = rank.line(**having)
        assert line["failed"] is None, f"rank {rank.rank}: {line['failed']}"
        yield line


def say(**line):
    """Print one JSON line; for the ranks."""
    print(json.dumps(line), flush=True)


def clean_environ(**more):
    """Return this process's environment without any launcher's variables, and with `more`."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(RANK_VARIABLES)}
    path = os.pathsep.join(filter(None, [str(HERE), environ.get("PYTHONPATH")]))
    return environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def rank_environ(rank, world, port):
    """Return the environment of one rank."""
    return clean_environ(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def free_port():
    """Return a port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _here(rank):
    return []


def launch(script, world, *args, timeout=120, where=_here, **environ):
    """Run a script of this folder on `world` ranks and return them; none outlives `timeout` seconds.

    `where` gives the beginning of a rank's command line, `environ` what is changed in the environment of all.
    """
    port, deadline = free_port(), time.monotonic() + timeout
    # Files, not pipes: a full pipe would stop a rank.
    out, err = ([tempfile.TemporaryFile() for _ in range(world)] for _ in range(2))
    command = [sys.executable, str(HERE / script), *map(str, args)]
    ranks = [
        subprocess.Popen(
            [*where(r), *command],
            env=rank_environ(r, world, port) | environ,
            stdin=subprocess.DEVNULL,
            stdout=out[r],
            stderr=err[r],
            start_new_session=True,
        )
        for r in range(world)
    ]
    try:
        return [_finish(r, p, out[r], err[r], deadline, timeout) for r, p in enumerate(ranks)]
    finally:
        for p in ranks:
            if p.poll() is None:
                _kill(p)
        for file in (*out, *err):
            file.close()


def _finish(rank, process, out, err, deadline, timeout):
    late = ""
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)
        late = f"killed after {timeout} s\n"
    lines = [json.loads(line) for line in _text(out).splitlines() if line.startswith("{")]
    return Rank(rank, process.returncode, lines, late + _text(err))


def _kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file):
    file.seek(0)
    return file.read().decode(errors="replace")
