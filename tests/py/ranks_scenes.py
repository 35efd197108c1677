"""One rank: scenes of enabling, splitting and disabling, one after the other. Prints a JSON line for each."""

import contextlib
import inspect
import os
import sys
import tempfile
import traceback
import warnings
from types import SimpleNamespace

import torch
from diffusers import DiffusionPipeline
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import attention_backend
from launch import say
from tiny_models import MODELS, make
from torch import nn
from toy_model import Local, Processor, Toy
from variations import VARIATIONS

import cp_attn
from cp_attn import ContextParallelInput as In
from cp_attn import ContextParallelOutput as Out
from cp_attn.models.outputs import elements

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = WORLD - 1
PLAN = {"": {"hidden": In(1, 3)}, "head": Out(1, 3)}
ANY = dict(ring_degree=WORLD, ring_anything=True)


def config(**fields):
    return cp_attn.ContextParallelConfig(**fields or dict(ring_degree=WORLD), timeout=30.0)


def rows(count, first=0):
    """Return (1, count, 4) with values 1, 2, 4, ... that no two sums share."""
    return 2.0 ** torch.arange(first, first + count)[None, :, None].expand(1, count, 4)


@contextlib.contextmanager
def enabled(model, plan=PLAN, **fields):
    cp_attn.enable_parallelism(model, config(**fields), cp_plan=plan)
    try:
        yield model
    finally:
        cp_attn.disable_parallelism(model)


def raises(kind, *words):
    """Expect an error whose text has all these words."""

    @contextlib.contextmanager
    def expect():
        try:
            yield
        except kind as e:
            assert all(w in str(e) for w in words), f"{words} not all in: {e}"
        else:
            raise AssertionError(f"no {kind.__name__} with {words}")

    return expect()


def check(model, *args, **kwargs):
    """Compare with the same class that was never enabled."""
    alone = Toy()(*args, **kwargs)
    out = model(*args, **kwargs)
    assert type(out) is type(alone)
    for x, y in zip(elements(out), elements(alone), strict=True):
        if torch.is_tensor(y):
            torch.testing.assert_close(x, y)
        else:
            assert x == y
    return out


def check_sample(model, inputs, expected):
    torch.testing.assert_close(model(**inputs).sample, expected, atol=1e-5, rtol=1e-5)


def state(model):
    """Return all that enabling may change."""
    return (
        {n: (dict(m._forward_pre_hooks), dict(m._forward_hooks), dict(vars(m))) for n, m in model.named_modules()},
        [dict(vars(m.processor)) for m in model.modules() if hasattr(m, "processor")],
        inspect.signature(model.forward),
        dict(Registry._backends),
        dict(Registry._supported_arg_names),
        set(Registry._supports_context_parallel),
    )


def mean_probe():
    with enabled(Toy()) as model:
        out = check(model, rows(4 * WORLD))
    torch.testing.assert_close(out[0, :, 0], torch.full((4 * WORLD,), (2.0 ** (4 * WORLD) - 1) / (4 * WORLD)))


def uneven_mean_probe():
    with enabled(Toy(), **ANY) as model:
        for length in (WORLD, WORLD + 1, 4 * WORLD - 1):
            check(model, rows(length))


def wrapped_forward():
    """A logging wrapper around forward, put there before and after."""
    for is_before in (True, False):
        model, calls = Toy(), []

        def wrap(model=model, calls=calls):
            forward = model.forward

            def logging(*args, **kwargs):
                calls.append(1)
                return forward(*args, **kwargs)

            model.forward = logging

        if is_before:
            wrap()
        with enabled(model):
            if not is_before:
                wrap()
            check(model, rows(2 * WORLD))
        assert calls == [1]


def no_dispatcher():
    with raises(ValueError, "Local", "dispatcher"):
        cp_attn.enable_parallelism(Local(), config(), cp_plan={"": {"hidden": In(1)}})
    model = Toy()
    model.attention.processor = nn.Identity()  # a module that diffusers would not know as attention
    with raises(ValueError, "no attention"):
        cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)


