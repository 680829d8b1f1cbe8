"""What layers write and read beside what they are given and return: weights, gradients, buffers, what closures hold.

A pipe runs forwards ahead of backwards. Where one of them writes what another reads, the result would depend on the
schedule. The first run of a stage shows it: what would be wrong is refused, what may be is told.

Stages that reach into each other are refused: all of a weight's gradient must come from one stage, to be added up in
order, and what a buffer holds would depend on which of its stages comes first.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TypeAlias

from torch import Tensor, nn

from gpipe._torch.modules import hooks_before_forward, hooks_of
from gpipe.stages.stage import Stage
from gpipe.stages.tree import version

OF_TORCH = frozenset(vars(nn.Module()))
OF_SHARDS = "__composable_api"  # so begins what `fully_shard` keeps on modules
DEPTH = 3  # containers and objects around a value

HOOKED = (
    "{stage} puts a hook on a tensor that it is given (or retains its gradient), and another tensor that crosses the "
    "cut with it was made from it: behind the cut the hook would see a part of the gradient. Put the hook where the "
    "tensor is made, return a clone of the tensor for those who hook it, or keep both layers in one partition"
)
Place: TypeAlias = tuple[str, str]  # a layer in words, and where in it


@dataclass(frozen=True, eq=False)
class TensorVersion:
    """A tensor, and how often it had been changed in place."""

    tensor: Tensor | None
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorVersion) and self.tensor is other.tensor and self.version == other.version


def references(layers: Mapping[str, nn.Module]) -> Iterator[tuple[Place, object]]:
    """The attributes of modules, by the words for their layer, and what forwards and hooks read beside these."""
    for words, root in layers.items():
        for path, module in root.named_modules():
            own = {n: value for n, value in vars(module).items() if n not in OF_TORCH and not n.startswith(OF_SHARDS)}
            # but for those that torch's own weight and spectral norm set before each forward
            for name in own.keys() - {getattr(hook, "name", "") for hook in hooks_before_forward(module)}:
                yield (words, f"its attribute {path and path + '.'}{name}"), own[name]
            for function in (type(module).forward, *own.values(), *hooks_of(module)):
                for name, value in read_by_function(function):
                    yield (words, f"{name}, which it reads"), value


def read_by_function(function: object) -> Iterator[tuple[str, object]]:
    """The names and values that a function finds in its closure and among the globals, unless these are torch's."""
    inner = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(inner, FunctionType):
        names = () if (inner.__module__ or "").startswith("torch.") else inner.__code__.co_names
        yield from ((name, inner.__globals__[name]) for name in names if name in inner.__globals__)
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing in it yet
                yield name, cell.cell_contents


def read_by_called(called: object) -> Iterator[tuple[str, object]]:
    """The names and values that a function reads, or an object that is called: its attributes too."""
    if isinstance(called, (FunctionType, MethodType)):
        yield from read_by_function(called)
    else:
        yield from getattr(called, "__dict__", {}).items()
        yield from read_by_function(getattr(type(called), "forward", getattr(type(called), "__call__", None)))  # noqa: B004


def note(value: object, depth: int = DEPTH) -> object:
    """What can be compared of a value: numbers, versions of tensors, and both in containers and objects."""
    match value:
        case nn.Parameter() | nn.Module() | type():
            return None
        case Tensor():
            return TensorVersion(value, version(value))
        case bool() | int() | float() | complex() | str():
            return type(value), value
        case list() | tuple() if depth:
            return [note(item, depth - 1) for item in list(value)]  # other ranks' layers may change it meanwhile
        case dict() if depth:
            return {key: note(item, depth - 1) for key, item in list(value.items())}
        case _ if depth and type(value).__module__ not in ("builtins", "torch"):
            held = getattr(value, "__dict__", None)
            return note(held, depth - 1) if isinstance(held, dict) else None
    return None


def tensors_left_on(stages: Iterable[Stage], *, graphs: bool = False) -> str:
    """In words, the attributes of modules where forwards left tensors, or such as have a graph."""
    found = [
        f"{name} of {layer}"
        for stage in stages
        for layer in stage.layers
        for module in layer.module.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not (value.is_leaf and (graphs or value.requires_grad))
    ]
    return ", ".join(dict.fromkeys(found))
