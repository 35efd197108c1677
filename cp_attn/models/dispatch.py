"""The way from diffusers' attention dispatcher to cp_attn.

A processor hands its `_parallel_config` to the dispatcher, which hands it to the function of a backend. While a model
is enabled these functions are wrapped: a call that carries a `Parallel` object goes to cp_attn, any other goes on as
before. The dispatcher drops arguments that a backend is not registered for, so the registration is widened as well.
"""

import functools
import inspect

from .. import _C

# By the kind of device: diffusers' names of the backends whose place cp_attn can take. A call carries the name, which
# says whose kernel computes.
COMPATIBLE = _C._backends

_ARGUMENTS = frozenset(
    ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse")
) | {"_parallel_config"}
_RELIED_ON = ("_backends", "_supported_arg_names", "_supports_context_parallel", "get_active_backend")

_in_use = 0  # models that are enabled
_originals = {}  # backend: (function, argument names)
_allowed = None  # what _supports_context_parallel held before


class Marker:
    """What marks a call as ours; the base of `Parallel`."""

    def attend(self, arguments, backend):
        """Answer a call of the dispatcher for the backend of that name."""
        raise NotImplementedError


@functools.cache
def registry():
    """Return diffusers' registry of backends, after a look whether it is built as this module needs it."""
    try:
        import diffusers
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise RuntimeError(f"enable_parallelism needs diffusers: {error}") from error
    found = getattr(attention_dispatch, "_AttentionBackendRegistry", None)
    dispatch = getattr(attention_dispatch, "dispatch_attention_fn", None)
    missing = [name for name in _RELIED_ON if not hasattr(found, name)]
    if dispatch is None or "parallel_config" not in inspect.signature(dispatch).parameters:
        missing.append("dispatch_attention_fn(parallel_config=...)")
    if missing:
        raise RuntimeError(
            f"diffusers {diffusers.__version__} lacks {', '.join(missing)}, which cp_attn relies on; "
            "0.42.1 is known to work"
        )
    return found


def active_backend():
    """Return the name of the backend that serves processors without one of their own."""
    return name_of(registry().get_active_backend()[0])


def name_of(backend):
    """Return the name of a backend, an enum member or a string."""
    return str(getattr(backend, "value", backend))


def install():
    """Wrap the backends, for one more enabled model."""
    global _in_use, _allowed
    found = registry()
    if _in_use == 0:
        _allowed = set(found._supports_context_parallel)
        # `set_attention_backend` refuses at once what is not in this list.
        _replace(found._supports_context_parallel, {name for names in COMPATIBLE.values() for name in names})
    _in_use += 1
    refresh()


def refresh():
    """Wrap what has been registered since."""
    found = registry()
    for backend, function in found._backends.items():
        if getattr(function, "_cp_attn_original", None) is None:
            names = found._supported_arg_names[backend]
            _originals[backend] = function, names
            found._backends[backend] = _wrapped(backend, function, names)
            found._supported_arg_names[backend] = set(names) | _ARGUMENTS


def uninstall():
    """Take the wrapping away with the last enabled model."""
    global _in_use, _allowed
    _in_use -= 1
    if _in_use:
        return
    found = registry()
    for backend, (function, names) in _originals.items():
        # Another one, put there by somebody else in the meantime, stays.
        if getattr(found._backends.get(backend), "_cp_attn_original", None) is function:
            found._backends[backend] = function
            found._supported_arg_names[backend] = names
    _originals.clear()
    _replace(found._supports_context_parallel, _allowed)
    _allowed = None


def _replace(names, values):
    names.clear()
    names.update(values)


def _wrapped(backend, function, accepted):
    name = name_of(backend)

    def wrapped(**arguments):
        parallel = arguments.get("_parallel_config")
        if isinstance(parallel, Marker):
            return parallel.attend(arguments, name)
        return function(**{k: v for k, v in arguments.items() if k in accepted})

    wrapped._cp_attn_original = function
    return wrapped


def check(arguments):
    """Refuse what `attend` has no place for."""
    dropout = arguments.get("dropout_p", 0.0)
    if dropout:
        raise ValueError(f"dropout_p is {dropout}; attention with dropout is not offered, 0.0 is needed")
    for name, value in arguments.items():
        if name not in _ARGUMENTS and value is not None:
            raise ValueError(f"attention was called with {name}={value!r}, which cp_attn has no place for")


def attend(exchange, arguments, backend, streams=None):
    """Run one attention call of the dispatcher, in a model whose streams may tell the ranks' lengths."""
    return exchange.attend(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        arguments.get("attn_mask"),
        arguments.get("is_causal", False),
        arguments.get("scale"),
        arguments.get("enable_gqa", False),
        arguments.get("return_lse", False),
        backend,
        streams,
    )
