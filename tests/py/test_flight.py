"""The flight recorder: what ranks say of each other when a wait fails, while it lasts, and in a trace file."""

import functools
import json
import re

import pytest
from launch import launch, lines

SCENES = ("late", "stopped_outside", "stopped_inside")


@functools.cache
def scenes(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CP_ATTN_DEBUG", "0.3")
        return launch("ranks_flight.py", world, *SCENES)


def texts(world, scene):
    """Return what each rank's error says; the late one finds the context broken for the same reason."""
    return [(line["kind"], line["text"]) for line in lines(scenes(world), scene=scene)]


@pytest.mark.parametrize("world", (2, 3, 4))
def test_a_timeout_says_what_all_ranks_were_doing(world):
    last = world - 1
    others = ", ".join(map(str, range(last)))
    expected = (
        rf"rank {last} did not come to attention, call \d+ within 1.0 s\. Meanwhile ranks? {others}: waiting for "
        rf"rank {last} in attention, call \d+ \([12]\.\d s\); rank {last}: outside, after attention, call 1 "
    )
    for rank, (kind, text) in enumerate(texts(world, "late")):
        assert kind == ("CommError" if rank == last else "CommTimeout")
        assert re.search(expected, text), text


@pytest.mark.parametrize("world", (2, 3, 4))
def test_a_rank_that_is_stopped_between_calls_can_be_read(world):
    for _, text in texts(world, "stopped_outside"):
        assert "rank 1 did not come to attention" in text
        assert re.search(r"rank 1: outside, after gather, call \d+ \([12]\.\d s\)", text), text


@pytest.mark.parametrize("world", (3, 4))
def test_a_rank_that_is_stopped_inside_a_call_can_be_read(world):
    for _, text in texts(world, "stopped_inside"):
        assert f"rank {world - 1} did not come to attention" in text
        # For whom, as of the moment in which it was stopped: rank 0 had not come then either.
        assert re.search(r"ranks? ([02], )?1(, 2)?: waiting for rank \d in attention, call \d", text), text


@pytest.mark.parametrize("world", (2, 3, 4))
def test_a_long_wait_is_reported_while_it_lasts(world):
    ranks = scenes(world)
    assert re.search(r"^cp_attn: rank 0 has waited 0\.[34] s in attention, call \d+\. Meanwhile ", ranks[0].err, re.M)
    assert re.search(r"^cp_attn: rank 0 has waited 0\.[67] s ", ranks[0].err, re.M)


def test_nobody_reports_unasked():
    for rank in launch("ranks_flight.py", 2, "late"):
        assert "has waited" not in rank.err


def spans_of(path):
    """Return the trace's entries; the format lets the array stay open."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


@pytest.mark.parametrize("world", (2, 3))
def test_a_trace_shows_every_call_of_every_rank(world, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    monkeypatch.setenv("CP_ATTN_TRACE", str(path))
    done = list(lines(launch("ranks_flight.py", world, "traced", "late"), scene="traced"))
    entries = spans_of(path)
    for rank, line in enumerate(done):
        own = [entry for entry in entries if entry["pid"] == line["pid"]]
        names = {entry["args"]["name"] for entry in own if entry["name"] == "process_name"}
        spans = [entry for entry in own if entry["ph"] == "X"]
        calls = [span for span in spans if span["name"] == span["cat"]]
        assert names == {f"rank {rank}"}
        # The first context's calls, then the second's, of which the last was not had.
        assert [span["name"] for span in calls][:4] == ["attention"] * 3 + ["gather"]
        inside = [span for span in spans if span["name"] != span["cat"]]
        assert sum(span["name"] == "ATTEND" for span in inside) >= 3 * world
        assert sum(span["name"] == "PUBLISH" for span in inside) >= 4
        for span in inside:
            around = [c for c in calls if c["ts"] <= span["ts"] + 1e-3 and span["ts"] <= c["ts"] + c["dur"]]
            assert len(around) == 1 and around[0]["args"]["call"] == span["args"]["call"], (span, around)
            assert span["ts"] + span["dur"] <= around[0]["ts"] + around[0]["dur"] + 1e-3
        if rank < world - 1:
            assert calls[-1]["args"]["error"] == "CommTimeout"
            assert [span["args"].get("peer") for span in inside][-1] == world - 1


@pytest.mark.parametrize(
    "name, value",
    (
        ("CP_ATTN_DEBUG", "soon"),
        ("CP_ATTN_DEBUG", "-1"),
        ("CP_ATTN_HEAD_CHUNKS", "0"),
        ("CP_ATTN_TRACE", "/nonexistent/trace.json"),
    ),
)
def test_a_bad_setting_is_named(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    for rank in launch("ranks_flight.py", 2, "traced"):
        assert rank.code == 1
        assert re.search(rf"ValueError: .*{name}.*{value}", rank.err), rank.err
