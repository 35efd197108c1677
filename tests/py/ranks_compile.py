"""One rank: models that torch compiles. Prints a JSON line for each scene."""

import os
import sys
import traceback
from contextlib import contextmanager

import torch
from diffusers.models.attention_dispatch import attention_backend
from launch import say
from ranks_gradients import loss_of_tiny
from ranks_models import difference
from tiny_models import make, tensors
from torch._dynamo.testing import CompileCounterWithBackend

import cp_attn

WORLD = int(os.environ["WORLD_SIZE"])
VARIANTS = {
    "ring": dict(ring_degree=WORLD),
    "ulysses": dict(ulysses_degree=WORLD),
    "ring_anything": dict(ring_degree=WORLD, ring_anything=True),
    "ulysses_anything": dict(ulysses_degree=WORLD, ulysses_anything=True),
}


def small(name, variant):
    """Return a model with one block of each kind, which is what takes least to compile, and inputs."""
    model, inputs = make(name, "anything" in variant)
    for blocks in ("transformer_blocks", "single_transformer_blocks", "blocks"):
        if hasattr(model, blocks):
            setattr(model, blocks, getattr(model, blocks)[:1])
    return model, inputs


def config(variant):
    return cp_attn.ContextParallelConfig(**VARIANTS[variant], timeout=60.0)


@contextmanager
def enabled(model, variant):
    cp_attn.enable_parallelism(model, config(variant))
    try:
        yield
    finally:
        cp_attn.disable_parallelism(model)


def compiled(model, way="wrapper", backend="aot_eager", **more):
    """Return what to call in the model's place, and a counter of its graphs. One graph, or torch raises."""
    counter = CompileCounterWithBackend(backend)
    options = dict(fullgraph=True, backend=counter, **more)
    if way == "wrapper":
        return torch.compile(model, **options), counter
    if way == "function":
        return torch.compile(lambda **inputs: model(**inputs), **options), counter
    model.compile(**options)
    return model, counter


@torch.no_grad()
def answer(model, inputs):
    return tensors(model(**inputs))


def gradients(model, call, inputs):
    model.zero_grad()
    loss_of_tiny(call, inputs).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def model(name, variant, way, order, backend="aot_eager"):
    """Compare answers and gradients of compiled and eager code; count the graphs of a forward."""
    model, inputs = small(name, variant)
    alone, graphs = answer(model, inputs), 0
    if order == "compile_first":
        call, counter = compiled(model, way, backend)
        assert difference(answer(call, inputs), alone) <= 1e-5
        graphs = counter.frame_count
    with enabled(model, variant):
        eager, eager_gradients = answer(model, inputs), gradients(model, model, inputs)
        if order == "enable_first":
            call, counter = compiled(model, way, backend)
        line = dict(difference=difference(answer(call, inputs), eager))
        line.update(graphs=counter.frame_count - graphs, again=difference(answer(call, inputs), alone))
        line.update(gradients=difference(gradients(model, call, inputs), eager_gradients))
    line.update(after=difference(answer(call, inputs), alone))
    return line


def blocks(variant):
    """diffusers compiles the blocks alone: the first, whose hook splits, and the others, which are all alike."""
    model, inputs = make("wan", "anything" in variant)
    alone, counter = answer(model, inputs), CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    with enabled(model, variant):
        worst = difference(answer(model, inputs), alone)
    assert counter.frame_count == 2, counter.frame_count
    return dict(difference=worst)


def lengths(variant):
    """Several lengths through one compiled model; what one rank holds may be as long as before."""
    model, inputs = small("flux", variant)
    call, _ = compiled(model)
    worst = 0.0
    for image, text in ((15, 7), (16, 8), (21, 9), (15, 7)):
        cut = dict(inputs)
        for name, rows, dim in (
            ("hidden_states", image, 1),
            ("encoder_hidden_states", text, 1),
            ("img_ids", image, 0),
            ("txt_ids", text, 0),
        ):
            x = inputs[name]
            cut[name] = torch.cat([x] * 2, dim).narrow(dim, 0, rows)
        want = answer(model, cut)
        with enabled(model, variant):
            worst = max(worst, difference(answer(call, cut), want))
    return dict(difference=worst)


def checkpoints(variant):
    model, inputs = small("flux", variant)
    with enabled(model, variant):
        want = gradients(model, model, inputs)
        model.enable_gradient_checkpointing()
        call, _ = compiled(model)
        return dict(difference=difference(gradients(model, call, inputs), want))


def changes(variant):
    """What changes after compiling is seen: a backend, a config, a closed context."""
    model, inputs = small("flux", variant)
    alone = answer(model, inputs)
    call, _ = compiled(model)
    with enabled(model, variant):
        answer(call, inputs)
        with attention_backend("_native_efficient"):
            expect(ValueError, "_native_efficient", call, inputs)
        assert difference(answer(call, inputs), alone) <= 1e-5
        other = "ulysses" if variant == "ring" else "ring_anything"
        cp_attn.enable_parallelism(model, config(other))
        assert difference(answer(call, inputs), alone) <= 1e-5
        model._parallel_config.context.close()
        expect(RuntimeError, "closed", call, inputs)
    return dict(difference=difference(answer(call, inputs), alone))


def refused(variant):
    """A length that the ranks cannot share, found in the middle of a compiled forward."""
    model, inputs = make("wan", True)
    call, _ = compiled(model)
    with enabled(model, variant):
        expect(Exception, "ring_anything", call, inputs)
        model.forward = torch.compile(model.forward, backend="aot_eager")
        expect(ValueError, "ring_anything", model, inputs)
    return dict(difference=0.0)


def direct(variant):
    """Calls of a context in a compiled function, forward and backward; in one that must be one graph."""
    rows = 2 * WORLD + ("anything" in variant)
    whole = torch.randn(2, rows, 2 * WORLD, 8, generator=torch.Generator().manual_seed(1))
    with cp_attn.init(config(variant)) as context:

        def function(x):
            q, k, v = (context.shard(x, 1) * factor for factor in (1.0, 2.0, 3.0))
            return context.gather(cp_attn.attention(q, k, v, context, is_causal=True).tanh(), 1)

        def run(call):
            x = whole.clone().requires_grad_()
            out = call(x)
            out.square().sum().backward()
            return out.detach(), x.grad

        eager = run(function)
        worst = difference(run(torch.compile(function, backend="aot_eager")), eager)
        torch._dynamo.reset()
        try:
            run(torch.compile(function, backend="aot_eager", fullgraph=True))
        except torch._dynamo.exc.Unsupported as error:
            assert "shard" in str(error), error
        else:
            raise AssertionError("no Unsupported")
        return dict(difference=max(worst, difference(run(function), eager)))


def expect(kind, word, call, inputs):
    try:
        answer(call, inputs)
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {word}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scene in sys.argv[1:]:
        name, *args = scene.split(",")
        torch._dynamo.reset()
        try:
            say(name=scene, failed=None, **globals()[name](*args))
        except Exception:
            say(name=scene, failed=traceback.format_exc()[-4000:])
