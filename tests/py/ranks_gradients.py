"""One rank: gradients through models, alone and then split. Prints a JSON line for each scene or model."""

import os
import sys
import traceback

import tiny_models
import torch
import torch.distributed as dist
from launch import say
from mixed_model import PLAN, Local, Mixed, loss_of, make
from tiny_models import tensors
from variations import VARIATIONS

import cp_attn
from cp_attn import ContextParallelInput as In
from cp_attn.models.outputs import mapped

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONFIGS = {
    "ring": dict(ring_degree=WORLD),
    "ring_anything": dict(ring_degree=WORLD, ring_anything=True),
    "ulysses_anything": dict(ulysses_degree=WORLD, ulysses_anything=True),
    "unified_anything": dict(ring_degree=2, ulysses_degree=WORLD // 2, unified_anything=True),
}


def gradients(model, inputs, loss):
    """Return the gradients of all parameters and inputs, None where there is none."""
    wanted = [*model.parameters(), *inputs]
    for x in wanted:
        x.grad = None
    loss().backward()
    return [x.grad for x in wanted]


def error(mine, want):
    """Return the largest difference of the ranks' sums, relative to the largest gradient.

    A parameter that only some ranks use has no gradient on the others.
    """
    assert all(a is None for a, b in zip(mine, want, strict=True) if b is None)
    pairs = [(torch.zeros_like(b) if a is None else a, b) for a, b in zip(mine, want, strict=True) if b is not None]
    for a, _ in pairs:
        dist.all_reduce(a)
    return (max((a - b).abs().max() for a, b in pairs) / max(b.abs().max() for _, b in pairs)).item()


def compare(model, inputs, loss, config, plan=None):
    """Return the error of the summed gradients of a split model."""
    want = gradients(model, inputs, loss)
    cp_attn.enable_parallelism(model, config, cp_plan=plan)
    got = gradients(model, inputs, loss)
    cp_attn.disable_parallelism(model)
    return error(got, want)


# --- the toy ---


def invariant(config):
    model, inputs = make(Mixed)
    return compare(model, inputs, lambda: loss_of(model(*inputs)), config, PLAN)


def several_backwards(config):
    """Gradients of two forwards add up, and the graph may be kept."""
    model, inputs = make(Mixed)

    def loss():
        first, second = loss_of(model(*inputs)), loss_of(model(inputs[0][:, :7], inputs[1]))
        first.backward(retain_graph=True)
        return first + second

    return compare(model, inputs, loss, config, PLAN)


def checkpoints(config):
    worst = 0.0
    for reentrant in (False, True):
        model, inputs = make(Mixed, reentrant)
        worst = max(worst, compare(model, inputs, lambda m=model, x=inputs: loss_of(m(*x)), config, PLAN))
    return worst


def checkpoints_of_two_forwards(config):
    """What is computed again belongs to another forward than the last one."""
    model, inputs = make(Mixed, False)
    return compare(
        model, inputs, lambda: loss_of(model(*inputs)) + loss_of(model(inputs[0][:, :7], inputs[1])), config, PLAN
    )


def frozen(config):
    model, inputs = make(Mixed)
    model.requires_grad_(False)
    return compare(model, inputs, lambda: loss_of(model(*inputs)), config, PLAN)


def one_output(config):
    """A loss that leaves an output alone."""
    model, inputs = make(Mixed)
    return max(
        compare(model, inputs, lambda: model(*inputs)["hidden"].pow(2).sum(), config, PLAN),
        compare(model, inputs, lambda: model(*inputs)["others"][0].pow(2).sum(), config, PLAN),
    )


def changed_in_place(config):
    model, inputs = make(Mixed)

    def loss():
        out = model(*inputs)
        out["hidden"].mul_(2.0).add_(1.0)
        return loss_of(out)

    return compare(model, inputs, loss, config, PLAN)


def outputs_left_split(config):
    """Each rank's loss is its own part of the sum."""
    model, inputs = make(Local)
    want = gradients(model, inputs, lambda: loss_of(model(*inputs)))
    cp_attn.enable_parallelism(model, config, cp_plan={"": {"hidden": In(1, 3)}})
    got = gradients(model, inputs, lambda: loss_of(model(*inputs)))
    cp_attn.disable_parallelism(model)
    return error(got, want)


def nothing_recorded(config):
    """Without gradients nothing is added to an output, and its values are the same."""
    model, inputs = make(Mixed)
    cp_attn.enable_parallelism(model, config, cp_plan=PLAN)
    recorded = model(*inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model(*inputs)
        for mine, theirs in ((out["hidden"], recorded["hidden"]), (out["others"][0], recorded["others"][0])):
            assert mine.grad_fn is None and theirs.grad_fn is not None and mine.equal(theirs)
    kept = []
    model.tail.register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        assert model(*inputs)["others"][0] is kept[0]
    cp_attn.disable_parallelism(model)
    return 0.0


SCENES = (
    invariant,
    several_backwards,
    checkpoints,
    checkpoints_of_two_forwards,
    frozen,
    one_output,
    changed_in_place,
    outputs_left_split,
    nothing_recorded,
)


# --- models ---


def is_float(x):
    return torch.is_tensor(x) and x.is_floating_point()


def tiny(name, uneven):
    model, inputs = tiny_models.make(name, uneven)
    return model.double(), mapped(lambda x: x.double() if is_float(x) else x, inputs)


def loss_of_tensors(found):
    generator = torch.Generator().manual_seed(6)
    return sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in found)


def loss_of_tiny(model, inputs):
    return loss_of_tensors(tensors(model(**inputs)))


def counted(model, function):
    """Return what `function` returns, and how often attention modules ran in it."""
    seen = []
    hooks = [m.register_forward_hook(lambda *_: seen.append(1)) for m in model.modules() if hasattr(m, "processor")]
    result = function()
    for hook in hooks:
        hook.remove()
    return result, len(seen)


def models(name, config, uneven):
    """Compare plainly, with checkpoints, and with a frozen model whose inputs have gradients."""
    model, inputs = tiny(name, uneven)
    floats = [x for x in inputs.values() if is_float(x)]

    def run(is_frozen=False):
        model.requires_grad_(not is_frozen)
        for x in floats:
            x.requires_grad_(is_frozen)
        return gradients(model, floats, lambda: loss_of_tiny(model, inputs))

    alone, alone_frozen = run(), run(True)
    cp_attn.enable_parallelism(model, config)
    plain, once = counted(model, run)
    frozen = run(True)
    model.enable_gradient_checkpointing()
    again, more = counted(model, run)
    cp_attn.disable_parallelism(model)
    return dict(
        error=error(plain, alone),
        again=error(again, alone),
        frozen=error(frozen, alone_frozen),
        calls=[once, more],
    )


def variation(name, config):
    """Compare outputs, and gradients of parameters and of all inputs but masks."""
    model, inputs = tiny(name, True)
    floats = []
    for key, value in inputs.items():
        if "mask" not in key:
            mapped(lambda x: floats.append(x.requires_grad_()) if is_float(x) else x, value)
    outs = []

    def loss():
        with torch.no_grad():
            outs.append(torch.cat([x.flatten() for x in tensors(model(**inputs))]))
        return loss_of_tiny(model, inputs)

    return dict(error=compare(model, floats, loss, config), out=(outs[0] - outs[1]).abs().max().item())


def autocast(name, config):
    """Return the relative errors of outputs and of gradients against float32, each of one process and of the ranks."""
    model, inputs = tiny_models.make(name, True)

    def run(is_on=True, is_split=False):
        outs = []

        def loss():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
                outs.extend(tensors(model(**inputs)))
            return loss_of_tensors([x.float() for x in outs])

        found = zip(gradients(model, [], loss), model.parameters(), strict=True)
        grad = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in found])
        if is_split:
            dist.all_reduce(grad)
        return torch.cat([x.detach().float().flatten() for x in outs]), grad

    exact, alone = run(is_on=False), run()
    cp_attn.enable_parallelism(model, config)
    split = run(is_split=True)
    model.enable_gradient_checkpointing()
    again = run(is_split=True)
    cp_attn.disable_parallelism(model)
    errors = [
        [((mine - x).norm() / x.norm()).item() for x, mine in zip(exact, found, strict=True)]
        for found in (alone, split)
    ]
    return dict(error=errors, again=split[1].equal(again[1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tiny_models.MODELS.update(VARIATIONS)
    dist.init_process_group("gloo")
    kind, config, names = sys.argv[1], CONFIGS[sys.argv[2]], sys.argv[3:]
    config = cp_attn.ContextParallelConfig(**config, timeout=60.0)
    if kind == "scenes":
        names = [scene.__name__ for scene in SCENES]
    elif kind == "variations":
        names = list(VARIATIONS)
    for name in names:
        try:
            if kind == "scenes":
                line = dict(error=globals()[name](config))
            elif kind == "variations":
                line = variation(name, config)
            elif kind == "autocast":
                line = autocast(name, config)
            else:
                line = models(name, config, kind == "uneven")
            say(name=name, failed=None, **line)
        except Exception:
            say(name=name, failed=traceback.format_exc()[-2500:])
    dist.destroy_process_group()
