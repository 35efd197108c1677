"""The rows of the table: who computes an attention, and how the ranks share it.

A row that cannot run raises when it is made or at its first call, on all ranks.
"""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cp_attn

from .shapes import cut

# The documentation's names, in its order.
BACKENDS = ("none", "ulysses", "ring", "unified", "ulysses_anything", "ring_anything")


@dataclass(frozen=True)
class Problem:
    """An attention whose tensors every rank has whole: q, k, v, and for a backward the gradient of out."""

    whole: tuple  # (1, S, H, D)
    rank: int
    world: int

    @property
    def is_backward(self):
        return len(self.whole) == 4

    @property
    def tokens(self):
        return self.whole[0].shape[1]

    @property
    def first(self):
        """The first row of this rank."""
        return sum(cut(self.tokens, self.world)[: self.rank])

    @property
    def count(self):
        return cut(self.tokens, self.world)[self.rank]

    def own(self):
        """This rank's rows of all."""
        return [x.narrow(1, self.first, self.count) for x in self.whole]


def degrees(backend, world):
    """(ring, Ulysses) degree of a backend. Raises ValueError where the ranks cannot be arranged so."""
    kind = backend.removesuffix("_anything")
    if kind == "ring":
        return world, 1
    if kind == "ulysses":
        return 1, world
    ring = next((ring for ring in range(2, world) if world % ring == 0), None)
    if ring is None:
        raise ValueError(f"{world} ranks are no grid: unified needs 4, or another product of two degrees above 1")
    return ring, world // ring


def config_of(kind, backend, world):
    """A ContextParallelConfig of `kind`, cp_attn's or diffusers'."""
    ring, ulysses = degrees(backend, world)
    flags = {backend: True} if backend.endswith("_anything") else {}
    return kind(ring_degree=ring, ulysses_degree=ulysses, **flags)


class Row:
    """One row. `inputs` are q, k and v as this rank gives them; its answers are whole's rows from `first` on."""

    def __init__(self, problem, backend, cores):
        self.problem, self.backend, self.cores, self.first = problem, backend, cores, 0

    def take(self, parts, first):
        """Copies of q, k and v, and of the gradient of out where it is needed."""
        own = [x.detach().clone(memory_format=torch.contiguous_format) for x in parts]
        self.inputs, self.dout, self.first = own[:3], own[3:], first
        for x in self.inputs:
            x.requires_grad_(self.problem.is_backward)

    def attend(self, q, k, v):
        raise NotImplementedError

    def call(self):
        """[out], or [out, dq, dk, dv]; [] on a rank that has no part in it."""
        if not self.problem.is_backward:
            with torch.no_grad():
                return [self.attend(*self.inputs)]
        out = self.attend(*self.inputs)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, *self.dout)]

    def close(self):
        pass


class Ours(Row):
    library = "cp_attn"

    def __init__(self, problem, device, backend):
        super().__init__(problem, backend, problem.world)
        self.context = cp_attn.init(config_of(cp_attn.ContextParallelConfig, backend, problem.world))
        self.take([self.context.shard(x, 1) for x in problem.whole], problem.first)

    def attend(self, q, k, v):
        return cp_attn.attention(q, k, v, self.context)

    def close(self):
        self.context.close()


class OursAlone(Ours):
    """Rank 0 has all queries and every rank all keys, so rank 0 computes it all and nothing moves."""

    def __init__(self, problem, device, backend):
        Row.__init__(self, problem, backend, 1)
        self.context = cp_attn.init(config_of(cp_attn.ContextParallelConfig, "ring_anything", problem.world))
        q, k, v, *dout = problem.whole
        rows = problem.tokens if problem.rank == 0 else 0
        self.take([q[:, :rows], k, v, *(x[:, :rows] for x in dout)], 0)

    def attend(self, q, k, v):
        return cp_attn.attention(q, k, v, self.context, kv="replicated")

    def call(self):
        answers = super().call()
        return answers if self.problem.rank == 0 else []


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Torch(Row):
    """torch's own attention on rank 0 alone, which is what a model calls without context parallelism."""

    library = "torch"

    def __init__(self, problem, device, backend, threads=1):
        super().__init__(problem, backend, threads)
        if problem.rank == 0:
            self.take(problem.whole, 0)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def call(self):
        with torch_threads(self.cores):
            return super().call() if self.problem.rank == 0 else []


