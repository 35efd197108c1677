"""Ranks as threads of this process: what needs no process of its own is tested so, in milliseconds."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cp_attn import _C

_meeting = itertools.count()


class Ranks:
    """A group of `world` contexts, each used by a thread of its own."""

    def __init__(self, world, timeout=30.0, **config):
        self.world = world
        self.config = _C.ContextParallelConfig(timeout=timeout, **config)
        self._pools = [ThreadPoolExecutor(1) for _ in range(world)]
        key = f"test {os.getpid()} {next(_meeting)}"
        try:
            self.contexts = self.run(lambda r: _C.Context(self.config, rank=r, world=world, key=key))
        except BaseException:
            self._stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        for context in self.contexts:
            context.close()
        self.contexts = []
        self._stop()

    def _stop(self):
        for pool in self._pools:
            pool.shutdown()

    def run(self, function):
        """Return function(rank) of all ranks, called at the same time; the lowest rank's exception is raised."""
        return [future.result() for future in self._start(function)]

    def errors(self, function):
        """Return the exception of every rank, or None."""
        return [future.exception() for future in self._start(function)]

    def _start(self, function):
        futures = [pool.submit(function, rank) for rank, pool in enumerate(self._pools)]
        for future in futures:
            future.exception()
        return futures

    def attention(self, q, k, v, rank=None, **keywords):
        """Run attention on lists with one tensor for each rank; keyword values that are lists, too, likewise."""

        def call(r):
            own = {name: value[r] if isinstance(value, list) else value for name, value in keywords.items()}
            return _C.attention(q[r], k[r], v[r], self.contexts[r], **own)

        return self.run(call)


def cut(x, lengths, axis=1):
    """Return x in pieces of these lengths."""
    return np.split(x, np.cumsum(lengths)[:-1], axis)


def oracle(q, k, v, mask=None, is_causal=False, scale=None):
    """Return (out, lse) in float64 for whole NumPy arrays (B, s, H, D); mask broadcasts to (B, H, s, t)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if is_causal:
        scores = np.where(np.arange(scores.shape[3]) <= np.arange(scores.shape[2])[:, None], scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        lse = (top + np.log(total))[..., 0]
        weights = np.where(total > 0, weights / total, 0)
    return np.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(0, 2, 1)
