"""Rank discovery, as the pure function that it is."""

from types import SimpleNamespace

import numpy as np
import pytest

from cp_attn import _ranks

TORCHRUN = dict(
    RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
)


def discover(environ):
    return _ranks.discover(environ, parent=77)


@pytest.mark.parametrize(
    "name, environ, rank, world",
    [
        ("torchrun", TORCHRUN, 1, 4),
        ("Open MPI", dict(OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE="3", PMIX_NAMESPACE="a"), 2, 3),
        ("MPICH", dict(PMI_RANK="0", PMI_SIZE="2"), 0, 2),
        ("Slurm", dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_JOB_ID="9", SLURM_STEP_ID="0"), 1, 2),
    ],
)
def test_launchers(name, environ, rank, world):
    job = discover(environ)
    assert (job.launcher, job.rank, job.world, job.local_world) == (name, rank, world, world)


def test_nothing_set():
    assert discover({"HOME": "/root", "SLURM_PROCID": "0", "SLURM_JOB_ID": "9"}) is None


def test_torchrun_is_asked_first():
    assert discover(TORCHRUN | dict(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")).launcher == "torchrun"


@pytest.mark.parametrize("change", [dict(RANK="x"), dict(WORLD_SIZE=""), dict(RANK="-1"), dict(RANK="4")])
def test_bad_numbers(change):
    (variable, value) = next(iter(change.items()))
    with pytest.raises(RuntimeError, match=variable) as e:
        discover(TORCHRUN | change)
    assert value in str(e.value)


@pytest.mark.parametrize(
    "change",
    [
        dict(MASTER_PORT="29501"),
        dict(MASTER_ADDR="::1"),
        dict(TORCHELASTIC_RUN_ID="job"),
        dict(TORCHELASTIC_RESTART_COUNT="1"),
    ],
)
def test_jobs_have_different_keys(change):
    assert discover(TORCHRUN).key != discover(TORCHRUN | change).key
    assert discover(TORCHRUN).key == discover(TORCHRUN | dict(RANK="3", LOCAL_RANK="3")).key


def test_job_needs_a_name():
    with pytest.raises(RuntimeError, match="MASTER_PORT.*torchrun"):
        discover(dict(RANK="0", WORLD_SIZE="2"))


def test_mpich_falls_back_on_the_parent():
    assert discover(dict(PMI_RANK="0", PMI_SIZE="2")).key == "MPICH parent 77"


def job(rank=0, world=4, local_world=4):
    return _ranks.Job("torchrun", rank, world, local_world, "key")


def test_whole_job():
    place = _ranks.region(job(rank=3), 2, 2)
    assert (place.rank, place.world, place.members) == (3, 4, (0, 1, 2, 3))


@pytest.mark.parametrize("ring, ulysses, world", [(3, 1, 4), (2, 2, 2), (2, 1, 4)])
def test_degrees_do_not_fit(ring, ulysses, world):
    with pytest.raises(ValueError, match="mesh") as e:
        _ranks.region(job(world=world), ring, ulysses)
    assert f"{ring * ulysses} ranks" in str(e.value) and str(world) in str(e.value)


def test_more_hosts():
    assert not _ranks.region(job(), 2, 2).is_spread
    assert _ranks.region(job(local_world=2), 2, 2).is_spread
    assert _ranks.region(job(local_world=0), 2, 2).is_spread


def test_slurm_on_two_nodes():
    environ = dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_JOB_ID="9", SLURM_STEP_NUM_NODES="2")
    assert _ranks.region(discover(environ), 2, 1).is_spread


def test_a_region_within_one_host_of_several():
    mesh = (("dp", "ring", "ulysses"), [[[0], [1]], [[2], [3]]])
    place = _ranks.region(job(rank=2, local_world=2), 2, 1, mesh)
    assert place.members == (2, 3) and not place.is_spread and not place.is_whole


@pytest.mark.parametrize("rank", range(4))
def test_mesh_dims_are_found_by_name(rank):
    """Dims in another order: ring is the last one here, ulysses the first."""
    ranks = [[0, 1], [2, 3]]  # ranks[ulysses][ring]
    place = _ranks.region(job(rank=rank), 2, 2, (("ulysses", "ring"), ranks))
    assert place.members == (0, 2, 1, 3)
    ring_rank, ulysses_rank = divmod(place.rank, 2)
    assert ranks[ulysses_rank][ring_rank] == rank


def test_other_dims_make_regions():
    ranks = [[[0, 1]], [[2, 3]]]  # (ring, ulysses, dp)
    regions = [_ranks.region(job(rank=r), 2, 1, (("ring", "ulysses", "dp"), ranks)) for r in range(4)]
    assert [p.members for p in regions] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [p.rank for p in regions] == [0, 0, 1, 1]
    assert regions[0].key(0) == regions[2].key(0) != regions[1].key(0)
    assert regions[0].key(0) != regions[0].key(1)


@pytest.mark.parametrize(
    "names, ranks, words",
    [
        (("dp", "ulysses"), [[0, 1], [2, 3]], ("ring", "dp", "ulysses")),
        (("ring", "tp"), [[0, 1], [2, 3]], ("ulysses", "tp")),
        (("ring", "ulysses"), [[0, 1], [2, 3]], ("2 along 'ulysses'", "ulysses_degree is 1")),
        (("ring", "ulysses"), [[1], [2]], ("rank 0", "[1, 2]")),
    ],
)
def test_bad_meshes(names, ranks, words):
    with pytest.raises(ValueError) as e:
        _ranks.region(job(), 2, 1, (names, ranks))
    assert all(word in str(e.value) for word in words)


def place(mesh, ring=2, ulysses=2):
    config = SimpleNamespace(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
    return _ranks.place(config, TORCHRUN)


def test_a_mesh_of_another_build_of_torch():
    """Two attributes are all that is asked of it: no method, and nothing that is torch's own."""
    mesh = SimpleNamespace(mesh_dim_names=("ulysses", "ring"), mesh=np.array([[0, 1], [2, 3]]))
    assert place(mesh).members == (0, 2, 1, 3)
    mesh = SimpleNamespace(mesh_dim_names=["dp", "ulysses", "ring"], mesh=np.arange(4).reshape(2, 1, 2))
    assert place(mesh, ulysses=1).members == (0, 1)


@pytest.mark.parametrize(
    "attributes",
    [{}, dict(mesh_dim_names=("ring", "ulysses")), dict(mesh=np.eye(2)), dict(mesh=np.eye(2), mesh_dim_names=None)],
    ids=lambda attributes: " and ".join(attributes) or "nothing",
)
def test_a_mesh_that_lacks_something(attributes):
    with pytest.raises(ValueError, match="SimpleNamespace with dim names.*DeviceMesh.*'ring'.*'ulysses'"):
        place(SimpleNamespace(**attributes))
