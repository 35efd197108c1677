"""One rank: tiny models one after the other, alone and then split, with one config. Prints a JSON line for each."""

import json
import sys
import traceback
import warnings

import torch
from launch import say
from tiny_models import make, tensors

import cp_attn


def difference(a, b):
    """Return the largest difference, relative to the largest value where that is above one."""
    assert [x.shape for x in a] == [x.shape for x in b] and not any(x.isnan().any() for x in a)
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1)).item() for x, y in zip(a, b, strict=True))


def local_rows(model, inputs):
    """Return the largest number of rows that a query projection meets."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
        for name, module in model.named_modules()
        if name.endswith((".to_q", ".to_qkv_mlp_proj"))
    ]
    model(**inputs, return_dict=False)
    for hook in hooks:
        hook.remove()
    return max(seen)


def compare(name, config, uneven):
    model, inputs = make(name, uneven)
    alone = model(**inputs)
    rows = local_rows(model, inputs)
    cp_attn.enable_parallelism(model, config)
    together = model(**inputs)
    line = dict(
        difference=difference(tensors(together), tensors(alone)),
        tuples=difference(tensors(model(**inputs, return_dict=False)), tensors(alone)),
        is_same_type=type(together) is type(alone),
        rows=[rows, local_rows(model, inputs)],
    )
    cp_attn.disable_parallelism(model)
    return line | dict(after=difference(tensors(model(**inputs)), tensors(alone)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore", "cp_attn: parameter 'timestep'")
    config = cp_attn.ContextParallelConfig(**json.loads(sys.argv[1]), timeout=60.0)
    for name in sys.argv[3:]:
        try:
            say(model=name, **compare(name, config, sys.argv[2] == "uneven"))
        except Exception:
            say(model=name, error=traceback.format_exc()[-2000:])
