"""benchmarks.table: every row is there or says why, none is timed that computes something else, files are complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import HERE, clean_environ, launch

pytest.importorskip("diffusers", minversion="0.42")
pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
BACKENDS = ("none", "ulysses", "ring", "unified", "ulysses_anything", "ring_anything")
PEERS = {("torch", "none"), ("diffusers", "ring"), ("torch.distributed", "ring")}
SMALL = ["--heads", "4", "--dim", "16", "--steps", "2"]
PNG = b"\x89PNG"


@pytest.fixture(scope="module", autouse=True)
def table():
    """The module, imported as `python -m` finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import table

        yield table


def start(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


def measure(ranks, *options):
    return start(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m", "benchmarks.table", *options
    )


def by_name(run):
    return {(row["library"], row["backend"], row["tokens"]): row for row in run["rows"]}


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    """A run on two ranks with peers, at an even and an uneven length: the folder of its files."""
    folder = tmp_path_factory.mktemp("forward")
    files = ["--json", folder / "run.json", "--plot", folder / "run.png", "--markdown", folder / "run.md"]
    done = measure(2, "--tokens", "64,65", *SMALL, "--peers", "--where", "--slow", "1:200", *files)
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture(scope="module")
def run(forward):
    (run,) = json.loads((forward / "run.json").read_text())["runs"]
    return run


def test_every_row_ran_or_says_why(run):
    rows = by_name(run)
    assert {backend for library, backend, _ in rows if library == "cp_attn"} == set(BACKENDS)
    assert {(library, backend) for library, backend, _ in rows} >= PEERS
    reasons = {
        ("cp_attn", "unified", 64): "2 ranks are no grid",
        ("cp_attn", "unified", 65): "2 ranks are no grid",
        ("cp_attn", "ulysses", 65): "use ulysses_anything=True",
        ("cp_attn", "ring", 65): "use ring_anything=True",
        ("diffusers", "unified", 64): "2 ranks are no grid",
        ("diffusers", "unified", 65): "2 ranks are no grid",
        ("diffusers", "ulysses", 65): "must be divisible by mesh size",
        ("diffusers", "ring", 65): "must be divisible by mesh size",
    }
    for key, row in rows.items():
        if key in reasons:
            assert row["ms"] is None and reasons[key] in row["note"], key
        else:
            assert row["note"] is None and row["least_ms"] <= row["ms"] <= row["most_ms"], key
            assert row["error"] < 1e-5 and row["steps_a_second"] > 0, key


def test_the_figures_fit_each_other(run):
    rows = by_name(run)
    for (library, _, tokens), row in rows.items():
        if row["ms"] is not None:
            alone = rows["cp_attn" if library == "cp_attn" else "torch", "none", tokens]
            assert row["speed_up"] == pytest.approx(alone["ms"] / row["ms"])
            is_alone = row["backend"] == "none"
            assert row["cores"] == (1 if is_alone else min(2, len(os.sched_getaffinity(0))))
            assert row["efficiency"] == pytest.approx(row["speed_up"] / row["cores"])
    ours, theirs = (rows[library, "ring", 64] for library in ("cp_attn", "diffusers"))
    assert theirs["times_ours"] == pytest.approx(theirs["ms"] / ours["ms"])
    ring = rows["torch.distributed", "ring", 65]
    assert ring["times_ours"] == pytest.approx(ring["ms"] / rows["cp_attn", "ring_anything", 65]["ms"])
    assert {"machine", "date", "commit", "command", "versions", "load before"} <= set(run["about"])
    assert run["about"]["command"].startswith("torchrun --nproc-per-node 2 -m benchmarks.table --tokens 64,65")


def test_the_slow_rank_shows(run):
    """The parts are the whole; a rank that comes late makes the other wait at the gate, and only there."""
    at_rest, slow = ([e for e in run["where"] if bool(e["slow"]) == is_slow] for is_slow in (False, True))
    assert [entry["backend"] for entry in at_rest[:4]] == ["ulysses", "ring", "ulysses_anything", "ring_anything"]
    assert len(at_rest) == len(slow) == 4 + 2
    for entry in run["where"]:
        for rank in entry["by_rank"]:
            assert rank["ms"] == pytest.approx(sum(rank["parts"].values()))
            assert rank["parts"]["compute"] > 0 and rank["parts"]["pack"] > 0 and rank["parts"]["merge"] == 0
            assert min(rank["parts"].values()) > -0.01, rank
    for entry in slow:
        early, late = entry["by_rank"]
        assert early["parts"]["skew wait"] > 150 and late["parts"]["skew wait"] < 100, entry
        assert early["ms"] - early["parts"]["skew wait"] < 150, entry


def test_the_schedules_counts(run):
    """A ring reads its peer's packed k and v, twice 32 rows; it packs two and attends two blocks."""
    counts = {(entry["backend"], entry["tokens"]): entry["by_rank"] for entry in run["where"] if not entry["slow"]}
    for rank in counts["ring", 64]:
        assert rank["launches"] == 2 + 2
        assert rank["parts"]["transfer"] < 0.001
        assert 1 <= rank["peer_bytes"] / (2 * 32 * 4 * 16 * 4) < 1.6, "once, and panels are padded"
    for rank in counts["ulysses", 64]:
        assert rank["launches"] == 2 + 2 + 5, "q published and gathered from both, out fetched from both"
        assert rank["parts"]["transfer"] > 0
    assert all(rank["peer_bytes"] > 0 for ranks in counts.values() for rank in ranks)


def test_what_is_printed_and_kept(forward, run):
    out, page = (forward / "stdout").read_text(), (forward / "run.md").read_text()
    assert "| CP Backend | Time / Iter (ms) | Steps / Sec | Peak Memory (GB) | Shape (HxW) |" in out
    assert "4 of 24 heads" in out and "attention of 1 of 57 layers a step" in out
    assert "| ring | failed | failed | failed | 65 tokens | diffusers |" in out
    assert "skew wait" in out and "rank 1 sleeps 200 ms" in out
    assert [line for line in out.splitlines() if line.startswith("|")] == [
        line for line in page.splitlines() if line.startswith("|")
    ]
    assert (forward / "run.png").read_bytes().startswith(PNG)
    assert "100%" in (forward / "stderr").read_text()


def test_backward(tmp_path):
    """On three ranks, where diffusers' gradients of a ring are wrong; it has none for the others of any length."""
    file = tmp_path / "run.json"
    measure(3, "--tokens", "66", "--heads", "3", "--dim", "16", "--steps", "1", "--peers", "--backward", "--json", file)
    rows = {name[:2]: row for name, row in by_name(json.loads(file.read_text())["runs"][0]).items()}
    assert all(row["direction"] == "forward and backward" for row in rows.values())
    for backend in BACKENDS:
        assert (rows["cp_attn", backend]["ms"] is None) == (backend == "unified"), rows["cp_attn", backend]
    for backend in ("ulysses_anything", "ring_anything"):
        assert "is not implemented yet" in rows["diffusers", backend]["note"]
    assert rows["diffusers", "ulysses"]["ms"] > 0
    assert rows["torch.distributed", "ring"]["error"] < 1e-5
    ring = rows["diffusers", "ring"]
    assert ring["ms"] is None and ring["note"].startswith("wrong") and "dk by" in ring["note"]


def rows_with(attention, file):
    """What ranks say whose attention is another one, and their rows."""
    path = os.pathsep.join([str(ROOT), str(HERE)])
    options = ["--tokens", "64", *SMALL, "--backend", "none", "--backend", "ring", "--json", file]
    ranks = launch("ranks_table.py", 2, attention, *options, PYTHONPATH=path)
    (run,) = json.loads(file.read_text())["runs"]
    return ranks, run["rows"]


def test_a_row_that_computes_something_else_is_not_timed(tmp_path):
    ranks, rows = rows_with("wrong", tmp_path / "run.json")
    assert [rank.code for rank in ranks] == [1, 1], ranks[0].err[-3000:]
    assert "computes something else" in ranks[0].err
    for row in rows:
        assert row["ms"] is None and row["note"].startswith("wrong"), row


def test_the_slowest_rank_counts(tmp_path):
    ranks, rows = rows_with("late", tmp_path / "run.json")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err[-3000:]
    assert all(row["least_ms"] >= 50 for row in rows), rows


def test_memory(tmp_path):
    """By hand, in bytes: q, k, v, out; a packed k and v and a state, of a ring's own rows or of all."""
    file = tmp_path / "run.json"
    measure(2, "--tokens", "2048", "--backend", "none", "--backend", "ring", "--steps", "1", "--json", file)
    (run,) = json.loads(file.read_text())["runs"]
    for row, rows in zip(run["rows"], (2048, 1024), strict=True):
        assert row["heads"] == 4 and row["peak_bytes"] == pytest.approx(7 * rows * 4 * 128 * 4, abs=5e6), row


def test_combine(forward, tmp_path):
    """Runs are put together without a launcher; a page keeps what is around its marks."""
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    file = forward / "run.json"
    files = ["--json", tmp_path / "both.json", "--plot", tmp_path / "both.png", "--markdown", page]
    files += ["--picture", tmp_path / "both.png"]
    start("-m", "benchmarks.table", "--combine", file, file, *files)
    runs = json.loads(file.read_text())["runs"]
    assert json.loads((tmp_path / "both.json").read_text())["runs"] == runs * 2
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)
    before, after = (ROOT / "docs" / "performance.md").read_text(), page.read_text()
    assert after.partition("<!-- benchmarks.table: begin")[0] == before.partition("<!-- benchmarks.table: begin")[0]
    assert after.partition("benchmarks.table: end -->")[2] == before.partition("benchmarks.table: end -->")[2]
    assert "--tokens 64,65" in after and "](both.png)" in after


