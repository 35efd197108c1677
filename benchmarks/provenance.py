"""Where and from what a benchmark's figures come: printed with them, and kept with them."""

import datetime
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def processor():
    """Return the name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def provenance(benchmark, **machine):
    """Return what `machine` says of the machine, and the date, the commit and the command line."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return machine | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or "none",
        "command": f"python -m benchmarks.{benchmark} " + " ".join(sys.argv[1:]),
    }
