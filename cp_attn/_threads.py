"""How many threads a rank computes with on the host."""

import os
import re
import sys

MOST = 1024


def count(local_ranks, environ=None, torch_threads=None, cores=None):
    """Return the number of threads for the calls of one rank, the caller's thread with them.

    CP_ATTN_THREADS decides where it is set. Otherwise it is as many as torch uses (`torch.get_num_threads()`) where
    torch has been imported, else OMP_NUM_THREADS, else one for each core. What nobody has asked for, an unset
    OMP_NUM_THREADS, means one for each core in torch as well, on every rank; the cores are then shared out.

    Parameters
    ----------
    local_ranks : int
        Ranks of the job on this host.
    environ, torch_threads, cores
        For tests; by default those of this process.

    Raises
    ------
    ValueError
        CP_ATTN_THREADS is no number from 1 to 1,024.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("CP_ATTN_THREADS", "")
    if wanted:
        if not re.fullmatch(r"[0-9]{1,4}", wanted.strip()) or not 1 <= int(wanted) <= MOST:
            raise ValueError(f"CP_ATTN_THREADS is {wanted!r}; a number of threads from 1 to {MOST:,} is needed")
        return int(wanted)
    # A list is one number for each level of nesting.
    asked = re.fullmatch(r"\s*([0-9]{1,6})\s*(,.*)?", environ.get("OMP_NUM_THREADS", ""))
    found = _torch_threads() if torch_threads is None else torch_threads
    if asked is not None and int(asked[1]) > 0:
        return min(found or int(asked[1]), MOST)
    share = max(1, (len(os.sched_getaffinity(0)) if cores is None else cores) // max(1, local_ranks))
    return min(found or share, share, MOST)


def _torch_threads():
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if hasattr(torch, "get_num_threads") else 0
