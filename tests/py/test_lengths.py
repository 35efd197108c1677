"""What calls of models say of the lengths that all ranks have, as calls in a graph must."""

import functools
import json
from types import SimpleNamespace

import pytest
from launch import launch, lines
from test_models import CASES, MODELS

pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")

from cp_attn import _lengths  # noqa: E402

LOOK_ALIKE = ("minimax",)  # whose streams are so short that they have as many rows as each other on some ranks
# Image, text, and what is whole on every rank.
STREAMS = [((4097, 513), ()), ((15, 7), ()), ((7, 8), ()), ((25, 13), (25, 13)), ((50, 13), (9, 11)), ((9, 4), (5,))]


@functools.cache
def said(config, evenness, models=MODELS):
    fields = json.loads(config)
    world = fields.get("ring_degree", 1) * fields.get("ulysses_degree", 1)
    return launch("ranks_lengths.py", world, config, evenness, *models, timeout=240)


UNEVEN = {name: fields for evenness, name, fields in CASES if evenness == "uneven"}
UNEVEN["ring_of_two"] = dict(ring_degree=2, ring_anything=True)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", UNEVEN)
def test_they_are_those_of_the_ranks(name, model):
    for line in lines(said(json.dumps(UNEVEN[name]), "uneven"), model=model):
        assert line["difference"] < 1e-5, line
        assert line["calls"] == ["right"] or (model in LOOK_ALIKE and set(line["calls"]) <= {"none", "right"}), line


@pytest.mark.parametrize("model", MODELS)
def test_of_equal_lengths(model):
    """Which a flag admits as well as others; without a flag none are said."""
    for line in lines(said(json.dumps(UNEVEN["ring_of_two"]), "even"), model=model):
        assert line["difference"] < 1e-5 and line["calls"] == ["right"], line
    if model == MODELS[0]:
        for line in lines(said(json.dumps(dict(ring_degree=2)), "even", MODELS[:1]), model=model):
            assert line["calls"] == ["none"], line


def told(lengths, rank, cut, whole):
    q = SimpleNamespace(shape=(1, lengths[rank], 2, 4))
    context = SimpleNamespace(rank=rank, world_size=len(lengths))
    streams = SimpleNamespace(sizes=lambda: (list(cut), list(whole)))
    found = _lengths.arguments(q, q, context, streams)
    assert not found or found["seq_lens"] == found["kv_lens"]
    return found.get("seq_lens")


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("cut, whole", STREAMS)
def test_all_ranks_say_the_same(monkeypatch, world, cut, whole):
    """Of streams, alone and joined: what they are, or nothing, where one of others is as long on any rank."""
    monkeypatch.setattr(_lengths, "is_captured", lambda x: True)
    shares = [[len(range(rank, size, world)) for rank in range(world)] for size in cut]
    joined = [sum(rows) for rows in zip(*shares, strict=True)]
    for lengths in (*shares, joined, *([size] * world for size in whole)):
        found = [told(lengths, rank, cut, whole) for rank in range(world)]
        assert found in ([lengths] * world, [None] * world), (lengths, found)
    if cut[0] > 1000:
        assert told(joined, 0, cut, whole) == joined
    assert told([10**6] * world, 0, cut, whole) is None


def test_calls_outside_of_graphs_say_nothing():
    """Keys that a model has kept may look like a stream on one rank alone."""
    q = torch.ones(1, 4, 2, 4)
    assert _lengths.arguments(q, q, SimpleNamespace(rank=0, world_size=2), SimpleNamespace()) == {}
