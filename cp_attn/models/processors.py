"""The attention modules of a model: what can be checked of them, and the mark on their processors."""

from itertools import chain

import torch

from . import dispatch

_ABSENT = object()


def attention_modules(model):
    """Return [(path, module)] of what diffusers or the model itself treats as attention."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    classes = (Attention, MochiAttention, AttentionModuleMixin)
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, classes) or hasattr(getattr(module, "processor", None), "_parallel_config")
    ]


def check_processors(model, modules):
    """Refuse a model whose attention would not come to cp_attn."""
    name = type(model).__name__
    if not modules:
        raise ValueError(
            f"{name} has no attention that goes through diffusers' dispatcher: nothing can be made parallel"
        )
    for path, module in modules:
        processor = getattr(module, "processor", None)
        if not hasattr(processor, "_parallel_config"):
            raise ValueError(
                f"attention module {path!r} of {name} has the processor {type(processor).__name__}, which does not go "
                "through diffusers' dispatcher: it would see its own part of the sequence only"
            )


def check_backends(model, modules, device):
    """Refuse backends that cp_attn cannot take the place of on the model's device."""
    allowed = dispatch.COMPATIBLE.get(device, ())
    active = dispatch.active_backend()
    for path, module in modules:
        own = getattr(module.processor, "_attention_backend", None)
        backend = active if own is None else dispatch.name_of(own)
        if backend not in allowed:
            devices = " and ".join(dispatch.COMPATIBLE)
            what = f"compatible ones are {', '.join(allowed)}" if allowed else f"cp_attn runs on {devices} only"
            raise ValueError(
                f"attention module {path!r} of {type(model).__name__} uses the backend {backend!r}, which "
                f"cp_attn cannot run on {device}; {what}"
            )


def check_heads(modules, config):
    """Refuse head counts that the Ulysses ranks cannot share evenly, where they must."""
    degree = config.ulysses_degree
    if degree == 1 or config.ulysses_anything or config.unified_anything:
        return
    way_out = "ulysses_anything" if config.ring_degree == 1 else "unified_anything"
    for path, module in modules:
        heads = getattr(module, "heads", None)
        if isinstance(heads, int) and heads % degree:
            raise ValueError(
                f"attention module {path!r} has {heads} heads, which ulysses_degree {degree} does not divide; "
                f"use {way_out}, or another degree"
            )


def device_of(model):
    """Return the kind of device that a model runs on, as far as can be told between its forwards."""
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            return tensor.device.type
    # Offloaded layer by layer: accelerate's hooks know where the layers will run.
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    device = next((h.execution_device for h in hooks if getattr(h, "execution_device", None) is not None), "cpu")
    return torch.device(device).type


class Marks:
    """The mark on a model and on every processor of it, and what was there before."""

    def __init__(self, mark, model, modules):
        self._mark, self._model, self._modules = mark, model, modules
        self._before = {}  # id: (model or processor, what its own _parallel_config was)

    def refresh(self):
        """Mark the processors that the model has now, and unmark those that it has no more."""
        marked = [self._model, *(module.processor for _, module in self._modules)]
        current = {id(owner): owner for owner in marked}
        for key, owner in current.items():
            if key not in self._before:
                self._before[key] = owner, vars(owner).get("_parallel_config", _ABSENT)
                owner._parallel_config = self._mark
        for key in self._before.keys() - current.keys():
            self._restore(key)

    def remove(self):
        """Leave everything as it was found."""
        for key in list(self._before):
            self._restore(key)

    def _restore(self, key):
        owner, before = self._before.pop(key)
        if before is not _ABSENT:
            owner._parallel_config = before
        elif "_parallel_config" in vars(owner):
            del owner._parallel_config
