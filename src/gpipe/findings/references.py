"""Finds what modules refer to: their attributes, and closures and globals of their functions and hooks."""

from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import TypeAlias

from torch import nn

from gpipe.torch_private.modules import hooks_before_forward, hooks_of

OF_TORCH = frozenset(vars(nn.Module()))

Place: TypeAlias = tuple[str, str]
"""A layer in words, and where in it."""


def references(layers: Mapping[str, nn.Module]) -> Iterator[tuple[Place, object]]:
    """The attributes of modules, by the words for their layer, and what forwards and hooks read beside these."""
    for words, root in layers.items():
        for path, module in root.named_modules():
            own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
            for name in own.keys() - _set_by_torch(module):
                yield (words, f"its attribute {path and path + '.'}{name}"), own[name]
            for function in (type(module).forward, *own.values(), *hooks_of(module)):
                for name, value in read_by_function(function):
                    yield (words, f"{name}, which it reads"), value


def _set_by_torch(module: nn.Module) -> set[str]:
    """The attributes that torch's own weight and spectral norm set before each forward."""
    return {getattr(hook, "name", "") for hook in hooks_before_forward(module)}


def read_by_function(function: object) -> Iterator[tuple[str, object]]:
    """The names and values that a function finds in its closure and among the globals."""
    inner = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(inner, FunctionType):
        names = inner.__code__.co_names
        yield from ((name, inner.__globals__[name]) for name in names if name in inner.__globals__)
        cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in cells)


def read_by_called(called: object) -> Iterator[tuple[str, object]]:
    """The names and values that a function reads, or an object that is called: its attributes too."""
    if isinstance(called, (FunctionType, MethodType)):
        yield from read_by_function(called)
    else:
        yield from getattr(called, "__dict__", {}).items()
        yield from read_by_function(getattr(type(called), "forward", getattr(type(called), "__call__", None)))  # noqa: B004


def mentions_random(module: nn.Module) -> bool:
    """Whether what a module runs reads something named random, also by functions that it calls."""
    todo = [value for value in (type(module).forward, *vars(module).values()) if _is_users(value)]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if id(function) not in seen:
            seen.add(id(function))
            read = dict(read_by_function(function))
            if "random" in read or "random" in getattr(getattr(function, "__code__", None), "co_names", ()):
                return True
            todo += [value for value in read.values() if _is_users(value)]
    return False


def _is_users(value: object) -> bool:
    return isinstance(value, (FunctionType, MethodType)) and not str(value.__module__).startswith("torch")


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def in_words(places: list[Place]) -> str:
    """The places of references, each once."""
    return "; ".join(dict.fromkeys(f"{layer}, {where}" for layer, where in places))