def test_peak_of_a_call():
    """What was there before it does not count, nor what was freed. A process of its own frees nothing else."""
    code = """
import torch
from benchmarks import table
cpu = table.DEVICES["cpu"]()
before = cpu.memory()
torch.ones(2**25).sum()
total, peak = cpu.peak(lambda: torch.ones(2**22).sum(), before)
print(int(total), peak)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    total, peak = map(int, done.stdout.split())
    assert total == 2**22 and peak == pytest.approx(2**24, abs=4e6)


def test_a_page_without_marks_is_left_alone(table, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("words\n")
    with pytest.raises(SystemExit, match="has no lines"):
        table.report.fill(page, [])
    assert page.read_text() == "words\n"


@pytest.mark.parametrize("wrong", ["none", "shape", "nan", "off"])
def test_errors(table, wrong):
    wanted = [torch.arange(24.0).reshape(1, 6, 2, 2)]
    answer = wanted[0][:, 2:5].clone()
    if wrong == "shape":
        with pytest.raises(ValueError, match="out has the shape"):
            sys.modules["benchmarks.judge"].errors_of([answer[..., :1]], wanted, 2)
        return
    if wrong != "none":
        answer[0, 1, 1, 1] += float("nan") if wrong == "nan" else 2.3
    errors = sys.modules["benchmarks.judge"].errors_of([answer], wanted, 2)
    assert errors == {"out": pytest.approx({"none": 0.0, "nan": float("inf"), "off": 0.1}[wrong])}
    assert sys.modules["benchmarks.judge"].errors_of([], wanted, 0) == {"out": 0.0}


def test_parts_of_a_call(table):
    """Waits before the first step are skew, later ones are for data; what no span covers is the rest."""
    spans = [("wait", 0, 50), ("plan", 50, 5), ("wait", 55, 20), ("PACK", 80, 7), ("wait", 90, 30), ("COPY", 120, 4)]
    spans += [("GRAD", 125, 200), ("REDUCE", 330, 9)]
    entries = [
        {"name": name, "ts": ts, "dur": dur, "args": {"step": 0} if name.isupper() else {}} for name, ts, dur in spans
    ]
    whole, parts = table.where.parts_of([*entries, {"name": "attention", "ts": 0, "dur": 350, "args": {}}])
    assert whole == 350
    taken = {"skew wait": 70, "data wait": 30, "pack": 7, "transfer": 4, "compute": 200, "merge": 9}
    assert parts == taken | {"rest": 350 - sum(taken.values())}


@pytest.mark.parametrize("ranks, grid", [(4, (2, 2)), (6, (2, 3)), (9, (3, 3)), (2, None), (3, None), (7, None)])
def test_degrees_of_unified(table, ranks, grid):
    degrees = sys.modules["benchmarks.rows"].degrees
    if grid:
        assert degrees("unified", ranks) == grid
    else:
        with pytest.raises(ValueError, match="no grid"):
            degrees("unified", ranks)


def test_the_kernels_that_peers_get_on_gpus(table):
    """Shapes alone, on tensors without memory: a block of keys forward, and its gradients."""
    cuda = object.__new__(table.DEVICES["cuda"])
    q, k = (torch.empty(1, rows, 2, 64, dtype=torch.bfloat16, device="meta") for rows in (10, 12))
    out, lse = cuda.attend(q, k, k)
    assert out.shape == q.shape and lse.shape == (1, 10, 2)
    assert [x.shape for x in cuda.gradients(out, q, k, k, out, lse)] == [q.shape, k.shape, k.shape]
    assert all(callable(kernel) for kernel in cuda.diffusers_kernels())


@pytest.mark.parametrize(
    "world, options, words",
    [
        (None, [], "start it with torchrun"),
        (1, [], "on 2 or more ranks"),
        (2, ["--slow", "2:5"], "there are ranks 0 to 1"),
        (2, ["--slow", "fast"], "is not RANK:MILLISECONDS"),
        (2, ["--tokens", "64,0"], "is not a number above 0"),
    ],
)
def test_what_cannot_be_asked(world, options, words):
    environ = clean_environ() | ({"WORLD_SIZE": str(world)} if world else {})
    command = [sys.executable, "-m", "benchmarks.table", *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr, done.stderr
