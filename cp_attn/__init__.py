"""Context-parallel attention: one attention over a sequence that several processes hold in parts."""

from ._C import (
    CommError,
    CommTimeout,
    ContextParallelConfig,
    DeviceError,
    Error,
    InternalError,
    NotSupported,
    __version__,
    attention,
)
from ._contexts import close, init

# What needs torch or diffusers is imported at its first use.
_LAZY = {
    "ContextParallelInput": "plan",
    "ContextParallelOutput": "plan",
    "disable_parallelism": "enable",
    "enable_parallelism": "enable",
    "install": "install",
    "uninstall": "install",
}

__all__ = [
    "CommError",
    "CommTimeout",
    "ContextParallelConfig",
    "ContextParallelInput",
    "ContextParallelOutput",
    "DeviceError",
    "Error",
    "InternalError",
    "NotSupported",
    "__version__",
    "attention",
    "close",
    "disable_parallelism",
    "enable_parallelism",
    "init",
    "install",
    "uninstall",
]


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.models.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_LAZY))