class Diffusers(Row):
    """diffusers' context-parallel attention function, on shards that diffusers cuts."""

    library = "diffusers"

    def __init__(self, problem, device, backend):
        from diffusers import ContextParallelConfig
        from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
        from diffusers.models import attention_dispatch
        from diffusers.models._modeling_parallel import ParallelConfig
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(problem, backend, problem.world)
        config = config_of(ContextParallelConfig, backend, problem.world)
        mesh = init_device_mesh(device.kind, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        parallel = ParallelConfig(context_parallel_config=config)
        parallel.setup(problem.rank, problem.world, device.place, mesh=mesh)
        is_anything = backend.endswith("_anything")
        shard = PartitionAnythingSharder.shard_anything if is_anything else EquipartitionSharder.shard
        self.take([shard(x, 1, config._flattened_mesh) for x in problem.whole], problem.first)
        forward, backward = device.diffusers_kernels()
        self.attend = partial(
            attention_dispatch._templated_context_parallel_attention,
            forward_op=forward,
            backward_op=backward,
            _parallel_config=parallel,
        )


class _Ring(torch.autograd.Function):
    """Blocks of keys go to the rank below at every step, so that step s meets the block of rank + s."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out = lse = None
        for keys in ring.blocks(k, v):
            block, block_lse = ring.device.attend(q, *keys)
            block, block_lse = block.float(), block_lse.float()
            if out is None:
                out, lse = block, block_lse
                continue
            both = torch.logaddexp(lse, block_lse)
            out.mul_((lse - both).exp_().unsqueeze(-1)).add_(block.mul_((block_lse - both).exp_().unsqueeze(-1)))
            lse = both
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        ring, dq, arriving = ctx.ring, None, None
        for step, keys in enumerate(ring.blocks(k, v)):
            step_dq, *step_dkv = ring.device.gradients(dout, q, *keys, out, lse)
            dq = step_dq.float() if dq is None else dq.add_(step_dq)
            sums = torch.stack(step_dkv).float()
            if arriving is not None:
                sums += arriving.wait()
            # A block's sums follow it, one step behind, and the last step brings them home.
            arriving = ring.exchange(sums, ring.lengths[(ring.rank + step + 1) % ring.world])
        dk, dv = arriving.wait().to(k.dtype)
        return dq.to(q.dtype), dk, dv, None


@dataclass
class _Arriving:
    """A block that is on its way here; what was sent is kept until it has left."""

    block: torch.Tensor
    sent: torch.Tensor
    requests: list

    def wait(self):
        for request in self.requests:
            request.wait()
        return self.block


class TorchRing(Row):
    """A ring as one writes it with torch.distributed: the next block is on its way while this one is computed."""

    library = "torch.distributed"

    def __init__(self, problem, device, backend):
        super().__init__(problem, backend, problem.world)
        self.device, self.rank, self.world = device, problem.rank, problem.world
        self.lengths = cut(problem.tokens, problem.world)
        self.take(problem.own(), problem.first)

    def attend(self, q, k, v):
        return _Ring.apply(q, k, v, self)

    def exchange(self, block, rows):
        """Send (2, 1, S, H, D) to the rank below; one of `rows` rows comes from the rank above."""
        shape = list(block.shape)
        shape[2] = rows
        coming = block.new_empty(shape)
        below, above = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        pair = [dist.P2POp(dist.isend, block, below), dist.P2POp(dist.irecv, coming, above)]
        return _Arriving(coming, block, dist.batch_isend_irecv(pair))

    def blocks(self, k, v):
        block = torch.stack((k, v))
        for step in range(self.world):
            is_last = step == self.world - 1
            arriving = None if is_last else self.exchange(block, self.lengths[(self.rank + step + 1) % self.world])
            yield block.unbind(0)
            block = None if is_last else arriving.wait()


def rows_of(backends, with_peers, device, world):
    """(library, backend, a function of a problem and a device that makes the row)."""
    rows = [(Ours, backend, OursAlone if backend == "none" else Ours) for backend in backends]
    if with_peers and "none" in backends:
        rows.append((Torch, "none", Torch))
        threads = min(world, device.cores())
        if device.kind == "cpu" and threads > 1:
            rows.append((Torch, f"none, {threads} threads", partial(Torch, threads=threads)))
    if with_peers:
        rows += [(Diffusers, backend, Diffusers) for backend in backends if backend != "none"]
        rows += [(TorchRing, backend, TorchRing) for backend in backends if backend == "ring"]
    return [(kind.library, backend, partial(make, backend=backend)) for kind, backend, make in rows]
