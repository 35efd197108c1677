"""What happens before and after the forward of a module that a plan names."""

import warnings

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy

from . import outputs
from .exchange import part
from .plan import Axis, LocalTail
from .resolve import parameters, position


class ModuleHook:
    """The hooks of one module; `remove` takes them away without a trace."""

    def __init__(self, parallel, path, plan, module):
        self._parallel, self._path, self._plan, self._class = parallel, path, plan, type(module).__name__
        self.module = module
        # Tails first: they count in tensors that are still whole.
        self._inputs = sorted(plan.inputs.items(), key=lambda entry: not isinstance(entry[1], LocalTail))
        self._names = [p.name for p in parameters(module)]
        self._positions = {name: position(module, name) for name in self._names}
        self._handles = [module.register_forward_pre_hook(self._before, with_kwargs=True)]
        if not path or plan.outputs or plan.gathers:
            # Ahead of other hooks, which then see what a single process would show them.
            self._handles.append(module.register_forward_hook(self._after, prepend=True))

    def remove(self):
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module, args, kwargs):
        with self._parallel.together():
            if not self._path:
                self._parallel.begin(self._arguments(args, kwargs))
            args, kwargs = list(args), dict(kwargs)
            for name, entry in self._inputs:
                value, put = self._parameter(name, args, kwargs)
                if value is not None:
                    put(self._cut(name, value, entry, args, kwargs))
            if not self._path:
                for name, value in self._arguments(args, kwargs).items():
                    if name not in self._plan.inputs:
                        for x in value if isinstance(value, (list, tuple)) else [value]:
                            self._note_whole(f"parameter {name!r}", x)
        return tuple(args), kwargs

    def _after(self, module, args, output):
        with self._parallel.together():
            if not self._path:
                self._parallel.end()
            changes = {i: self._split(where, x, axis) for i, where, x, axis in self._chosen(output, self._plan.outputs)}
            output = outputs.replaced(output, changes)
            chosen = [
                (i, x, axis)
                for i, where, x, axis in self._chosen(output, dict(enumerate(self._plan.gathers)))
                if self._fits(where, x, axis)
            ]
        exchange = self._parallel.exchange
        whole = {i: exchange.gather(x, axis.dim, self._parallel.size_of) for i, x, axis in chosen}
        output = outputs.replaced(output, whole)
        if not self._path and self._parallel.is_whole_outside:
            output = outputs.mapped(exchange.leave, output)
        return output

    def _arguments(self, args, kwargs):
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _parameter(self, name, args, kwargs):
        """Return a parameter's value and how to replace it; None where the call does not pass it."""
        if name in kwargs:
            return kwargs[name], lambda value: kwargs.__setitem__(name, value)
        at = self._positions.get(name)
        if at is not None and at < len(args):
            return args[at], lambda value: args.__setitem__(at, value)
        return None, None

    def _cut(self, name, value, entry, args, kwargs):
        where = f"parameter {name!r}"
        if isinstance(entry, LocalTail):
            whole, _ = self._parameter(entry.of, args, kwargs)
            return value if whole is None else self._tail(whole.shape[entry.dim], value)
        if isinstance(value, torch.Tensor):
            if not isinstance(entry, Axis):
                raise ValueError(f"{self._at(where)} is a tensor, but the plan has a list of {len(entry)} for it")
            return self._split(where, value, entry)
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{self._at(where)} is a {type(value).__name__}; a tensor or a list of them can be split")
        entries = [entry] * len(value) if isinstance(entry, Axis) else entry
        if len(entries) != len(value):
            raise ValueError(f"{self._at(where)} has {len(value)} elements, but the plan has {len(entries)} for it")
        changes = {}
        for i, (x, axis) in enumerate(zip(value, entries, strict=True)):
            if axis is None:
                self._note_whole(f"{where}, element {i}", x)
            elif isinstance(x, torch.Tensor):
                changes[i] = self._split(f"{where}, element {i}", x, axis)
        return outputs.replaced(value, changes)

    def _tail(self, size, tail):
        first, count = part(size, self._parallel.exchange.rank, self._parallel.exchange.world)
        return min(count, max(0, first + count - (size - tail)))

    def _chosen(self, output, entries):
        """Return [(index, its name, tensor, axis)] for the outputs that {index: axis} means."""
        entries = {i: axis for i, axis in entries.items() if axis is not None}
        if not entries:
            return []
        found = outputs.elements(output)
        if max(entries) >= len(found):
            raise ValueError(f"{self._at(f'output {max(entries)}')} does not exist: the module returned {len(found)}")
        chosen = [(i, f"output {i}", found[i], axis) for i, axis in entries.items() if found[i] is not None]
        for _, where, x, _ in chosen:
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"{self._at(where)} is a {type(x).__name__}; a tensor is needed")
        return chosen

    def _split(self, where, x, axis):
        if not self._fits(where, x, axis):
            self._note_whole(where, x)
            return x
        size, world = x.shape[axis.dim], self._parallel.exchange.world
        what = f"{self._at(where)}: dim {axis.dim} has {size} rows"
        if size < world:
            raise ValueError(f"{what}, fewer than the {world} ranks: every rank needs at least one")
        if size % world and not self._parallel.is_anything:
            raise ValueError(
                f"{what}, which {world} ranks cannot share evenly; use {self._parallel.way_out}, or another length"
            )
        local = self._parallel.exchange.split(x, axis.dim)
        self._parallel.streams.add_split(where, size, local.shape[axis.dim])
        return local

    def _fits(self, where, x, axis):
        if axis.dims is not None and x.dim() != axis.dims:
            self._parallel.warn_once(
                f"{self._at(where)} has {x.dim()} dims, but the plan expects {axis.dims}: it is left as it is"
            )
            return False
        if not -x.dim() <= axis.dim < x.dim():
            raise ValueError(f"{self._at(where)} has {x.dim()} dims; the plan means dim {axis.dim}")
        return True

    def _note_whole(self, where, x):
        if isinstance(x, torch.Tensor) and x.dim() == 3 and x.is_floating_point():
            self._parallel.streams.add_whole(where, x.shape[1])

    def _at(self, where):
        return f"{where} of {f'module {self._path!r}' if self._path else 'the model'} ({self._class})"


# Hooks that run outside of a compiled forward, as the model's own do, are no graphs of their own.
for _hook in (ModuleHook._before, ModuleHook._after):
    set_code_exec_strategy(_hook.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def warn(sentence):
    """Warn the caller of the model."""
    warnings.warn(f"cp_attn: {sentence}", stacklevel=2)
