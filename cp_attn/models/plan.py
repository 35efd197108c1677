"""What a plan is, and its reading: from a user's dict to checked values. Needs no torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ContextParallelInput:
    """Split a tensor that enters a module, or one that leaves it.

    Parameters
    ----------
    split_dim : int
        The dim that is split over the ranks.
    expected_dims : int, optional
        A tensor with another number of dims is left whole, with one warning.
    split_output : bool
        The tensor is the module's output; its key in the plan is the output's index.
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False


@dataclass(frozen=True)
class ContextParallelOutput:
    """Gather a tensor that leaves a module, so that every rank holds it whole.

    Parameters
    ----------
    gather_dim : int
        The dim along which the ranks' parts are concatenated.
    expected_dims : int, optional
        A tensor with another number of dims is left as it is, with one warning.
    """

    gather_dim: int
    expected_dims: int | None = None


@dataclass(frozen=True)
class LocalTail:
    """An integer parameter that counts the last rows of a split one becomes the number of them that the rank holds."""

    of: str
    dim: int


@dataclass(frozen=True)
class Axis:
    """A dim to split or gather along, and the number of dims that the tensor must have (None: any)."""

    dim: int
    dims: int | None = None


@dataclass
class ModulePlan:
    """What happens at one module. A tuple in `inputs` belongs to the elements of a list."""

    inputs: dict[str, "Axis | LocalTail | tuple[Axis | None, ...]"] = field(default_factory=dict)
    outputs: dict[int, Axis] = field(default_factory=dict)
    gathers: tuple["Axis | None", ...] = ()

    def merge(self, other, path):
        """Add another entry for the same module."""
        twice = [f"parameter {name!r}" for name in self.inputs.keys() & other.inputs.keys()]
        twice += [f"output {i}" for i in self.outputs.keys() & other.outputs.keys()]
        twice += ["outputs to gather"] if self.gathers and other.gathers else []
        if twice:
            raise ValueError(f"the plan names {twice[0]} of module {path!r} twice")
        self.inputs.update(other.inputs)
        self.outputs.update(other.outputs)
        self.gathers = self.gathers or other.gathers


def parse(plan):
    """Return {module path: ModulePlan} for a plan, paths still with their `*`.

    Raises
    ------
    ValueError
        Something in it is not what a plan may hold; the sentence names the entry.
    """
    if not hasattr(plan, "items"):
        raise ValueError(f"the plan is a {type(plan).__name__}; a dict from module paths to what is split is needed")
    if not plan:
        raise ValueError("the plan is empty: nothing would be split")
    return {_path(path): _module_plan(path, value) for path, value in plan.items()}


def _path(path):
    if not isinstance(path, str):
        raise ValueError(f"plan key {path!r} is a {type(path).__name__}; the path of a module is needed")
    if path.split(".").count("*") > 1:
        raise ValueError(f"plan key {path!r} has more than one '*'; one is allowed")
    return path


def _module_plan(path, value):
    if hasattr(value, "items"):
        return _inputs(path, value)
    values = value if isinstance(value, (list, tuple)) else [value]
    if all(v is None for v in values) or not all(v is None or hasattr(v, "gather_dim") for v in values):
        raise ValueError(
            f"plan entry {path!r} is {value!r}; a dict of inputs, a ContextParallelOutput or a list of them is needed"
        )
    gathers = tuple(
        None if v is None else _axis(v, "gather_dim", f"plan entry {path!r}, output {i}") for i, v in enumerate(values)
    )
    return ModulePlan(gathers=gathers)


def _inputs(path, entries):
    plan = ModulePlan()
    for key, value in entries.items():
        if isinstance(key, int) and not isinstance(key, bool):
            where = f"plan entry {path!r}, output {key}"
            if key < 0:
                raise ValueError(f"{where}: an index from 0 on is needed")
            if not getattr(value, "split_output", False):
                raise ValueError(f"{where} is {value!r}; a ContextParallelInput with split_output=True is needed")
            plan.outputs[key] = _axis(value, "split_dim", where)
        elif isinstance(key, str):
            plan.inputs[key] = _input(value, f"plan entry {path!r}, parameter {key!r}")
        else:
            raise ValueError(
                f"plan entry {path!r} has the key {key!r}; a parameter's name or an output's index is needed"
            )
    return plan


def _input(value, where):
    if isinstance(value, LocalTail):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(None if v is None else _input_axis(v, f"{where}, element {i}") for i, v in enumerate(value))
    return _input_axis(value, where)


def _input_axis(value, where):
    if getattr(value, "split_output", False):
        raise ValueError(f"{where} has split_output=True; an output's key is its index, not a name")
    return _axis(value, "split_dim", where)


def _axis(value, attribute, where):
    if not hasattr(value, attribute):
        kind = "ContextParallelInput" if attribute == "split_dim" else "ContextParallelOutput"
        raise ValueError(f"{where} is {value!r}; a {kind} is needed")
    dim, dims = getattr(value, attribute), getattr(value, "expected_dims", None)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError(f"{where}: {attribute} is {dim!r}; an int is needed")
    if dims is not None and (not isinstance(dims, int) or isinstance(dims, bool) or dims < 1):
        raise ValueError(f"{where}: expected_dims is {dims!r}; a positive int or None is needed")
    if dims is not None and not -dims <= dim < dims:
        raise ValueError(f"{where}: {attribute} is {dim}, but expected_dims is {dims}")
    return Axis(dim, dims)
