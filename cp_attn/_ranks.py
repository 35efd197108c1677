"""Which ranks there are: read from what launchers set, from torch.distributed, or from a mesh.

Everything here but `place` is a pure function of its arguments.
"""

import os
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

HOW_TO_LAUNCH = "start the script with, for example: torchrun --nproc-per-node=2 script.py"


@dataclass(frozen=True)
class Job:
    """The processes that were started together, and this one among them."""

    launcher: str
    rank: int
    world: int
    local_world: int  # ranks of this host, in one stretch of rank numbers; 0: no such stretch is known
    key: str  # tells this job from the others on the machine


class Place(NamedTuple):
    """This process in its context-parallel region."""

    rank: int  # row-major ring x ulysses
    world: int
    members: tuple[int, ...]  # the job's ranks that form the region, in the region's order
    job: str
    is_spread: bool  # over several hosts, as far as one can know
    is_whole: bool  # all ranks of the job are members
    local_world: int  # ranks of the job on this host, as far as one can know

    def key(self, count):
        """Name the meeting number `count` of these members."""
        return f"{self.job}/ranks {','.join(map(str, sorted(self.members)))}/{count}"


class _Launcher(NamedTuple):
    name: str
    rank: str
    world: str
    local_world: str
    job: tuple[str, ...]  # variables of which the first one set names the job


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ()),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMIX_NAMESPACE", "PMI_JOBID", "PMI_PORT")),
    # srun sets the step's variables; a batch script alone has SLURM_PROCID, too, but it is no rank.
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", ("SLURM_JOB_ID",)),
)


def discover(environ, parent):
    """Return the `Job` that the environment describes, or None.

    `parent` is the parent process's id: MPICH's ranks of a host have one parent, and nothing else in common.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in environ and launcher.world in environ:
            rank = _number(environ, launcher.rank)
            world = _number(environ, launcher.world)
            if rank >= world:
                raise RuntimeError(f"{launcher.rank} is {rank}, but {launcher.world} is {world}: ranks count from 0")
            local_world = _local_world(environ, launcher, world)
            return Job(launcher.name, rank, world, local_world, _job_key(environ, launcher, parent))
    return None


def _number(environ, name):
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise RuntimeError(f"{name} is {text!r}; a whole number is needed")
    return int(text)


def _local_world(environ, launcher, world):
    if launcher.name == "Slurm":
        return world if environ.get("SLURM_STEP_NUM_NODES", "1") == "1" else 0
    return _number(environ, launcher.local_world) if launcher.local_world in environ else world


def _job_key(environ, launcher, parent):
    address = ":".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")).strip(":")
    if launcher.name == "torchrun":
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        if not run and not address:
            raise RuntimeError(
                "RANK and WORLD_SIZE are set, but neither TORCHELASTIC_RUN_ID nor MASTER_ADDR and MASTER_PORT, "
                f"which tell one job from another; {HOW_TO_LAUNCH}"
            )
        return f"torchrun {run} {environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {address}"
    name = next((environ[v] for v in launcher.job if environ.get(v)), "")
    if launcher.name == "Slurm":
        return f"Slurm {name}.{environ.get('SLURM_STEP_ID', '0')}"
    return f"{launcher.name} {name or address or f'parent {parent}'}"


def region(job, ring, ulysses, mesh=None):
    """Return this rank's `Place` for the degrees, in the whole job or in a mesh of it.

    `mesh` is None or (names of the dims, nested lists of ranks).
    """
    if mesh is None:
        members = tuple(range(job.world))
        if ring * ulysses != job.world:
            raise ValueError(
                f"ring_degree {ring} x ulysses_degree {ulysses} is {ring * ulysses} ranks, but there are {job.world}: "
                f"choose degrees whose product is {job.world}, or pass a mesh whose other dims make up for the rest"
            )
    else:
        members = _members(job.rank, ring, ulysses, *mesh)
    hosts = {m // job.local_world for m in members} if job.local_world else set(members)
    return Place(
        rank=members.index(job.rank),
        world=len(members),
        members=members,
        job=job.key,
        is_spread=len(hosts) > 1,
        is_whole=len(members) == job.world,
        local_world=job.local_world or job.world,
    )


def _members(rank, ring, ulysses, names, ranks):
    names = tuple(names or ())
    for name in ("ring", "ulysses"):
        if names.count(name) != 1:
            raise ValueError(f"the mesh needs one dim named {name!r}; its dims are named {list(names)}")
    cells = dict(_cells(ranks))
    at = next((cell for cell, r in cells.items() if r == rank), None)
    if at is None:
        raise ValueError(f"rank {rank} is not in the mesh; its ranks are {sorted(cells.values())}")
    dims = [names.index("ring"), names.index("ulysses")]
    own = {
        tuple(cell[d] for d in dims): r
        for cell, r in cells.items()
        if all(cell[d] == at[d] for d in range(len(names)) if d not in dims)
    }
    sizes = tuple(1 + max(cell[i] for cell in own) for i in range(2))
    if sizes != (ring, ulysses):
        raise ValueError(
            f"the mesh has {sizes[0]} ranks along 'ring' and {sizes[1]} along 'ulysses' (dims {list(names)}), but "
            f"ring_degree is {ring} and ulysses_degree is {ulysses}; both must agree"
        )
    return tuple(own[cell] for cell in sorted(own))


def _cells(ranks, at=()):
    if not isinstance(ranks, (list, tuple)):
        yield at, int(ranks)
        return
    for i, part in enumerate(ranks):
        yield from _cells(part, (*at, i))


def _read_mesh(mesh):
    names, ranks = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
    if not names or not hasattr(ranks, "tolist"):
        raise ValueError(
            f"mesh is a {type(mesh).__name__} with dim names {names}; a torch DeviceMesh with the dims 'ring' and "
            "'ulysses' is needed"
        )
    return tuple(names), ranks.tolist()


def torch_distributed():
    """Return torch.distributed where it is initialised, else None; torch is not imported for that."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_there else None


def _torch_job(job):
    """Return the job as an initialised torch.distributed knows it; `job` where there is none or they agree."""
    distributed = torch_distributed()
    if distributed is None:
        return job
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if job is not None and (job.rank, job.world) == (rank, world):
        return job
    # The environment does not name these ranks' job; torch's store does, by the word that the first of them leaves.
    store = distributed.distributed_c10d._get_default_store()
    word = store.compare_set("cp_attn/job", "", os.urandom(8).hex()).decode()
    return Job("torch.distributed", rank, world, world if job is None else job.local_world, f"torch {word}")


def whole_job(environ=None):
    """Return this process's `Place` among all ranks of its job, or None: it has no job."""
    try:
        job = _torch_job(discover(os.environ if environ is None else environ, os.getppid()))
        return None if job is None else region(job, job.world, 1)
    except RuntimeError:
        return None


def place(config, environ=None):
    """Return this process's `Place` for a config.

    Raises
    ------
    RuntimeError
        No launcher and no initialised torch.distributed says which rank this is.
    ValueError
        The degrees do not fit the ranks or the mesh.
    """
    job = _torch_job(discover(os.environ if environ is None else environ, os.getppid()))
    if job is None:
        looked = "; ".join(f"{x.rank} and {x.world} ({x.name})" for x in _LAUNCHERS)
        raise RuntimeError(
            f"no rank environment: neither {looked} are set, nor is torch.distributed initialised; {HOW_TO_LAUNCH}"
        )
    mesh = None if config.mesh is None else _read_mesh(config.mesh)
    return region(job, config.ring_degree, config.ulysses_degree, mesh)
