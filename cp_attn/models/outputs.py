"""What a module returned, read and replaced by index: a tensor, a tuple, a list, a dict or a dataclass."""

import copy
import dataclasses


def elements(output):
    """Return the elements that a plan's indices mean; a single value is element 0."""
    found = _elements(output)
    return [output] if found is None else found


def _elements(output):
    """Return the elements of a value that has some, else None."""
    if isinstance(output, (list, tuple)):
        return list(output)
    if hasattr(output, "keys"):
        return [output[key] for key in output.keys()]
    if dataclasses.is_dataclass(output):
        return [getattr(output, f.name) for f in dataclasses.fields(output)]
    return None


def mapped(function, output):
    """Return an output of the same type with `function` applied to all single values in it, however deep."""
    found = _elements(output)
    if found is None:
        return function(output)
    values = [mapped(function, value) for value in found]
    return replaced(output, {i: new for i, (new, old) in enumerate(zip(values, found, strict=True)) if new is not old})


def replaced(output, changes):
    """Return an output of the same type with the elements of {index: value} changed; `output` itself is not."""
    if not changes:
        return output
    if dataclasses.is_dataclass(output):
        names = list(output.keys()) if hasattr(output, "keys") else [f.name for f in dataclasses.fields(output)]
        return dataclasses.replace(output, **{names[i]: value for i, value in changes.items()})
    if hasattr(output, "keys"):
        keys, output = list(output.keys()), copy.copy(output)
        for i, value in changes.items():
            output[keys[i]] = value
        return output
    if not isinstance(output, (list, tuple)):
        return changes[0]
    values = [changes.get(i, value) for i, value in enumerate(output)]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*values)
    return type(output)(values)
