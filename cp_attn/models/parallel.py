"""One enabled model: its context, hooks, marks, and what one forward of it has seen."""

from contextlib import contextmanager, suppress

import torch

from . import dispatch
from .hooks import ModuleHook, warn
from .plans import refusal
from .processors import Marks, check_backends, check_processors
from .streams import Streams


class Parallel(dispatch.Marker):
    """What stands in `_parallel_config` of an enabled model and of its processors."""

    tensor_parallel_config = None

    def __init__(self, model, config, context, plan, modules):
        self.model, self.config, self.context, self.plan = model, config, context, plan
        # A plan that gathers nothing leaves outputs split: each rank's loss is its own part of the sum.
        self.is_whole_outside = any(axis for module_plan in plan.values() for axis in module_plan.gathers)
        self.streams = Streams()
        self._modules = modules
        self._marks = Marks(self, model, modules)
        self._hooks = {}
        self._warned = set()
        self._counters = []
        self._ran = self._calls = 0  # in this forward: attention modules, and their calls that came here
        self._is_installed = False

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

    def commit(self):
        """Change the model; if that fails, leave it as it was."""
        try:
            dispatch.install()
            self._is_installed = True
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
        if self._is_installed:
            self._is_installed = False
            dispatch.uninstall()

    def begin(self, arguments):
        """Look, at the start of a forward, at everything that may have changed since the last one."""
        if self.context.closed:
            raise RuntimeError("the context of this model is closed; call enable_parallelism again")
        self.streams = Streams()
        self._ran = self._calls = 0
        check_processors(self.model, self._modules)
        # An offloaded model is elsewhere until its forward runs; its inputs are where it will be.
        devices = (x.device.type for x in arguments.values() if isinstance(x, torch.Tensor))
        check_backends(self.model, self._modules, next(devices, "cpu"))
        self._marks.refresh()
        dispatch.refresh()
        self._place_hooks()
        reason = refusal(self.model, arguments)
        if reason:
            raise NotImplementedError(f"{type(self.model).__name__}: {reason}")

    def end(self):
        """Look, at the end of a forward, whether its attention came here.

        A forward without any is right: a cache may have answered in its place.
        """
        # What checkpoints compute again while gradients are taken has been looked at, maybe two forwards ago.
        self.streams = Streams()
        if self._ran and not self._calls:
            raise RuntimeError(
                f"no attention of {type(self.model).__name__} came to cp_attn in this forward: its processors do not "
                "pass their _parallel_config to the dispatcher, and each rank saw its own part of the sequence only"
            )

    def attend(self, arguments):
        """Answer a call of the dispatcher."""
        with self.together():
            dispatch.check(arguments)
            sentence = self.streams.mixed(arguments["key"].shape[1])
            if sentence:
                raise ValueError(sentence)
        self._calls += 1
        return dispatch.attend(self.context, arguments)

    @contextmanager
    def together(self):
        """Raise an error of this rank on the other ranks too, at the call that they have reached.

        Calls on the context do not belong inside: they agree on their errors themselves.
        """
        try:
            yield
        except Exception as error:
            if not self.context.closed:
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
        self._ran += 1

    def _place_hooks(self):
        for path, plan in self.plan.items():
            module, hook = self.model.get_submodule(path), self._hooks.get(path)
            # A module may have been wrapped or replaced since, by LoRA layers for one.
            if hook is None or hook.module is not module:
                if hook is not None:
                    hook.remove()
                self._hooks[path] = ModuleHook(self, path, plan, module)
