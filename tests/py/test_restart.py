"""torchrun starts a failed group anew, at the same address: the second attempt meets as if there had been no first."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from launch import clean_environ, free_port

import cp_attn

ENDS = {
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}


@pytest.mark.parametrize("end", ENDS)
def test_second_attempt(end, tmp_path):
    pytest.importorskip("torch")
    port = free_port()
    options = ["--nproc-per-node=2", "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, end, str(tmp_path)]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("RuntimeError: planted" in done.stderr) == (end == "raise"), done.stderr[-3000:]
    said = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(said) == ["attempt 0 rank 1", "attempt 1 rank 0", "attempt 1 rank 1"], said
    assert {one["port"] for one in said.values()} == {str(port)}
    for rank in (0, 1):
        again = said[f"attempt 1 rank {rank}"]
        assert again["mean"] == 2.5
        assert again["at"] - said["attempt 0 rank 1"]["at"] < 20


def main(end, folder):
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    with cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=2, timeout=60.0)) as context:
        if attempt == "0":
            fail_in_the_middle(context, end, lambda: write(folder, attempt, rank))
        x = np.full((1, 1, 1, 4), [1.0, 4.0][int(rank)])
        mean = cp_attn.attention(0 * x, 0 * x, x, context)
        write(folder, attempt, rank, mean=float(mean[0, 0, 0, 0]))


def fail_in_the_middle(context, end, tell):
    """Let both ranks compute attention, each call a good part of a second, until rank 1 ends and rank 0 is told so."""

    def end_it():
        time.sleep(0.3)
        tell()
        ENDS[end]()

    def fail(*_):
        raise RuntimeError("planted")

    signal.signal(signal.SIGUSR1, fail)
    if context.rank == 1:
        threading.Thread(target=end_it).start()
    x = np.ones((1, 4000, 8, 64), np.float32)
    while True:
        cp_attn.attention(x, x, x, context)


def write(folder, attempt, rank, **more):
    line = dict(at=time.time(), port=os.environ["MASTER_PORT"], **more)
    Path(folder, f"attempt {attempt} rank {rank}").write_text(json.dumps(line))


if __name__ == "__main__":
    main(*sys.argv[1:])