def dispatcher_without_config():
    """The processor has the attribute, but does not pass it on."""
    with enabled(Toy(parallel_config=None)) as model, raises(RuntimeError, "Toy", "_parallel_config"):
        model(rows(2 * WORLD))


class Skip(nn.Module):
    """What a cache does: it answers without attention."""

    def forward(self, hidden, keys, angles):
        return hidden


def forward_without_attention():
    with enabled(Toy()) as model:
        model.attention = Skip()
        torch.testing.assert_close(model(rows(2 * WORLD)), rows(2 * WORLD))


def replicated_keys():
    with enabled(Toy()) as model:
        check(model, rows(2 * WORLD), keys=rows(3))


def masked_replicated_keys():
    """A mask over keys that every rank has whole; they count once all the same."""
    mask = torch.tensor([[True, False, True]])
    with enabled(Toy(attn_mask=mask)) as model:
        out = model(rows(2 * WORLD), keys=rows(3))
    torch.testing.assert_close(out, torch.full_like(out, 2.5))  # of 1 and 4


def different_inputs():
    """Where ranks are called with different tensors, each row is that of the rank which it falls to, on all ranks."""
    with enabled(Toy()) as model:
        out = model(rows(2 * WORLD) + 100 * RANK)
    mean = rows(2 * WORLD).mean() + 100 * (WORLD - 1) / 2
    torch.testing.assert_close(out, mean.expand_as(out))


def mixed_keys():
    """Whole keys joined to split ones would count once per rank."""
    with enabled(Toy()) as model, raises(ValueError, "'hidden'", "'parts'", "7 rows", "whole"):
        model(rows(2 * WORLD), parts=rows(7))


def whole_streams_in_front():
    """Joined to the split one: in a list that the plan does not name, names in part, or by another number of dims."""
    for parts, entry, word in (
        ([rows(7)], None, "parameter 'parts'"),
        ([rows(3), rows(2)], None, "parameter 'parts'"),
        ((rows(3 * WORLD), rows(7)), [In(1, 3), None], "parameter 'parts', element 1"),
        (rows(7), In(1, 4), "parameter 'parts'"),
        ([rows(7)], In(1, 4), "parameter 'parts', element 0"),
    ):
        plan = PLAN | {"": {"hidden": In(1, 3)} | ({} if entry is None else {"parts": entry})}
        with enabled(Toy(), plan) as model, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "cp_attn: .*3 dims, but the plan expects 4")
            with raises(ValueError, "'hidden'", f'"{word}"', "rows", "whole"):
                model(rows(2 * WORLD), parts=parts)
            check(model, rows(2 * WORLD))


BITS = torch.tensor([1, 1, 0, 1, 0]).bool(), torch.tensor([0, 1, 1, 1, 1, 1]).bool()
STREAMS = PLAN | {"": {"hidden": In(1, 3), "parts": In(1, 3)}}


def masked_streams():
    """The rank's own keys: its part of the text, then its part of the picture."""
    if WORLD == 2:
        text, picture = (torch.arange(1.0, 5.0)[None, :, None].expand(1, 4, 4) * x for x in (1, 10))
        own = torch.tensor([not RANK, not RANK, True, True])
        with enabled(Toy(attn_mask=own[None]), STREAMS) as model:
            out = model(picture, parts=text)
        torch.testing.assert_close(out, torch.full_like(out, 103 / 6))  # in a wrong order 40 / 3
    own = torch.cat([bits.tensor_split(WORLD)[RANK] for bits in BITS])
    with enabled(Toy(attn_mask=own[None]), STREAMS, **ANY) as model:
        out = model(rows(6, 5), parts=rows(5))
    bits = torch.cat(BITS)
    torch.testing.assert_close(out, (rows(11)[0, :, 0] * bits).sum().div(bits.sum()).expand_as(out))


