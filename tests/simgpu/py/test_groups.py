"""The caller's process group: by whose NCCL communicator the ranks' GPUs are connected, and when they are not.

Groups are stand-ins with torch's interface; their communicators are those of the simulated NCCL.
"""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import pytest
import sim_gpu as sim
from test_calls import attend, gpus_of_nccl, refused, works  # noqa: F401  (a fixture)

from cp_attn import _C, _groups, _ranks

torch = pytest.importorskip("torch")
LIB = sim.LIB


class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


LIB.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
for name in ("ncclCommDestroy", "ncclCommAbort"):
    getattr(LIB, name).argtypes = [ctypes.c_void_p]
SPLIT = ctypes.cast(LIB.ncclCommSplit, ctypes.c_void_p).value

here = threading.local()  # what the thread's rank has


class Backend:
    """As ProcessGroupNCCL is."""

    def __init__(self, rank, **settings):
        self.rank, self.handle = rank, ctypes.c_void_p()
        self.options = SimpleNamespace(config=SimpleNamespace(**settings))

    def connect(self, world, id):
        sim.check(LIB.cudaSetDevice(self.rank))
        sim.check(LIB.ncclCommInitRank(ctypes.byref(self.handle), world, id, self.rank))

    def _comm_ptr(self):
        return self.handle.value or 0

    def shutdown(self):
        sim.check(LIB.cudaSetDevice(self.rank))
        sim.check(LIB.ncclCommDestroy(self.handle))
        self.handle = ctypes.c_void_p()


class Group:
    """As a ProcessGroup is, of one rank."""

    def __init__(self, backend, rank, world, name="7"):
        self.backend, self.group_name = backend, name
        self.rank, self.size = (lambda: rank), (lambda: world)

    def _get_backend(self, device):
        assert device == torch.device("cuda", self.rank())
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


class Mesh:
    mesh_dim_names = ("ring", "ulysses")

    def get_group(self, name):
        return here.groups[name]  # KeyError, as torch's where there is no such dim


@pytest.fixture
def region(gpus_of_nccl, monkeypatch):  # noqa: F811
    """Start ranks whose mesh has groups: `groups(rank, group)` names those of a rank, given the one of all."""
    opened = []
    monkeypatch.setattr(_groups, "_library", lambda: SPLIT)
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: contextlib.nullcontext())
    world_group = SimpleNamespace(group=SimpleNamespace(WORLD=Group(None, -1, 0)))
    monkeypatch.setattr(_ranks, "torch_distributed", lambda: world_group)

    def start(groups=lambda rank, group: {"ring": group}, settings=None, **config):
        ranks = gpus_of_nccl(mesh=Mesh(), **config)
        id = Id()
        sim.check(LIB.ncclGetUniqueId(ctypes.byref(id)))

        def connect(rank):
            backend = Backend(rank, **(settings or {}))
            backend.connect(ranks.world, id)
            here.groups = groups(rank, Group(backend, rank, ranks.world))
            return backend

        opened.append(ranks.run(connect))
        return ranks, opened[-1]

    yield start
    for backends in opened:
        for backend in backends:
            if backend.handle:
                backend.shutdown()


def splits(ranks):
    """Play a call; return how many ranks were connected by their group."""
    works(ranks, sim.Fast)
    return LIB.simnccl_splits()


def test_the_groups_communicator_connects_the_ranks(region):
    ranks, backends = region(ring_degree=3)
    assert splits(ranks) == 3
    works(ranks, sim.Array)  # connected once
    assert LIB.simnccl_splits() == 3
    ranks.close()
    assert LIB.simgpu_live().comms == 3  # the caller's


def test_it_is_found_in_any_dim_and_in_the_whole_job(region, monkeypatch):
    assert splits(region(lambda rank, group: {"ulysses": group}, ulysses_degree=2)[0]) == 2

    def flat(rank, group):
        part = Group(None, rank % 2, 2)
        return {"ring": part, "ulysses": part, "ring_ulysses": group}

    assert splits(region(flat, ring_degree=2, ulysses_degree=2)[0]) == 2 + 4

    def job(rank, group):
        here.all = group
        return {}

    class Job:
        WORLD = property(lambda self: here.all)

    monkeypatch.setattr(_ranks, "torch_distributed", lambda: SimpleNamespace(group=Job()))
    assert splits(region(job, ring_degree=2)[0]) == 2 + 4 + 2


