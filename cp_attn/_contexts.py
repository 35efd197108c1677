"""Contexts: made for a config, found again by it, closed at exit."""

import atexit
import os
import threading
from collections import Counter

from . import _C, _hosts, _ranks, _threads

_lock = threading.RLock()
_contexts = {}
_counts = Counter()
_pid = os.getpid()
_is_fork = False  # of a process that has met other ranks: its place among them is taken

# The fields of a config, less the mesh: what ranks can compare.
COMPARED = (
    "ring_degree",
    "ulysses_degree",
    "convert_to_fp32",
    "rotate_method",
    "ulysses_anything",
    "ring_anything",
    "unified_anything",
    "timeout",
)


def read_config(config):
    """Return a `ContextParallelConfig` for a config of cp_attn or of diffusers.

    Raises
    ------
    ValueError
        It carries a tensor-parallel config, or no context-parallel one, or values that are not allowed.
    TypeError
        It is no config.
    """
    if isinstance(config, _C.ContextParallelConfig):
        return config
    if isinstance(config, type):
        raise TypeError(f"config is the class {config.__name__}; one of its objects is needed")
    if getattr(config, "tensor_parallel_config", None) is not None or hasattr(config, "tp_degree"):
        raise ValueError("the config carries a tensor-parallel config; cp_attn splits the sequence only")
    if hasattr(config, "context_parallel_config"):
        config = config.context_parallel_config
        if config is None:
            raise ValueError("context_parallel_config is None; a ContextParallelConfig is needed")
        return read_config(config)
    if not (hasattr(config, "ring_degree") and hasattr(config, "ulysses_degree")):
        raise TypeError(f"config is a {type(config).__name__}; a ContextParallelConfig is needed")
    fields = {name: getattr(config, name) for name in (*COMPARED, "mesh") if hasattr(config, name)}
    if fields.get("rotate_method") == "allgather":
        fields["rotate_method"] = "auto"  # the only value that diffusers knows: no choice was made
    return _C.ContextParallelConfig(**fields)


def init(config):
    """Make a context: the communicators among the ranks of a config.

    Every rank of the region must call it, in the same order of calls.

    Parameters
    ----------
    config : ContextParallelConfig
        One of diffusers is accepted as well.

    Returns
    -------
    Context
        Reusable; also a context manager. `close()` it on all ranks.

    Raises
    ------
    RuntimeError
        No launcher says which rank this is.
    ValueError
        The degrees do not fit the number of ranks or the mesh, or the ranks came with different configs.
    TypeError
        `config` is no config.
    NotImplementedError
        The ranks of a mesh are on several hosts, and no store of torch tells where.
    CommTimeout
        A rank did not appear.

    Notes
    -----
    What one rank finds wrong is raised on all ranks.

    Examples
    --------
    >>> with cp_attn.init(cp_attn.ContextParallelConfig(ring_degree=2)) as ctx:  # doctest: +SKIP
    ...     local = ctx.shard(x, 1)
    """
    return meet(config)


def meet(config, error=None):
    """Return a new context of a config; `error` is what this rank has found wrong already, or None.

    Whatever one rank has found wrong, here or before, is raised on all ranks: a rank that has an error goes to the
    meeting all the same, to tell it. Only where it cannot know whom to meet (a wrong mesh) it raises alone.
    """
    if _is_fork:
        raise RuntimeError(
            "this process is a fork of one that has contexts, whose place among the ranks it cannot take; "
            "start processes that are ranks with spawn, or before the first context is made"
        )
    threads = 1
    try:
        config = read_config(config)
        place = _ranks.place(config)
        threads = _threads.count(place.local_world)
    except Exception as found:
        error = error or found
        place = _ranks.whole_job() if getattr(config, "mesh", None) is None else None
        if place is None:
            raise error from None
    with _lock:
        count = _counts[place.job, frozenset(place.members)]
        _counts[place.job, frozenset(place.members)] += 1
    with _hosts.meeting(place, place.key(count), config, error) as (key, root):
        return _C.Context(config, rank=place.rank, world=place.world, key=key, error=error, root=root, threads=threads)


def context_for(config):
    """Return the process's context of a config; the first call makes it, on all ranks alike."""
    config = read_config(config)
    with _lock:
        context = _contexts.get(config)
        if context is None:
            context = _contexts[config] = init(config)
        return context


def close(config):
    """Close the context that calls with a config in the place of a context have made.

    Every rank must call it. Afterwards the config can be used afresh, so that a broken context is replaced.

    Parameters
    ----------
    config : ContextParallelConfig
        One that has no context yet is left alone.
    """
    with _lock:
        context = _contexts.pop(read_config(config), None)
    if context is not None:
        context.close()


def _note_fork():
    global _is_fork
    _is_fork = _is_fork or bool(_counts)


def _close_all():
    if os.getpid() != _pid:
        return  # a forked child: the contexts are its parent's
    while _contexts:
        _contexts.popitem()[1].close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_note_fork)