def mask_of_joined_streams():
    """One over all their keys, text behind picture or before it: no order that keys lie in, so it is refused."""
    with enabled(Toy(attn_mask=torch.cat(BITS)[None]), STREAMS, **ANY) as model:
        with raises(ValueError, "attn_mask", "11 keys"):
            model(rows(6, 5), parts=rows(5))
    with enabled(Toy(attn_mask=BITS[1][None]), **ANY) as model:
        out = model(rows(6))  # of one stream it is in order
    torch.testing.assert_close(out, rows(6)[:, 1:].mean().expand_as(out))


def positions():
    """Angles from a table that is cut like the rows."""
    tables = {0: In(0, 2, True), 1: In(0, 2, True)}
    plan = {"positions": tables, "attention": {"hidden": In(1, 3)}, "head": Out(1, 3)}
    with enabled(Toy(), plan) as model:
        check(model, rows(2 * WORLD), turn=True)


def output_types():
    for kind in ("tensor", "tuple", "list", "dict", "record"):
        with enabled(Toy()) as model:
            check(model, rows(2 * WORLD), kind=kind)
    plan = PLAN | {"head": [Out(1, 3), Out(1, 3)]}
    with enabled(Toy(), plan) as model:
        check(model, rows(2 * WORLD), kind="list")  # the second output is None
        with raises(ValueError, "output 1", "'head'", "str"):
            model(rows(2 * WORLD), kind="tuple")
        with raises(ValueError, "output 1", "'head'", "returned 1"):
            model(rows(2 * WORLD))


def lists():
    plan = PLAN | {"": {"hidden": In(1, 3), "parts": [In(1, 3), In(1), None]}}
    with enabled(Toy(), plan, **ANY) as model:
        for parts in ([rows(5), rows(4), "note"], (rows(5), rows(4), None)):
            check(model, rows(6), parts=parts)
        with raises(ValueError, "'parts'", "2 elements", "3"):
            model(rows(6), parts=[rows(5), rows(4)])
        with raises(ValueError, "'parts'", "tensor", "list of 3"):
            model(rows(6), parts=rows(5))
    with enabled(Toy(), PLAN | {"": {"hidden": In(1, 3), "parts": In(1, 3)}}, **ANY) as model:
        check(model, rows(6), parts=[rows(5), rows(4)])
        with raises(ValueError, "'parts'", "str"):
            model(rows(6), parts="x")


def streams_are_cut_one_by_one():
    plan = PLAN | {"": {"hidden": In(1, 3), "parts": In(1, 3)}}
    seen = []
    with enabled(Toy(), plan, **ANY) as model:
        model.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
        check(model, rows(6), parts=[rows(5)])
    assert seen == [len(torch.arange(5).tensor_split(WORLD)[RANK]) + len(torch.arange(6).tensor_split(WORLD)[RANK])]


def omitted_parameter():
    plan = PLAN | {"": {"hidden": In(1, 3), "bias": In(1, 3)}}
    with enabled(Toy(), plan) as model:
        for _ in range(2):
            check(model, rows(2 * WORLD))
            check(model, rows(2 * WORLD), None, None, None)
        check(model, rows(2 * WORLD), None, None, rows(2 * WORLD))
        check(model, hidden=rows(2 * WORLD), bias=rows(2 * WORLD))


def other_number_of_dims():
    plan = PLAN | {"": {"hidden": In(1, 3), "bias": In(1, 3)}}
    with enabled(Toy(), plan) as model, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            check(model, rows(2 * WORLD), bias=torch.ones(1, 4))
    texts = [str(w.message) for w in caught if "cp_attn" in str(w.message)]
    assert len(texts) == 1 and all(w in texts[0] for w in ("'bias'", "Toy", "2 dims", "expects 3")), texts