def test_one_rank_without_it_and_all_do_without(region):
    def but_rank_1(rank, group):
        return {"ring": group} if rank != 1 else {}

    def unconnected(rank, group):
        return {"ring": group if rank != 1 else Group(Backend(1), 1, 3)}

    def of_gloo(rank, group):
        return {"ring": group if rank != 1 else Group(None, 1, 3)}

    def other(rank, group):
        return {"ring": Group(group.backend, rank, 3, name="8" if rank == 2 else "7")}

    def turned(rank, group):
        return {"ring": Group(group.backend, 2 - rank, 3)}

    def larger(rank, group):
        return {"ring": Group(group.backend, rank, 4)}

    def long_named(rank, group):
        return {"ring": Group(group.backend, rank, 3, name="g" * 64)}

    for groups in (but_rank_1, unconnected, of_gloo, other, turned, larger, long_named):
        assert splits(region(groups, ring_degree=3)[0]) == 0, groups.__name__


def test_a_group_that_says_one_thing_and_nccl_another(region):
    """torch's rank and size are compared with NCCL's own."""

    def crossed(rank, group):
        fake = Backend(rank)
        fake.handle = ctypes.c_void_p(BACKENDS[(rank + 1) % 2].handle.value)
        return {"ring": Group(fake, rank, 2)}

    ranks, BACKENDS = region(ring_degree=2)
    ranks.run(lambda rank: setattr(here, "groups", crossed(rank, None)))
    assert splits(ranks) == 0


@pytest.mark.parametrize("reason", ["library", "shared", "environment", "sharing environment"])
def test_it_is_left_alone(region, monkeypatch, reason):
    if reason == "library":
        monkeypatch.setattr(_groups, "_library", lambda: SPLIT + 1)
    if reason == "environment":
        monkeypatch.setenv("CP_ATTN_NCCL_GROUP", "0")
    if reason == "sharing environment":
        monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    settings = {"split_share": 1 if reason == "shared" else 0}
    assert splits(region(ring_degree=2, settings=settings)[0]) == 0


def test_nccl_gets_the_settings_of_the_group(region):
    asked = (ctypes.c_int * 3)()
    for settings, wanted in (
        ({"max_ctas": 8, "min_ctas": 4}, [_groups.UNDEFINED, 4, 8]),
        ({"cga_cluster_size": 2}, [2, _groups.UNDEFINED, _groups.UNDEFINED]),
    ):
        works(region(ring_degree=2, settings=settings)[0], sim.Fast)
        LIB.simnccl_split_settings(asked)
        assert list(asked) == wanted


def test_a_group_that_ends_before_the_context(region):
    ranks, backends = region(ring_degree=2)
    assert splits(ranks) == 2
    ranks.run(lambda rank: backends[rank].shutdown())
    works(ranks, sim.Fast)


def test_a_context_that_breaks_leaves_the_group_alone(region):
    ranks, backends = region(ring_degree=2, timeout=20)
    assert splits(ranks) == 2
    LIB.simnccl_fail_after(1)
    for _ in range(200):
        caught = ranks.errors(attend(ranks, sim.Array))
        if all(caught):
            break
    LIB.simnccl_fail_after(-1)
    refused(ranks, sim.Array, _C.CommError, "broken")
    assert all(backend.handle for backend in backends)
    ranks.close()
    assert LIB.simgpu_live().comms == 2


def test_what_the_mesh_raises_is_told_to_all(region):
    class Broken(Group):
        def _get_backend(self, device):
            raise OSError("the store is gone")

    ranks, _ = region(lambda rank, group: {"ring": Broken(None, rank, 2) if rank else group}, ring_degree=2)
    caught = ranks.errors(attend(ranks, sim.Fast))
    assert all("the store is gone" in str(error) for error in caught), caught
    works(ranks, lambda x, r: x)


def test_without_a_mesh_nobody_looks(gpus_of_nccl, monkeypatch):  # noqa: F811
    monkeypatch.setattr(_groups, "find", None)
    works(gpus_of_nccl(ring_degree=2), sim.Fast)


def test_torch_without_nccl_has_no_library():
    assert torch.distributed.is_nccl_available() or _groups._library() == 0
