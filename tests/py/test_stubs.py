"""The stub says what the module is: names, signatures, properties; and every public name explains itself."""

import ast
import inspect
from pathlib import Path

import pytest

import cp_attn
from cp_attn import _C

STUB = ast.parse((Path(cp_attn.__file__).parent / "_C.pyi").read_text())
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
METHODS = [
    (owner.name, node)
    for owner in CLASSES.values()
    for node in owner.body
    if isinstance(node, ast.FunctionDef) and not node.decorator_list
]
# What object gives every class; their C signatures are CPython's.
SLOTS = {"__hash__", "__eq__", "__ne__"}


def parameters(node):
    """Return [(name, kind, default)] of a stub's function, without self or cls."""
    Kind, args = inspect.Parameter, node.args
    plain = [(a.arg, Kind.POSITIONAL_ONLY) for a in args.posonlyargs]
    plain += [(a.arg, Kind.POSITIONAL_OR_KEYWORD) for a in args.args]
    defaults = [Kind.empty] * (len(plain) - len(args.defaults)) + [ast.literal_eval(d) for d in args.defaults]
    found = [(name, kind, default) for (name, kind), default in zip(plain, defaults, strict=True)]
    found += [(args.vararg.arg, Kind.VAR_POSITIONAL, Kind.empty)] if args.vararg else []
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append((a.arg, Kind.KEYWORD_ONLY, Kind.empty if default is None else ast.literal_eval(default)))
    return [p for p in found if p[0] not in ("self", "cls")]


def actual(function):
    """Return the same of a C function."""
    found = [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
    return [p for p in found if p[0] != "self"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    assert parameters(FUNCTIONS[name]) == actual(getattr(_C, name))


@pytest.mark.parametrize("owner,node", METHODS, ids=[f"{owner}.{node.name}" for owner, node in METHODS])
def test_method(owner, node):
    cls = getattr(_C, owner)
    if node.name in SLOTS:
        assert getattr(cls, node.name) is not getattr(object, node.name)
    else:
        assert parameters(node) == actual(cls if node.name == "__new__" else getattr(cls, node.name))


@pytest.mark.parametrize("name", CLASSES)
def test_class(name):
    cls, node = getattr(_C, name), CLASSES[name]
    assert cls.__module__ == "cp_attn"
    bases = [ast.unparse(base) for base in node.bases]
    assert [base.__name__ for base in cls.__bases__] == (bases or ["object"])
    if issubclass(cls, Exception):
        return
    described = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    members = {m for m in vars(cls) if not (m.startswith("__") and hasattr(object, m)) and m != "__weaklistoffset__"}
    assert members - {"__doc__", "__module__"} <= described
    properties = {child.name for child in node.body if isinstance(child, ast.FunctionDef) and child.decorator_list}
    assert properties == {m for m in members if inspect.isgetsetdescriptor(vars(cls)[m])} - {"__weakref__"}


def test_every_name_is_described():
    described = {*FUNCTIONS, *CLASSES, "__version__", "_core", "_backends"}
    module = {name for name in vars(_C) if not (name.startswith("__") and name != "__version__")}
    assert module == described
    assert _C.__version__ == cp_attn.__version__


def test_every_public_name_has_a_docstring():
    for name in (*FUNCTIONS, *CLASSES):
        assert inspect.getdoc(getattr(_C, name)), name
    for owner, node in METHODS:
        assert inspect.getdoc(getattr(getattr(_C, owner), node.name)), f"{owner}.{node.name}"
    for owner in ("ContextParallelConfig", "Context", "Buffer"):
        for name, member in vars(getattr(_C, owner)).items():
            if inspect.isgetsetdescriptor(member) and not name.startswith("__"):
                assert inspect.getdoc(member), f"{owner}.{name}"