def lengths():
    kinds = [(dict(ring_degree=WORLD), "ring_anything"), (dict(ulysses_degree=WORLD), "ulysses_anything")]
    if WORLD == 4:
        kinds.append((dict(ring_degree=2, ulysses_degree=2), "unified_anything"))
    for fields, flag in kinds:
        with enabled(Toy(heads=WORLD), {"": {"hidden": In(1, 3)}}, **fields) as model:
            with raises(ValueError, "'hidden'", "Toy", "dim 1", f"{2 * WORLD + 1} rows", f"{WORLD} ranks", flag):
                model(torch.ones(1, 2 * WORLD + 1, 4 * WORLD))
    with enabled(Toy(), **ANY) as model:
        with raises(ValueError, "'hidden'", f"{WORLD - 1} rows", f"{WORLD} ranks"):
            model(rows(WORLD - 1))
        check(model, rows(WORLD))  # the context is still good


def bad_plans():
    """What is wrong on every rank: the model stays as it was."""
    model = Toy()
    before = state(model)
    for plan, word in (
        (PLAN | {"tail": Out(1)}, "'tail'"),
        (PLAN | {"": {"hiden": In(1)}}, "'hiden'"),
        ({"": {0: In(1)}}, "split_output"),
        ({}, "empty"),
        (None, "_cp_plan"),
    ):
        with raises(ValueError, word):
            cp_attn.enable_parallelism(model, config(), cp_plan=plan)
        assert state(model) == before
        torch.testing.assert_close(model(rows(3)), Toy()(rows(3)))
    with raises(TypeError, "SimpleNamespace", "module"):
        cp_attn.enable_parallelism(SimpleNamespace(), config(), cp_plan=PLAN)


def bad_plan_on_one_rank():
    model = Toy()
    before = state(model)
    plan = PLAN | {"tail": Out(1)} if RANK == LAST else PLAN
    with raises(ValueError, "'tail'", *([f"rank {LAST}"] if RANK != LAST else [])):
        cp_attn.enable_parallelism(model, config(), cp_plan=plan)
    assert state(model) == before
    check(model, rows(3))


def bad_config_on_one_rank():
    """On a model that is not enabled, and on one that is, which stays so."""
    model = Toy()
    for _ in range(2):
        before = state(model)
        with raises(TypeError if RANK == LAST else Exception, *([f"rank {LAST}"] if RANK != LAST else [])):
            cp_attn.enable_parallelism(model, 3 if RANK == LAST else config(), cp_plan=PLAN)
        assert state(model) == before
        cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
        check(model, rows(2 * WORLD))
    cp_attn.disable_parallelism(model)


def enabled_on_one_rank():
    """A rank that has disabled the model and one that has not meet again."""
    model = Toy()
    cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
    if RANK == LAST:
        cp_attn.disable_parallelism(model)
    cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
    check(model, rows(2 * WORLD))
    cp_attn.disable_parallelism(model)


def other_plan_on_one_rank():
    model = Toy()
    before = state(model)
    plan = {"": {"hidden": In(1)}, "head": Out(1, 3)} if RANK == LAST else PLAN
    with raises(ValueError, f"rank {LAST}"):
        cp_attn.enable_parallelism(model, config(), cp_plan=plan)
    assert state(model) == before


def error_in_one_forward():
    """A check that fails on one rank raises on all, and the context is still good."""
    with enabled(Toy()) as model:
        with raises(ValueError, "'hidden'", *([f"rank {LAST}"] if RANK != LAST else [])):
            model(rows(2 * WORLD + (RANK == LAST)))
        check(model, rows(2 * WORLD))


def twice():
    model = Toy()
    before = state(model)
    cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
    between, context = state(model), model._parallel_config.context
    cp_attn.enable_parallelism(model, config(), cp_plan=dict(PLAN))
    assert state(model) == between and not context.closed
    cp_attn.enable_parallelism(model, config(**ANY), cp_plan=PLAN)
    assert context.closed
    check(model, rows(2 * WORLD + 1))
    with raises(ValueError, "'tail'"):
        cp_attn.enable_parallelism(model, config(), cp_plan=PLAN | {"tail": Out(1)})
    check(model, rows(2 * WORLD + 1))  # still enabled as before
    cp_attn.disable_parallelism(model)
    assert state(model) == before
    cp_attn.disable_parallelism(model)
    cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
    check(model, rows(2 * WORLD))
    cp_attn.disable_parallelism(model)
    assert state(model) == before


