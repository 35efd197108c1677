"""One enabled model: its context, hooks, marks, and what one forward of it has seen."""

import weakref
from contextlib import contextmanager, suppress

import torch
from torch.compiler import assume_constant_result, is_compiling

from . import dispatch
from .exchange import Exchange
from .hooks import ModuleHook, warn
from .plans import refusal
from .processors import Marks, check_backends, check_processors
from .streams import Streams


class Parallel(dispatch.Marker):
    """What stands in `_parallel_config` of an enabled model and of its processors."""

    tensor_parallel_config = None

    def __init__(self, model, config, context, plan, modules):
        self.model, self.config, self.context, self.plan = model, config, context, plan
        self.exchange = Exchange(context)
        # A plan that gathers nothing leaves outputs split: each rank's loss is its own part of the sum.
        self.is_whole_outside = any(axis for module_plan in plan.values() for axis in module_plan.gathers)
        self.streams = Streams()
        self._modules = modules
        self._marks = Marks(self, model, modules)
        self._hooks = {}
        self._warned = set()
        self._counters = []
        self._has_run = self._has_come = False  # in this forward: an attention module, and a call that came here
        self._leave_dispatch = None

    @property
    def context_parallel_config(self):
        """The config, under the name that diffusers reads."""
        return self.config

    @property
    def is_anything(self):
        """Whether lengths may differ between ranks."""
        return self.config.ring_anything or self.config.ulysses_anything or self.config.unified_anything

    @property
    def way_out(self):
        """The flag that admits any length with these degrees."""
        if self.config.ulysses_degree == 1:
            return "ring_anything"
        return "ulysses_anything" if self.config.ring_degree == 1 else "unified_anything"

    def size_of(self, rows):
        """Return the whole length of what this rank holds `rows` of; None where it cannot tell."""
        return self.streams.size_of(rows) if self.is_anything else rows * self.exchange.world

    def commit(self):
        """Change the model; if that fails, leave it as it was."""
        try:
            dispatch.install()
            # A model that goes away while it is enabled takes its wrapping along.
            self._leave_dispatch = weakref.finalize(self.model, dispatch.uninstall)
            self._leave_dispatch.atexit = False
            self._marks.refresh()
            self._place_hooks()
            self._counters = [module.register_forward_pre_hook(self._count) for _, module in self._modules]
        except BaseException:
            self.undo()
            raise

    def undo(self):
        """Leave the model, its processors and diffusers' registry as they were found."""
        for hook in (*self._hooks.values(), *self._counters):
            hook.remove()
        self._hooks.clear()
        self._counters.clear()
        self._marks.remove()
        if self._leave_dispatch is not None:
            self._leave_dispatch()

    def begin(self, arguments):
        """Start a forward."""
        self.streams = Streams()
        # An offloaded model is elsewhere until its forward runs; its inputs are where it will be.
        devices = [x.device.type for x in arguments.values() if isinstance(x, torch.Tensor)]
        self._look(devices[0] if devices else "cpu")
        reason = refusal(self.model, arguments)
        if reason:
            raise NotImplementedError(f"{type(self.model).__name__}: {reason}")

    def end(self):
        """End a forward."""
        # What checkpoints compute again while gradients are taken has been looked at, maybe two forwards ago.
        self.streams = Streams()
        self._check_attention()

    # The compiler of torch calls the next four while it compiles, and writes nothing of them into its graph: a change
    # of what they look at makes it compile anew.

    @assume_constant_result
    def _look(self, device):
        """Look at everything that may have changed since the last forward."""
        if self.context.closed:
            raise RuntimeError("the context of this model is closed; call enable_parallelism again")
        self._has_run = self._has_come = False
        check_processors(self.model, self._modules)
        check_backends(self.model, self._modules, device)
        self._marks.refresh()
        dispatch.refresh()
        self._place_hooks()

    @assume_constant_result
    def _note_run(self):
        self._has_run = True

    @assume_constant_result
    def _note_come(self):
        self._has_come = True

    @assume_constant_result
    def _check_attention(self):
        """Refuse a forward whose attention did not come here. One without any is right: a cache may have answered."""
        if self._has_run and not self._has_come:
            raise RuntimeError(
                f"no attention of {type(self.model).__name__} came to cp_attn in this forward: its processors do not "
                "pass their _parallel_config to the dispatcher, and each rank saw its own part of the sequence only"
            )

    def attend(self, arguments, backend):
        """Answer a call of the dispatcher."""
        with self.together():
            dispatch.check(arguments)
            keys, mask = arguments["key"].shape[1], arguments.get("attn_mask")
            sentence = self.streams.mixed(keys)
            if mask is not None and not sentence:
                sentence = self.streams.unplaced(keys, mask.shape[-1])
            if sentence:
                raise ValueError(sentence)
        self._note_come()
        # Without an anything flag all ranks have the same lengths.
        return dispatch.attend(self.exchange, arguments, backend, self.streams if self.is_anything else None)

    @contextmanager
    def together(self):
        """Raise an error of this rank on the other ranks too, at the call that they have reached.

        Calls on the context do not belong inside: they agree on their errors themselves.
        """
        try:
            yield
        except Exception as error:
            # What compiling meets is raised again by the code that runs in its place.
            if not is_compiling() and not self.context.closed:
                # Where telling fails, for a context that is broken, the rank's own error still says more.
                with suppress(Exception):
                    self.context.agree(error)
            raise

    def warn_once(self, sentence):
        """Warn, once for each sentence."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            warn(sentence)

    def _count(self, module, args):
        self._note_run()

    def _place_hooks(self):
        for path, plan in self.plan.items():
            module, hook = self.model.get_submodule(path), self._hooks.get(path)
            # A module may have been wrapped or replaced since, by LoRA layers for one.
            if hook is None or hook.module is not module:
                if hook is not None:
                    hook.remove()
                self._hooks[path] = ModuleHook(self, path, plan, module)
