"""cp_attn in the place of diffusers' own parallelism.

`from_pretrained` and `enable_parallelism` of diffusers' base classes are replaced; what inherits them needs no change.
"""

import functools
import inspect

from .. import _contexts
from . import dispatch

_replaced = {}  # (class, name): (diffusers' method, the one in its place)


def install():
    """Let diffusers' models be split by cp_attn where diffusers itself would split them.

    Afterwards `from_pretrained(..., parallel_config=config)` of `AutoModel` and of every model class, and
    `model.enable_parallelism(config=config, cp_plan=plan)`, do what `cp_attn.enable_parallelism` does, for a config of
    cp_attn or of diffusers. A second call changes nothing. It may come before or after diffusers is imported.

    Raises
    ------
    ImportError
        diffusers, or what it needs, is not installed.
    RuntimeError
        This diffusers is not built as cp_attn needs it; the sentence says what it lacks.

    Notes
    -----
    Ranks that load with a `parallel_config` meet before any of them reads a file. A load that fails on one rank raises
    on all ranks, and no model is left enabled.

    Examples
    --------
    >>> cp_attn.install()  # doctest: +SKIP
    >>> config = cp_attn.ContextParallelConfig(ring_degree=2)  # doctest: +SKIP
    >>> model = diffusers.AutoModel.from_pretrained(folder, parallel_config=config)  # doctest: +SKIP
    """
    if _replaced:
        return
    mixin, auto = _classes()
    for owner, name, replacement in (
        (mixin, "enable_parallelism", _enabling),
        (mixin, "from_pretrained", _loading),
        (auto, "from_pretrained", _loading),
    ):
        original = vars(owner)[name]
        _replaced[owner, name] = original, replacement(original)
    for (owner, name), (_, ours) in _replaced.items():
        setattr(owner, name, ours)


def uninstall():
    """Put diffusers' own methods back; models that are enabled stay so. Without `install`, nothing happens."""
    for (owner, name), (original, ours) in _replaced.items():
        # Another one, put there by somebody else in the meantime, stays; ours below it hands on to the original.
        if vars(owner)[name] is ours:
            setattr(owner, name, original)
    _replaced.clear()


def _classes():
    """Return `ModelMixin` and `AutoModel`, after a look whether they are built as this module needs them."""
    try:
        import diffusers
        from diffusers.models.auto_model import AutoModel
        from diffusers.models.modeling_utils import ModelMixin
    except ImportError as error:
        raise ImportError(f"cp_attn.install needs diffusers, 0.42.1 for one: {error}") from error
    dispatch.registry()
    enable = vars(ModelMixin).get("enable_parallelism")
    missing = [
        f"{owner.__name__}.from_pretrained"
        for owner in (ModelMixin, AutoModel)
        if not isinstance(vars(owner).get("from_pretrained"), classmethod)
    ]
    if not inspect.isfunction(enable) or not {"config", "cp_plan"} <= set(inspect.signature(enable).parameters):
        missing.append("ModelMixin.enable_parallelism(config=..., cp_plan=...)")
    if missing:
        raise RuntimeError(
            f"diffusers {diffusers.__version__} lacks {', '.join(missing)}, which cp_attn.install relies on; "
            "0.42.1 is known to work"
        )
    return ModelMixin, AutoModel


def _enabling(original):
    @functools.wraps(original)
    def enable_parallelism(self, *, config, cp_plan=None):
        if not _replaced:
            return original(self, config=config, cp_plan=cp_plan)
        from .enable import enable_parallelism

        enable_parallelism(self, config, cp_plan=cp_plan)

    return enable_parallelism


def _loading(original):
    @functools.wraps(original.__func__)
    def from_pretrained(cls, *args, **kwargs):
        load = original.__get__(None, cls)
        if not _replaced or kwargs.get("parallel_config") is None:
            return load(*args, **kwargs)
        config = kwargs.pop("parallel_config")
        with _contexts.init(config) as context:
            loaded, model, error = None, None, None
            try:
                loaded = load(*args, **kwargs)
                model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True gives two
            except Exception as found:
                error = found
            context.agree(error, type(model).__name__)
        model.enable_parallelism(config=config)
        return loaded

    return classmethod(from_pretrained)