def two_models():
    """Each model has its own context; the way into the dispatcher stays open while one of them is enabled."""
    before = dict(Registry._backends)
    with enabled(Toy()) as first:
        with enabled(Toy()) as second:
            check(first, rows(2 * WORLD))
            check(second, rows(4 * WORLD))
            check(Toy(), rows(3))  # a third one, alone
        check(first, rows(2 * WORLD))
    assert dict(Registry._backends) == before


def registry_is_restored():
    model, inputs = make("wan")
    before, processors = state(model), dict(model.attn_processors)
    with enabled(model, None):
        model(**inputs)
    after = state(model)
    assert after == before and dict(model.attn_processors) == processors
    assert all(Registry._supported_arg_names[k] is v for k, v in before[4].items())


def shared_processor():
    model, inputs = make("flux")
    alone = model(**inputs).sample
    processor = next(iter(model.attn_processors.values()))
    model.set_attn_processor(processor)
    processor._parallel_config = None  # an attribute of its own
    with enabled(model, None):
        torch.testing.assert_close(model(**inputs).sample, alone, atol=1e-5, rtol=1e-5)
    assert vars(processor) == {"_parallel_config": None}


def replaced_processors():
    model, inputs = make("flux")
    alone, old = model(**inputs).sample, dict(model.attn_processors)
    with enabled(model, None):
        model.set_attn_processor({name: type(p)() for name, p in old.items()})
        torch.testing.assert_close(model(**inputs).sample, alone, atol=1e-5, rtol=1e-5)
        assert all(p._parallel_config is None for p in old.values())
    assert all(p._parallel_config is None for p in model.attn_processors.values())
    toy = Toy()
    with enabled(toy):
        toy.attention.processor = lambda *args: args[0]
        with raises(ValueError, "'attention'", "Toy", "function"):
            toy(rows(2 * WORLD))
        toy.attention.processor = Processor()
        check(toy, rows(2 * WORLD))


def backends():
    model, inputs = make("flux")
    compatible = ("native", "_native_math", "_native_flash")
    alone = model(**inputs).sample
    active = Registry.get_active_backend()[0]
    model.set_attention_backend("_native_efficient")
    with raises(ValueError, "transformer_blocks.0.attn", "_native_efficient", *compatible):
        cp_attn.enable_parallelism(model, config())
    model.set_attention_backend("native")
    cp_attn.enable_parallelism(model, config())
    for name in compatible:
        model.set_attention_backend(name)
        torch.testing.assert_close(model(**inputs).sample, alone, atol=1e-5, rtol=1e-5)
    with raises(ValueError, "flex", *compatible):
        model.set_attention_backend("flex")
    for name in ("_native_efficient", "_native_cudnn"):  # for other devices; refused by the next forward
        model.set_attention_backend(name)
        with raises(ValueError, "transformer_blocks.0.attn", name, *compatible):
            model(**inputs)
    model.reset_attention_backend()
    with attention_backend("_native_efficient"), raises(ValueError, "_native_efficient", *compatible):
        model(**inputs)
    next(iter(model.attn_processors.values()))._attention_backend = "flex"
    with raises(ValueError, "transformer_blocks.0.attn", "flex"):
        model(**inputs)
    cp_attn.disable_parallelism(model)
    Registry.set_active_backend(active)


def heads():
    model = Toy(heads=2 * WORLD + 1)
    with raises(ValueError, "'attention'", f"{2 * WORLD + 1} heads", f"ulysses_degree {WORLD}", "ulysses_anything"):
        cp_attn.enable_parallelism(model, config(ulysses_degree=WORLD), cp_plan=PLAN)
    with enabled(model, ulysses_degree=WORLD, ulysses_anything=True):
        hidden = torch.rand(1, 2 * WORLD, 2 * WORLD + 1, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model(hidden), Toy(heads=2 * WORLD + 1)(hidden))


def dropout():
    with enabled(Toy(dropout_p=0.5)) as model, raises(ValueError, "dropout_p"):
        model(rows(2 * WORLD))


