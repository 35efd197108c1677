"""Ranks on two hosts: two network namespaces with a cable between them, two ranks in each; and where they meet."""

import re
import subprocess
import sys
import uuid

import pytest
from launch import HERE, clean_environ, free_port, launch, lines

import cp_attn
from cp_attn import _C, _hosts, _ranks

WORLD = 4
ADDRESSES = ("10.77.13.1", "10.77.13.2")
CALLS = [f"calls:{layout}" for layout in ("ring", "ring_anything", "ulysses", "unified", "unified_anything")]
SCENES = [*CALLS, "disagreement", "error_at_init", "two_at_once", "forked", "interrupted", "leave_open"]


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)


def _end(host):
    """Return the name of the cable's end in a host."""
    return host.replace("_attn_", "")


def _connect(names, ends):
    """Return what the system says against it, or None."""
    steps = [("netns", "add", name) for name in names]
    steps.append(("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1]))
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        steps.append(("-n", name, "addr", "add", f"{address}/24", "dev", end))
        steps += [("-n", name, "link", "set", link, "up") for link in (end, "lo")]
    for step in steps:
        done = _ip(*step)
        if done.returncode != 0:
            return f"ip {' '.join(step)}: {done.stderr.strip()}"
    return None


@pytest.fixture(scope="module")
def hosts():
    """Yield the names of two namespaces."""
    word = uuid.uuid4().hex[:6]
    names = f"cp_attn_{word}a", f"cp_attn_{word}b"
    try:
        problem = _connect(names, [_end(name) for name in names])
    except FileNotFoundError:
        pytest.skip("no `ip` (iproute2) to make network namespaces with")
    try:
        if problem is not None:
            pytest.skip(f"no network namespaces here: {problem}")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def run(hosts, *scenes, **environ):
    """Return the ranks, 0 and 1 on the first host, 2 and 3 on the second."""
    environ = dict(LOCAL_WORLD_SIZE="2", MASTER_ADDR=ADDRESSES[0]) | environ
    return launch("ranks_hosts.py", WORLD, *scenes, timeout=60, where=lambda rank: inside(hosts[rank // 2]), **environ)


def inside(host):
    return ["ip", "netns", "exec", host]


@pytest.fixture(scope="module", params=["cable", "loopback"])
def ranks(request):
    """Where there can be no namespaces, one host that is taken for two still shows most."""
    if request.param == "loopback":
        return launch("ranks_hosts.py", WORLD, *SCENES, timeout=60, LOCAL_WORLD_SIZE="2")
    return run(request.getfixturevalue("hosts"), *SCENES)


@pytest.mark.parametrize("scene", SCENES)
def test_scene(ranks, scene):
    for line in lines(ranks, scene=scene):
        if scene in CALLS:
            assert line["result"] < 2e-6
        if scene == "interrupted" and line["rank"] == 3:
            assert line["result"] == "KeyboardInterrupt"
        elif scene == "interrupted":
            assert "rank 3 was interrupted in attention" in line["result"]
    assert {rank.code for rank in ranks} == {0}


def test_a_rank_that_is_killed_is_named_within_a_second(hosts):
    ranks = run(hosts, "killed")
    killed = next(line["killed"] for line in ranks[1].lines if "killed" in line)
    for rank in (0, 2, 3):
        kind, text, at = ranks[rank].line(scene="killed")["result"]
        assert kind == "CommError"
        assert "rank 1 is gone" in text and "in attention, call 3; it was last seen outside, after attention" in text
        assert at - killed < 1.2


def test_a_rank_that_is_stopped_is_named_by_the_deadline(hosts):
    for line in lines(run(hosts, "stopped"), scene="stopped"):
        kind, text, _ = line["result"]
        assert kind == "CommTimeout" or line["rank"] == 2  # that one comes to a context that is broken
        assert re.search(r"rank 2 did not come to attention, call \d+ within 1.5 s", text)
        assert re.search(r"ranks 0, 1, 3: waiting for rank 2 in attention, call \d+ \(1\.\d s\)", text)
        assert "rank 2: outside, after attention" in text


def test_a_host_that_vanishes_is_named_by_the_deadline(hosts):
    try:
        ranks = run(hosts, f"cut:{_end(hosts[0])}")
    finally:
        _ip("-n", hosts[0], "link", "set", _end(hosts[0]), "up")
    for line in lines(ranks, scene=f"cut:{_end(hosts[0])}"):
        kind, text, _ = line["result"]
        assert kind == "CommTimeout"
        assert ("ranks 2, 3" if line["rank"] < 2 else "ranks 0, 1") + " did not come to attention" in text


def test_strangers_at_the_port_disturb_nobody(hosts):
    """Something on the second host knocks all the time while the ranks meet."""
    port = free_port()
    knock = (
        "import socket, time\nwhile True:\n try:\n"
        f"  with socket.create_connection(('{ADDRESSES[0]}', {port + 1}), 1) as s:\n   s.sendall(bytes(5000))\n"
        " except OSError:\n  pass\n time.sleep(0.001)"
    )
    stranger = subprocess.Popen([*inside(hosts[1]), sys.executable, "-c", knock])
    try:
        for line in lines(run(hosts, "disagreement", MASTER_PORT=str(port)), scene="disagreement"):
            assert line["result"] == "agreed"
    finally:
        stranger.kill()
        stranger.wait()


def test_with_torchrun(hosts):
    """The launcher's store, which tells where rank 0 listens, and a secret."""
    pytest.importorskip("torch")
    port = str(free_port())
    agents = [
        subprocess.Popen(
            [*inside(host), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            + ["--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", ADDRESSES[0], "--master-port", port]
            + [str(HERE / "ranks_hosts.py"), "calls:unified", "two_at_once"],
            env=clean_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, host in enumerate(hosts)
    ]
    try:
        said = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum(out.count('"failed": null') for out, _ in said) == 2 * WORLD


# --- where to meet ---


def place(rank=0, is_spread=True, is_whole=True):
    return _ranks.Place(rank, WORLD, tuple(range(WORLD)), "job", is_spread, is_whole, 1)


class Store(dict):
    """What is used of torch's."""

    def set(self, name, value):
        self[name] = value.encode()

    def get(self, name):
        return self[name]

    def check(self, names):
        return all(name in self for name in names)

    def delete_key(self, name):
        del self[name]


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(_hosts, "_store", lambda environ: made)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return made


def test_one_host_needs_nothing(monkeypatch):
    monkeypatch.setattr(_hosts, "_store", None)
    with _hosts.meeting(place(is_spread=False), "key", None) as found:
        assert found == ("key", None)


def test_the_store_tells_all_the_same(store):
    with _hosts.meeting(place(0), "key", None) as (key, root):
        assert root[2] >= 0
        with _hosts.meeting(place(3), "key", None) as (other_key, other_root):
            assert other_key == key != "key"
            assert other_root == (*root[:2], -1)
    assert not store  # nobody needs it any more


def test_a_secret_is_new_each_time(store):
    keys = set()
    for _ in range(3):
        with _hosts.meeting(place(0), "key", None) as (key, _):
            keys.add(key)
    assert len(keys) == 3


def test_a_store_in_which_rank_0_says_nothing(store, monkeypatch):
    monkeypatch.setattr(_hosts, "PATIENCE", 0.1)
    with pytest.raises(cp_attn.CommTimeout, match="rank 0 of 4 did not appear to rank 2"):
        with _hosts.meeting(place(2), "key", None):
            pass
    with pytest.raises(ZeroDivisionError):  # an error of one's own is the better one
        with _hosts.meeting(place(2), "key", None, ZeroDivisionError()):
            pass


@pytest.mark.parametrize(
    "environ, words",
    [
        (dict(MASTER_PORT="29500"), "set MASTER_ADDR"),
        (dict(MASTER_ADDR="127.0.0.1"), "MASTER_PORT is ''"),
        (dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="x"), "MASTER_PORT is 'x'"),
        (dict(MASTER_ADDR="127.0.0.1", CP_ATTN_MASTER_PORT="65536"), "CP_ATTN_MASTER_PORT is '65536'"),
        (dict(MASTER_ADDR="no.such.host.invalid", MASTER_PORT="29500"), "no.such.host.invalid"),
    ],
)
def test_nothing_says_where(monkeypatch, environ, words):
    for name in ("MASTER_ADDR", "MASTER_PORT", "CP_ATTN_MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=words):
        with _hosts.meeting(place(1), "key", None):
            pass


def test_ports(monkeypatch):
    assert _hosts._port(dict(MASTER_PORT="29500")) == 29501
    assert _hosts._port(dict(MASTER_PORT="29500", CP_ATTN_MASTER_PORT="400")) == 400


def test_a_port_that_is_taken():
    port = str(free_port())
    environ = dict(RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    done = subprocess.run(
        [sys.executable, str(HERE / "ranks_hosts.py"), "port"],
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "choose another one with CP_ATTN_MASTER_PORT" in done.stdout, done.stderr


def test_a_part_of_a_job_needs_a_store(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(NotImplementedError, match="torchrun"):
        with _hosts.meeting(place(is_whole=False), "key", None):
            pass


def test_root_must_fit():
    config = cp_attn.ContextParallelConfig(ring_degree=2)
    for root, kind in ((5, TypeError), (("a", "b"), TypeError), (("nowhere", "1", -1), ValueError)):
        with pytest.raises(kind):
            _C.Context(config, rank=1, world=2, key="key", root=root)
