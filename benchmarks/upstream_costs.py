"""What a call of diffusers' context-parallel attention asks of a GPU, counted while its own code runs on rank 0.

No GPU and no peer is needed: tensors are on torch's meta device, which has shapes and no memory, and the process group
is torch's fake one. An operator that makes or changes a tensor counts as one launch, whatever it starts inside.
"""

import contextlib
import itertools
import weakref
from dataclasses import asdict, dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that launch nothing beside those that torch calls views.
WITHOUT_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"}
BACKENDS = {"_native_flash": "_native_flash_attention", "flash": "_flash_attention"}


@dataclass
class Costs:
    """Of one rank and one call."""

    attention: int = 0  # launches
    other: int = 0
    written_bytes: int = 0  # by both
    exchanges: int = 0  # collectives
    size_gathers: int = 0  # of them, those by which ranks tell each other their rows
    sent_bytes: int = 0
    host_waits: int = 0  # for the device
    transient_bytes: int = 0  # the peak beyond inputs and outputs
    kept_bytes: int = 0  # of them, since the forward


def tensors_of(result):
    """The tensors in what an operator returned."""
    results = result if isinstance(result, (tuple, list)) else [result]
    return [x for x in results if isinstance(x, torch.Tensor)]


@dataclass
class Memory:
    """Which storages were alive when."""

    events: list = field(default_factory=list)  # (number of the storage, bytes gained or lost)
    numbers: dict = field(default_factory=dict)  # of living storages, by their address
    count: itertools.count = field(default_factory=itertools.count)

    def notice(self, tensor):
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.numbers:
            return
        number = self.numbers[address] = next(self.count)
        bytes_ = storage.nbytes()
        self.events.append((number, bytes_))
        weakref.finalize(storage, self.forget, address, number, bytes_)

    def forget(self, address, number, bytes_):
        del self.numbers[address]
        self.events.append((number, -bytes_))

    def restart(self):
        """What is alive now has been since the start."""
        alive = set(self.numbers.values())
        self.events = [event for event in self.events if event[0] in alive]

    def alive(self, given):
        """What is alive now, without the storages of `given`."""
        return sum(bytes_ for _, bytes_ in self.events_beside(given))

    def peak(self, given):
        """The most that was alive at a time, without the storages of `given`."""
        return max(itertools.accumulate(bytes_ for _, bytes_ in self.events_beside(given)), default=0)

    def events_beside(self, given):
        numbers = {self.numbers.get(x.untyped_storage()._cdata) for x in given}
        return [event for event in self.events if event[0] not in numbers]


class Counter(TorchDispatchMode):
    """Counts the operators that run inside it. `rows`: those of each rank, which ranks tell each other."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.costs, self.memory = rows, Costs(), Memory()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        namespace, name = operator.namespace, operator._schema.name.split("::")[1]
        if name in ("_wrap_tensor_autograd", "wait_tensor"):
            return args[0]  # the stream waits, not the host; on the meta device it would be a new tensor
        result = operator(*args, **(kwargs or {}))
        made = tensors_of(result)
        if name == "log_sigmoid_forward":
            made = made[:1]  # its buffer is empty on CUDA
        if namespace in ("c10d", "_c10d_functional"):
            self.collective(name, args)
        elif name in ("_local_scalar_dense", "lift_fresh"):
            # .item() copies a number to the host and waits; torch.tensor(number, device=...) does so the other way.
            self.costs.other += 1
            self.costs.host_waits += 1
        elif "scaled_dot_product" in name:
            self.attention(made)
        elif not operator.is_view and name not in WITHOUT_LAUNCH:
            self.costs.other += 1
            self.costs.written_bytes += sum(x.nbytes for x in made)
        for x in made:
            self.memory.notice(x)
        return result

    def attention(self, made):
        self.costs.attention += 1
        self.costs.written_bytes += sum(x.nbytes for x in made)

    def collective(self, name, args):
        self.costs.exchanges += 1
        if name == "all_gather_into_tensor":
            block, world = args[:2]
            self.costs.sent_bytes += (world - 1) * block.nbytes
        elif name == "all_to_all_single":
            block, _, splits = args[:3]
            self.costs.sent_bytes += block.nbytes // sum(splits) * sum(splits[1:])  # splits[0] stays here
        elif name == "allgather_":
            sizes, own = args[0][0], args[1][0]
            self.costs.size_gathers += 1
            self.costs.sent_bytes += (len(sizes) - 1) * own.nbytes
            for size, rows in zip(sizes, self.rows, strict=True):
                size.fill_(rows)
        else:
            raise NotImplementedError(f"the bytes that {name} sends are not known here")


@contextlib.contextmanager
def flash_attn(counter):
    """The package flash_attn, which "flash" calls, as far as its results go."""

    def forward(q, k, v, *rest):
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        counter.attention([out, lse])
        return out, lse, None, torch.empty(2, dtype=torch.int64, device=q.device)

    def backward(dout, q, k, v, out, lse, dq, dk, dv, *rest):
        counter.attention([dq, dk, dv])

    names = {"_wrapped_flash_attn_forward": forward, "_wrapped_flash_attn_backward": backward}
    with mock.patch.multiple(attention_dispatch, **names):
        yield


@contextlib.contextmanager
def parallel_config(ring, ulysses, anything):
    """diffusers' config of rank 0 of as many ranks."""
    kind = {f"{'ring' if ring > 1 else 'ulysses'}_anything": True} if anything else {}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ring * ulysses)
    try:
        mesh = init_device_mesh("cuda", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        part = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **kind)
        config = ParallelConfig(context_parallel_config=part)
        config.setup(0, ring * ulysses, torch.device("cuda"), mesh=mesh)
        yield config
    finally:
        dist.destroy_process_group()


def count(case, backend):
    """The costs of `case` (gpu_costs.Case) on rank 0; None where diffusers has no such call."""
    shape, is_backward = (1, case.rows[0], case.heads, case.dim), case.op == "backward"
    call = getattr(attention_dispatch, BACKENDS[backend])
    q, k, v, dout = given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    for x in (q, k, v):
        x.requires_grad_(is_backward)
    counter = Counter(case.rows)
    # Sizes are gathered on the accelerator; here they are real numbers.
    accelerator = mock.patch("torch.accelerator.current_accelerator", lambda: torch.device("cpu"))
    with parallel_config(case.ring, case.ulysses, case.is_anything) as config, flash_attn(counter), accelerator:
        with counter:
            out = call(q, k, v, _parallel_config=config)
        given.append(out)
        if is_backward:
            counter.memory.restart()
            counter.costs = Costs(kept_bytes=counter.memory.alive(given))
            try:
                with counter:
                    given += torch.autograd.grad(out, (q, k, v), dout)
            except NotImplementedError:
                return None
    counter.costs.transient_bytes = counter.memory.peak(given)
    return asdict(counter.costs)