def config_of_diffusers():
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.models._modeling_parallel import TensorParallelConfig

    theirs = ContextParallelConfig(ring_degree=WORLD)
    for given in (theirs, ParallelConfig(context_parallel_config=theirs)):
        model = Toy()
        cp_attn.enable_parallelism(model, given, cp_plan=PLAN)
        check(model, rows(2 * WORLD))
        assert model._parallel_config.config.rotate_method == "auto"
        cp_attn.disable_parallelism(model)
    with raises(ValueError, "tensor-parallel"):
        cp_attn.enable_parallelism(Toy(), ParallelConfig(tensor_parallel_config=TensorParallelConfig(WORLD)))
    with raises(ValueError, "tensor-parallel"):
        cp_attn.enable_parallelism(Toy(), TensorParallelConfig(WORLD))
    with raises(TypeError, "dict"):
        cp_attn.enable_parallelism(Toy(), {"ring_degree": WORLD})


def own_parallelism_of_diffusers():
    model, _ = make("flux")
    model._parallel_config = object()
    with raises(RuntimeError, "diffusers", "FluxTransformer2DModel"):
        cp_attn.enable_parallelism(model, config())


def replaced_modules():
    """A module that takes the place of a planned one gets its hooks."""
    with enabled(Toy()) as model:
        old = model.head
        model.head = type(old)()
        check(model, rows(2 * WORLD))
        assert not old._forward_hooks and model.head._forward_hooks


def adapter():
    """What LoRA changes: to_q, inside the split part, and proj_out, where the gather must come after the adapter."""
    from peft import LoraConfig

    torch.manual_seed(8)
    return LoraConfig(r=4, target_modules=["to_q", "proj_out"], init_lora_weights=False)


def lora():
    """Adapters put in before and after."""
    model, inputs = make("flux")
    plain = model(**inputs).sample
    model.add_adapter(adapter())
    expected = model(**inputs).sample
    with enabled(model, None):
        check_sample(model, inputs, expected)
    model, _ = make("flux")
    with enabled(model, None):
        model(**inputs)
        model.add_adapter(adapter())
        check_sample(model, inputs, expected)
        model.delete_adapters("default")
        check_sample(model, inputs, plain)
    assert model(**inputs).sample.equal(plain)


def lora_from_a_file():
    """Loaded, fused, taken apart, switched off and unloaded while the model is enabled."""
    model, inputs = make("flux")
    plain = model(**inputs).sample
    model.add_adapter(adapter())
    expected = model(**inputs).sample
    with tempfile.TemporaryDirectory() as folder:
        model.save_lora_adapter(folder, weight_name="x.safetensors")
        model, _ = make("flux")
        with enabled(model, None):
            model.load_lora_adapter(folder, weight_name="x.safetensors", prefix=None)
            check_sample(model, inputs, expected)
            for change, wanted in (
                (model.fuse_lora, expected),
                (model.unfuse_lora, expected),
                (model.disable_adapters, plain),
                (model.enable_adapters, expected),
                (model.unload_lora, plain),
            ):
                change()
                check_sample(model, inputs, wanted)
        check_sample(model, inputs, plain)


def lora_wrapper():
    """peft's own wrapper around the model: the model inside is what is enabled, before or after."""
    from peft import get_peft_model

    model, inputs = make("flux")
    wrapped = get_peft_model(model, adapter())
    expected = wrapped(**inputs).sample
    with enabled(model, None):
        check_sample(wrapped, inputs, expected)
    with raises(ValueError, "'proj_out'", "PeftModel"):
        cp_attn.enable_parallelism(wrapped, config())
    model, _ = make("flux")
    with enabled(model, None):
        check_sample(get_peft_model(model, adapter()), inputs, expected)


