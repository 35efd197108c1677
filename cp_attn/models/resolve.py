"""The modules that a plan names, and whether they have the parameters that it names."""

import inspect
from dataclasses import replace

from torch.nn import Module, ModuleList

from .plan import ModulePlan, parse


def resolve(model, plan):
    """Return {path: ModulePlan} with every `*` written out and every name checked against the model.

    Raises
    ------
    ValueError
        A module or a parameter does not exist, or one is named twice; the sentence names the entry.
    """
    found = {}
    for key, module_plan in parse(plan).items():
        for path in _expand(model, key):
            module = model.get_submodule(path)
            for name, value in module_plan.inputs.items():
                _check_parameter(module, key, name)
                if hasattr(value, "of"):
                    _check_parameter(module, key, value.of)
            # A copy: a module may be met by several entries.
            own = replace(module_plan, inputs=dict(module_plan.inputs), outputs=dict(module_plan.outputs))
            if path in found:
                found[path].merge(own, path)
            else:
                found[path] = own
    if not any(module_plan.inputs or module_plan.outputs for module_plan in found.values()):
        raise ValueError("the plan splits nothing: what it gathers would come back once for each rank")
    found.setdefault("", ModulePlan())
    return found


def _expand(model, key):
    """Yield the paths of the modules that a key with at most one `*` means."""
    names = key.split(".") if key else []
    if "*" not in names:
        _find(model, key, names)
        yield key
        return
    star = names.index("*")
    prefix, rest = names[:star], names[star + 1 :]
    parent = _find(model, key, prefix, is_list=True)
    for name, _ in parent.named_children():
        _find(model, key, [*prefix, name, *rest])
        yield ".".join([*prefix, name, *rest])


def _find(model, key, names, is_list=False):
    module, path = model, type(model).__name__
    for name in names:
        child = module._modules.get(name)
        if not isinstance(child, Module):
            children = ", ".join(list(module._modules)[:12]) or "no modules"
            raise ValueError(f"plan entry {key!r}: {path} has no module {name!r}; it has {children}")
        module, path = child, f"{child.__class__.__name__} {name!r}"
    if is_list and not isinstance(module, ModuleList):
        raise ValueError(f"plan entry {key!r}: '*' stands at {path}; a ModuleList is needed there")
    if not is_list and isinstance(module, ModuleList):
        raise ValueError(f"plan entry {key!r} names a ModuleList, which is never called; '{key}.*' means its modules")
    return module


def parameters(module):
    """Return the parameters of a module's forward, as its class wrote it: the instance's may be wrapped."""
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def position(module, name):
    """Return the place of a parameter among the positional ones, or None."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters(module) if p.kind in kinds]
    return names.index(name) if name in names else None


def _check_parameter(module, key, name):
    known = parameters(module)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known):
        return  # it may come by keyword: only the call will show
    names = [p.name for p in known if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    if name not in names:
        raise ValueError(
            f"plan entry {key!r}: {type(module).__name__}.forward has no parameter {name!r}; it has {', '.join(names)}"
        )
