"""Enabling and disabling: check everything, agree with the other ranks, then change the model."""

import hashlib

from torch import tensor
from torch.nn import Module

from .. import _contexts
from . import dispatch
from .parallel import Parallel
from .plans import plan_for
from .processors import attention_modules, check_backends, check_heads, check_processors, device_of
from .resolve import resolve


def enable_parallelism(model, config, *, cp_plan=None):
    """Split a model's forward over the ranks.

    Every rank calls it with the same model, config and plan, and afterwards calls the model with the same whole
    inputs. Every rank gets the whole output. A call that raises leaves the model as it was, on all ranks. A second call
    with the same config and plan changes nothing; with others, the model is disabled and enabled anew.

    Parameters
    ----------
    model : torch.nn.Module
        A diffusers model, or one whose attention goes through diffusers' dispatcher.
    config : ContextParallelConfig
        One of diffusers is accepted as well.
    cp_plan : dict, optional
        From module paths to what is split or gathered there; the model's own plan if not given.

    Raises
    ------
    ValueError
        A check failed: degrees against ranks or mesh, the plan against the model, attention backends, head counts; or
        ranks called with different arguments.
    TypeError
        `model` is no module, or `config` no config.
    RuntimeError
        No launcher says which rank this is; diffusers is missing or of an unknown build; diffusers' own parallelism is
        on.

    Notes
    -----
    If one rank raises, all ranks raise, with the same reason and the rank that found it.

    Gradients: let every rank compute the same loss from the whole output. The gradient of a parameter is then the sum
    of the ranks' gradients, which the training loop takes (`docs/training.md`). The gradient of a tensor that is split
    is its own slice's; that of one that is whole on every rank is the sum over the ranks of what each of them holds.
    Where a plan gathers nothing, outputs stay split, and each rank's loss is its own part of the sum.

    Examples
    --------
    >>> config = cp_attn.ContextParallelConfig(ring_degree=2)  # doctest: +SKIP
    >>> cp_attn.enable_parallelism(pipe.transformer, config)  # doctest: +SKIP
    """
    model, error, plan, modules = _inner(model), None, None, None
    try:
        config = _contexts.read_config(config)
        plan, modules = _checked(model, config, cp_plan)
    except Exception as found:
        error = found
    # A new context even for a model that is enabled: whether it is may differ between ranks, and all must meet.
    context = _contexts.meet(config, error)
    try:
        context.agree(None, _summary(model, config, plan))
        old = _enabled(model)
        is_same = old is not None and not old.context.closed and (old.config, old.plan) == (config, plan)
        if context.gather(tensor([is_same]), 0).all():
            context.close()
            return
        disable_parallelism(model)
        Parallel(model, config, context, plan, modules).commit()
    except BaseException:
        context.close()
        raise


def disable_parallelism(model):
    """Leave a model as it was before `enable_parallelism`, and close its context.

    Every rank must call it. A model that is not enabled is left alone.

    Parameters
    ----------
    model : torch.nn.Module
        The model that was enabled.
    """
    parallel = _enabled(_inner(model))
    if parallel is not None:
        parallel.undo()
        parallel.context.close()


def _inner(model):
    """Return the module inside torch.compile's wrapper, which is what has the attention."""
    return getattr(model, "_orig_mod", model)


def _enabled(model):
    found = getattr(model, "_parallel_config", None)
    return found if isinstance(found, Parallel) else None


def _checked(model, config, cp_plan):
    if not isinstance(model, Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch module is needed, such as pipe.transformer")
    dispatch.registry()
    if getattr(model, "_parallel_config", None) is not None and _enabled(model) is None:
        raise RuntimeError(f"diffusers' own parallelism is enabled on this {type(model).__name__}")
    plan = resolve(model, plan_for(model) if cp_plan is None else cp_plan)
    modules = attention_modules(model)
    check_processors(model, modules)
    check_backends(model, modules, device_of(model))
    check_heads(modules, config)
    return plan, modules


def _summary(model, config, plan):
    """Return one line that is equal on two ranks exactly if they are about to do the same."""
    fields = [f"{name}={getattr(config, name)!r}" for name in _contexts.COMPARED]
    digest = hashlib.sha256(repr((fields, sorted(plan.items()))).encode()).hexdigest()[:12]
    ring, ulysses = config.mesh_shape
    return f"enable_parallelism({type(model).__name__}), ring {ring} x ulysses {ulysses}, config and plan {digest}"
