"""The process group of the caller's mesh, by whose NCCL communicator the ranks' GPUs may be connected.

Newer torch shows the communicator of a group (`ProcessGroupNCCL._comm_ptr`) once it has been made: by
`init_process_group(device_id=...)` or by a first collective.
"""

import ctypes
import os
import sys

from . import _ranks

UNDEFINED = -(2**31)  # a setting of NCCL that nobody has chosen


def find(mesh, rank, world, ordinal):
    """Return what `struct cp_group` (csrc/exec/accelerator.h) says of the mesh's group, or None: there is none.

    A group of the mesh counts that has `world` ranks, this one as number `rank`, and a communicator on that GPU.
    Whether all ranks have found the same is for them to compare.
    """
    library = _library()
    if os.environ.get("CP_ATTN_NCCL_GROUP") == "0" or not library:
        return None
    for group in _groups(mesh):
        if (group.rank(), group.size()) != (rank, world):
            continue
        backend = _backend(group, ordinal)
        communicator = _communicator(backend, ordinal)
        if communicator:
            return communicator, library, group.group_name, *_settings(backend)
    return None


def _groups(mesh):
    """Yield the groups that may have all ranks of the region: of a dim, of the flattened mesh, of the whole job."""
    distributed = _ranks.torch_distributed()
    if distributed is None:
        return
    for name in ("ring", "ulysses", "ring_ulysses"):
        try:
            yield mesh.get_group(name)
        except (KeyError, RuntimeError, TypeError, ValueError):
            continue  # nobody has flattened it, or this rank is in no group of that dim
    yield distributed.group.WORLD


def _backend(group, ordinal):
    """Return the group's backend for that GPU, or None."""
    try:
        return group._get_backend(sys.modules["torch"].device("cuda", ordinal))
    except RuntimeError:
        return None  # a group of gloo alone


def _communicator(backend, ordinal):
    """Return the address of its NCCL communicator, or 0: it has none, or one that shares with those made from it.

    What shares resources shares the abort, too: breaking a context would end the group's own work, unseen by torch.
    """
    if not hasattr(backend, "_comm_ptr") or os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") != "0":
        return 0
    if getattr(backend.options.config, "split_share", UNDEFINED) not in (0, UNDEFINED):
        return 0
    with sys.modules["torch"].cuda.device(ordinal):  # torch looks for that of the current GPU
        return backend._comm_ptr()


def _settings(backend):
    config = backend.options.config
    return [getattr(config, name, UNDEFINED) for name in ("cga_cluster_size", "min_ctas", "max_ctas")]


def _library():
    """Return the address of ncclCommSplit in the NCCL that torch calls; 0: torch is not linked with one."""
    try:
        torch_cuda = ctypes.CDLL("libtorch_cuda.so", os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.cast(torch_cuda.ncclCommSplit, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return 0
