"""Where ranks of several hosts meet: rank 0 listens, and the launcher's store or a fixed port tells the others.

The meeting itself is `csrc/control/meet_hosts.c`.
"""

import os
import socket
import time
from contextlib import contextmanager, nullcontext

from . import _C, _ranks

PATIENCE = 60.0  # seconds, at least: as for the ranks of one host


@contextmanager
def meeting(place, key, config, error=None):
    """Yield (key, root) for a context of this `Place`; root is None where its ranks are on one host.

    Raises
    ------
    CommTimeout
        Rank 0 has not told where it listens; `error`, where this rank has found one already.
    RuntimeError
        Nothing tells where to meet, or the port is taken.
    NotImplementedError
        Without a store only the whole job can meet.
    """
    if not place.is_spread:
        yield key, None
        return
    store = _store(os.environ)
    if store is None:
        meet = _meet_at_a_port(place, key, os.environ)
    else:
        meet = _meet_by_store(place, key, os.environ, store, error, max(PATIENCE, getattr(config, "timeout", 0.0)))
    with meet as found:
        yield found


@contextmanager
def _meet_at_a_port(place, key, environ):
    """Meet at MASTER_ADDR, where rank 0 is."""
    if not place.is_whole:
        raise NotImplementedError(
            f"ranks {list(place.members)} are some of a job on several hosts, and can find each other through torch's "
            "store only: start them with torchrun, or call torch.distributed.init_process_group first"
        )
    port = _port(environ)
    family, host = _resolve(_master(environ), port)
    with _listen(family, port) if place.rank == 0 else nullcontext() as listener:
        secret = environ.get("CP_ATTN_SECRET", "")
        yield f"{key} {secret}", (host, str(port), -1 if listener is None else listener.fileno())


@contextmanager
def _meet_by_store(place, key, environ, store, error, patience):
    """Meet where rank 0 says in the store; only who can read that knows the secret."""
    name = f"cp_attn/{key}"
    if place.rank != 0:
        host, port, secret = _read(store, name, place, error, patience)
        yield f"{key} {secret}", (_resolve(host, port)[1], port, -1)
        return
    master = _master(environ)
    family, host = _resolve(master, 0)
    with _listen(family, 0) as listener:
        port, secret = str(listener.getsockname()[1]), os.urandom(16).hex()
        store.set(name, f"{_own_address(family, host) or master} {port} {secret}")
        try:
            yield f"{key} {secret}", (host, port, listener.fileno())
        finally:
            store.delete_key(name)


def _store(environ):
    """Return torch's store of the job, or None; the environment and the program decide, so all ranks do alike."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore

        return TCPStore(_master(environ), int(environ["MASTER_PORT"]), is_master=False)
    distributed = _ranks.torch_distributed()
    if distributed is None:
        return None
    return distributed.distributed_c10d._get_default_store()


def _read(store, name, place, error, patience):
    # `check` and not `wait`, which Ctrl-C cannot end.
    until = time.monotonic() + patience
    while not store.check([name]):
        if time.monotonic() > until:
            raise error or _C.CommTimeout(
                f"rank 0 of {place.world} did not appear to rank {place.rank} within {patience:.1f} s: it has not told "
                "in torch's store where it listens"
            )
        time.sleep(0.02)
    return store.get(name).decode().split(" ")


def _master(environ):
    if not environ.get("MASTER_ADDR"):
        raise RuntimeError("the ranks are on several hosts; set MASTER_ADDR to the name or address of rank 0's host")
    return environ["MASTER_ADDR"]


def _port(environ):
    name = "CP_ATTN_MASTER_PORT" if environ.get("CP_ATTN_MASTER_PORT") else "MASTER_PORT"
    text = environ.get(name, "")
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise RuntimeError(
            f"{name} is {text!r}; ranks of several hosts meet at the port CP_ATTN_MASTER_PORT, or else at the one "
            "above MASTER_PORT"
        )
    return int(text) + (name == "MASTER_PORT")


def _resolve(host, port):
    """Return (family, address as a number)."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as found:
        raise RuntimeError(f"{host!r}, where rank 0 is, is no name of a host: {found}") from None
    return family, address[0]


def _own_address(family, host):
    """Return this host's address on the way to `host`; None where it is the loopback's: it means nothing elsewhere."""
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing
        address = s.getsockname()[0]
    return None if address.startswith("127.") or address == "::1" else address


def _listen(family, port):
    """Return a socket that listens at `port`, at any where it is 0."""
    try:
        return socket.create_server(("", port), family=family, backlog=128)
    except OSError as found:
        raise RuntimeError(
            f"rank 0 cannot listen at port {port}, where the ranks of all hosts meet: {found}; choose another one with "
            "CP_ATTN_MASTER_PORT, the same for all ranks"
        ) from None
