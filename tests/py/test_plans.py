"""Plans: what is read, what is refused, and in which words. No ranks."""

from dataclasses import make_dataclass

import pytest
import torch
from tiny_models import MODELS, make
from torch import nn

from cp_attn import ContextParallelInput as In
from cp_attn import ContextParallelOutput as Out
from cp_attn.models import outputs
from cp_attn.models.exchange import part
from cp_attn.models.plan import Axis, parse
from cp_attn.models.plans import plan_for
from cp_attn.models.resolve import resolve
from cp_attn.models.streams import Streams


class Block(nn.Module):
    def forward(self, hidden, mask=None):
        return hidden


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 2)
        self.any = Anything()

    def forward(self, hidden, *, ids=None):
        return hidden


class Anything(nn.Module):
    def forward(self, **kwargs):
        return kwargs


def test_reading():
    plan = parse(
        {"": {"hidden": In(1, 3), "parts": [In(0), None], 1: In(2, split_output=True)}, "head": [None, Out(-1)]}
    )
    assert plan[""].inputs == {"hidden": Axis(1, 3), "parts": (Axis(0), None)}
    assert plan[""].outputs == {1: Axis(2)}
    assert plan["head"].gathers == (None, Axis(-1))


def test_objects_of_diffusers():
    theirs = pytest.importorskip("diffusers.models._modeling_parallel")
    mine = {"": {"hidden": In(1, 3), 0: In(1, 3, True)}, "head": Out(1, 3)}
    other = {
        "": {"hidden": theirs.ContextParallelInput(1, 3), 0: theirs.ContextParallelInput(1, 3, True)},
        "head": theirs.ContextParallelOutput(1, 3),
    }
    assert parse(mine) == parse(other)


@pytest.mark.parametrize(
    "plan, words",
    [
        ([], ("list", "dict")),
        ({}, ("empty",)),
        ({3: Out(1)}, ("3", "path")),
        ({"a.*.b.*": Out(1)}, ("a.*.b.*", "one")),
        ({"head": "x"}, ("'head'", "'x'")),
        ({"head": []}, ("'head'",)),
        ({"head": [In(1)]}, ("'head'", "ContextParallelOutput")),
        ({"head": None}, ("'head'", "ContextParallelOutput")),
        ({"head": [None, None]}, ("'head'", "ContextParallelOutput")),
        ({"head": Out("1")}, ("'head'", "gather_dim", "'1'")),
        ({"head": Out(True)}, ("'head'", "gather_dim", "True")),
        ({"head": Out(3, 3)}, ("'head'", "gather_dim is 3", "expected_dims is 3")),
        ({"head": Out(1, 0)}, ("expected_dims is 0",)),
        ({"": {"hidden": Out(1)}}, ("'hidden'", "ContextParallelInput")),
        ({"": {"hidden": In(1, split_output=True)}}, ("'hidden'", "index")),
        ({"": {"hidden": [In(1), 5]}}, ("'hidden'", "element 1", "5")),
        ({"": {0: In(1)}}, ("output 0", "split_output=True")),
        ({"": {-1: In(1, split_output=True)}}, ("output -1",)),
        ({"": {True: In(1, split_output=True)}}, ("True", "index")),
        ({"": {1.5: In(1)}}, ("1.5",)),
    ],
)
def test_unreadable(plan, words):
    with pytest.raises(ValueError) as e:
        parse(plan)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_star():
    found = resolve(Model(), {"blocks.*": {"hidden": In(1)}, "blocks.0": {"mask": In(0)}, "blocks.1": Out(1)})
    assert found["blocks.0"].inputs == {"hidden": Axis(1), "mask": Axis(0)}
    assert found["blocks.1"].inputs == {"hidden": Axis(1)} and found["blocks.1"].gathers == (Axis(1),)
    assert found[""].inputs == {}


@pytest.mark.parametrize(
    "plan, words",
    [
        ({"tail": Out(1)}, ("'tail'", "Model", "blocks", "head")),
        ({"blocks.2": Out(1)}, ("'blocks.2'", "'2'")),
        ({"blocks": Out(1)}, ("'blocks'", "blocks.*")),
        ({"*": Out(1)}, ("'*'", "ModuleList")),
        ({"head.*": Out(1)}, ("'head.*'", "ModuleList")),
        ({"blocks.*.head": Out(1)}, ("'blocks.*.head'", "Block")),
        ({"": {"hiden": In(1)}}, ("'hiden'", "hidden", "ids")),
        ({"blocks.*": {"x": In(1)}}, ("'blocks.*'", "Block.forward", "'x'")),
        ({"blocks.*": {"hidden": In(1)}, "blocks.1": {"hidden": In(1)}}, ("'blocks.1'", "'hidden'", "twice")),
        ({"blocks.*": Out(1), "blocks.1": Out(1)}, ("'blocks.1'", "twice")),
        ({"head": Out(1), "blocks.1": Out(1)}, ("splits nothing",)),
    ],
)
def test_does_not_fit_the_model(plan, words):
    with pytest.raises(ValueError) as e:
        resolve(Model(), plan)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_any_keyword_is_possible():
    resolve(Model(), {"any": {"whatever": In(1)}})


@pytest.mark.parametrize("name", MODELS)
def test_own_plans_fit_their_models(name):
    model, _ = make(name)
    plan = plan_for(model)
    assert plan is not model._cp_plan
    assert resolve(model, plan)


def test_a_plan_put_in_the_place_of_diffusers_own_is_honoured():
    model, _ = make("flux")
    model._cp_plan = {"proj_out": Out(1)}
    assert plan_for(model) is model._cp_plan


def test_no_plan():
    with pytest.raises(ValueError, match="Model.*_cp_plan"):
        plan_for(Model())


@pytest.mark.parametrize("size", (0, 1, 5, 7, 12))
@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_parts_are_those_of_tensor_split(size, world):
    rows = torch.arange(size)
    for rank, expected in enumerate(rows.tensor_split(world)):
        first, count = part(size, rank, world)
        assert rows[first : first + count].equal(expected)


def test_outputs_keep_their_type():
    record = make_dataclass("record", ["a", "b"])(1, 2)
    assert outputs.replaced((1, "x"), {0: 5}) == (5, "x")
    assert outputs.replaced([1, 2], {1: 5}) == [1, 5]
    assert outputs.replaced({"a": 1, "b": 2}, {1: 5}) == {"a": 1, "b": 5}
    assert outputs.replaced(record, {0: 5}) == type(record)(5, 2) and record.a == 1
    assert outputs.replaced(1, {0: 5}) == 5
    assert outputs.elements({"a": 1, "b": 2}) == [1, 2]
    deep = {"a": [1, (2, "x")], "b": record}
    more = outputs.mapped(lambda x: x if x == "x" else x + 1, deep)
    assert more == {"a": [2, (3, "x")], "b": type(record)(2, 3)} and deep["a"] == [1, (2, "x")]
    assert outputs.mapped(lambda x: x, deep) is deep


def test_mixed_streams():
    streams = Streams()
    streams.add_split("image", 10, 5)
    streams.add_split("text", 6, 3)
    streams.add_whole("prompt", 7)
    assert all(streams.mixed(keys) is None for keys in (5, 3, 8, 7, 4))
    for keys in (12, 10, 15):
        assert "'image'" in streams.mixed(keys) or "'text'" in streams.mixed(keys)
        assert "'prompt' (7 rows)" in streams.mixed(keys)