def offload():
    """Parameters that are elsewhere between forwards: of the model, of layers or of groups, set before and after."""
    from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload
    from accelerate.hooks import remove_hook_from_submodules

    cpu = torch.device("cpu")
    blocks = dict(offload_type="block_level", num_blocks_per_group=1)
    leaves = dict(offload_type="leaf_level")
    kinds = {
        "model": lambda model, folder: cpu_offload_with_hook(model, cpu),
        "layers": lambda model, folder: cpu_offload(model, cpu, offload_buffers=True),
        "layers on disk": lambda model, folder: disk_offload(model, folder, execution_device=cpu),
        "blocks": lambda model, folder: model.enable_group_offload(cpu, cpu, **blocks),
        "leaves": lambda model, folder: model.enable_group_offload(cpu, cpu, **leaves),
        "blocks on disk": lambda model, folder: model.enable_group_offload(cpu, offload_to_disk_path=folder, **blocks),
        "leaves on disk": lambda model, folder: model.enable_group_offload(cpu, offload_to_disk_path=folder, **leaves),
    }
    for name, place in kinds.items():
        for is_before in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                model, inputs = make("flux")
                alone = model(**inputs).sample
                if is_before:
                    place(model, folder)
                with enabled(model, None):
                    if not is_before:
                        place(model, folder)
                    for _ in range(2):
                        check_sample(model, inputs, alone)
                assert model(**inputs).sample.equal(alone), name
                remove_hook_from_submodules(model)  # accelerate's; a group's stay
                assert model(**inputs).sample.equal(alone), name


def offload_by_a_pipeline():
    """Which takes its hooks away after every call and sets them anew."""
    cpu = torch.device("cpu")
    for place in (
        lambda pipe: pipe.enable_model_cpu_offload(device=cpu),
        lambda pipe: pipe.enable_group_offload(cpu, cpu, offload_type="leaf_level"),
    ):
        for is_before in (True, False):
            model, inputs = make("flux")
            alone = model(**inputs).sample
            pipe = Pipeline(model)
            if is_before:
                place(pipe)
            with enabled(model, None):
                if not is_before:
                    place(pipe)
                for _ in range(2):
                    check_sample(model, inputs, alone)
                    pipe.maybe_free_model_hooks()
                pipe.remove_all_hooks()
                check_sample(model, inputs, alone)
            assert model(**inputs).sample.equal(alone)


class Pipeline(DiffusionPipeline):
    """The least that offloads."""

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)


def closed_context():
    model = Toy()
    cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
    model._parallel_config.context.close()
    with raises(RuntimeError, "closed"):
        model(rows(2 * WORLD))
    cp_attn.enable_parallelism(model, config(), cp_plan=PLAN)
    check(model, rows(2 * WORLD))
    cp_attn.disable_parallelism(model)


def controlnet_residuals():
    model, inputs = make("flux", uneven=True)
    generator = torch.Generator().manual_seed(9)
    residuals = [torch.randn(2, 15, 64, generator=generator) for _ in range(2)]
    inputs = inputs | dict(controlnet_block_samples=residuals, controlnet_single_block_samples=tuple(residuals))
    alone = model(**inputs).sample
    with enabled(model, None, **ANY):
        check_sample(model, inputs, alone)


def refused_arguments():
    model, inputs = make("flux")
    with enabled(model, None), raises(NotImplementedError, "attention_mask"):
        model(**inputs, joint_attention_kwargs={"attention_mask": torch.ones(2, 24, dtype=torch.bool)})


def kept_keys():
    """Flux2's modes that keep keys and values between calls are refused, with and without the processors for them."""
    for name in ("flux2", "flux2_kv"):
        model, inputs = make(name)
        alone = model(**inputs).sample
        with enabled(model, None):
            for more in (dict(kv_cache_mode="extract", num_ref_tokens=4), dict(kv_cache_mode="cached")):
                with raises(NotImplementedError, f"kv_cache_mode='{more['kv_cache_mode']}'", "Flux2"):
                    model(**inputs, **more)
            check_sample(model, inputs, alone)  # the context is still good


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    MODELS.update(VARIATIONS)
    for name in sys.argv[1:]:
        try:
            globals()[name]()
            say(scene=name, error=None)
        except Exception:
            say(scene=name, error=traceback.format_exc()[-2500:])
