"""Notes what layers write beside what they return: weights, gradients, buffers, attributes, what closures hold.

A pipe runs forwards ahead of backwards. Where one of them writes what another reads, the result would depend on the
schedule. The first run of a stage shows it: what would be wrong is refused, what may be is told.
"""

from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.modules import hooks_before_forward, hooks_of
from gpipe.stages.recompute_check import Digest, differ, digest
from gpipe.stages.stage import StageRun
from gpipe.stages.tree import version

OF_TORCH = frozenset(vars(nn.Module()))
DEPTH = 3  # containers and objects around a value

BACKWARD_IN_FORWARD = (
    "the forward of {stage} adds to gradients of its parameters: a layer calls backward() in it. A recompute would "
    "do so again, and the order of the sums would depend on the schedule. Give such losses to loss_fn (stash them, "
    "and have loss_fn.pop), or train these layers by themselves"
)
WEIGHTS_IN_FORWARD = (
    "a forward of {stage} writes parameters of it ({names}) while earlier micro-batches wait for their backwards, "
    "which would see the new values; constrain weights behind optimizer.step(), or by "
    "torch.nn.utils.parametrize, which leaves the parameter as it is"
)
WEIGHTS_IN_BACKWARD = (
    "a backward of {stage} writes parameters of it ({names}), as an optimizer in a hook does "
    "(register_post_accumulate_grad_hook): the plain loop's next forward sees the new values, and forwards go ahead "
    "of backwards here, how far depends on the schedule. Step the optimizer behind pipe.step(...), or have one "
    "micro-batch"
)
STATE_IN_BACKWARD = (
    "the backward of {stage} writes {names}. Where a later forward reads that, as scales of FP8 are read, the plain "
    "loop has it one micro-batch sooner: forwards go ahead of backwards here, and how far depends on the schedule"
)

Place: TypeAlias = tuple[str, str]
"""A layer in words, and where in it."""


class TensorVersion(NamedTuple):
    """A tensor, and how often it had been changed in place."""

    tensor: Tensor
    version: int


Value: TypeAlias = object
Snapshot: TypeAlias = Mapping[Place, Value]
"""By place numbers, versions of tensors, and lists and dicts of both."""


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


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def snapshot(layers: Mapping[str, nn.Module]) -> Snapshot:
    """What layers, by their words, refer to now, to be compared with later."""
    return {place: note(value) for place, value in references(layers)}


def note(value: object, depth: int = DEPTH) -> Value:
    """What can be compared of a value: numbers, versions of tensors, and both in containers and objects."""
    match value:
        case nn.Parameter() | nn.Module() | type():
            return None
        case Tensor():
            return TensorVersion(value, version(value))
        case bool() | int() | float() | complex() | str():
            return value
        case list() | tuple() if depth:
            return [note(item, depth - 1) for item in list(value)]  # other ranks' layers may change it meanwhile
        case dict() if depth:
            return {key: note(item, depth - 1) for key, item in list(value.items())}
        case _ if depth and type(value).__module__ not in ("builtins", "torch"):
            held = getattr(value, "__dict__", None)
            return note(held, depth - 1) if isinstance(held, dict) else None
    return None


def values_differ(one: Value, other: Value) -> bool:
    """Whether two notes are of other values."""
    match one, other:
        case (TensorVersion(), TensorVersion()):
            return one.tensor is not other.tensor or one.version != other.version
        case (list(), list()):
            return len(one) != len(other) or any(map(values_differ, one, other))
        case (dict(), dict()):
            return one.keys() != other.keys() or any(values_differ(one[key], other[key]) for key in one)
    return type(one) is not type(other) or one != other


class Weight(NamedTuple):
    """A parameter: its version, and its bits, since a write through `.data` counts as no version."""

    version: int
    digest: Digest


class FirstRunCheck:
    """Looks at what the layers of a stage write in one run, the first that trains."""

    def __init__(self, run: StageRun) -> None:
        self._run, self._stage = run, run.stage
        stage = run.stage
        self._layers = {str(layer): layer.module for layer in stage.layers}
        self._began = snapshot(self._layers)
        self._before: Snapshot = {}  # a backward
        self._gradients = stage.gradients()
        self._written: list[str] = []  # weights, by a backward
        self._forwards = 0
        self.begin()

    def begin(self) -> None:
        """Begins a pass over micro-batches: between a call and its backward, users may have written weights."""
        self._weights = self._read_weights()

    def before_forward(self) -> None:
        """Notes what there is; raises if a backward has written weights that this forward would see."""
        self.refuse_written()
        self._gradients = self._stage.gradients()

    def after_forward(self, *, graphs: bool, recomputed: bool) -> None:
        """Refuses what a forward must not write.

        Args:
            graphs: Whether graphs of other micro-batches wait for their backwards.
            recomputed: Whether this forward will run again.
        """
        self._forwards += 1
        if self._gradients != self._stage.gradients():
            raise RuntimeError(BACKWARD_IN_FORWARD.format(stage=self._stage))
        written, bits = self._find_written()
        if (graphs and written) or (recomputed and bits and self._forwards > 1):
            raise RuntimeError(WEIGHTS_IN_FORWARD.format(stage=self._stage, names=", ".join(bits or written)))

    def before_backward(self) -> None:
        """Notes what there is; raises if an earlier backward has written weights."""
        self.refuse_written()
        self._buffers = self._run.buffers.before()
        self._before = snapshot(self._layers)

    def after_backward(self) -> list[str]:
        """What is to be told of the state that a backward has written."""
        self._written += self._find_written()[1]  # by its bits: what is written as it was, a recompute may write
        buffers = {f"buffers of it ({type(m).__name__}.{name})" for m, name in self._run.buffers.after(self._buffers)}
        after = snapshot(self._layers)
        places = [
            f"{layer}, {where}"
            for (layer, where), was in self._before.items()
            if values_differ(was, after.get((layer, where)))
            and not values_differ(was, self._began.get((layer, where)))  # else a forward writes it too
        ]
        names = [*sorted(buffers), *places]
        return [STATE_IN_BACKWARD.format(stage=self._stage, names="; ".join(names))] if names else []

    def after_weights(self) -> None:
        """Looks at the weights behind the second part of a backward."""
        self._written += self._find_written()[1]  # by its bits: what is written as it was, a recompute may write

    def refuse_written(self) -> None:
        """Raises if a backward has written weights."""
        if self._written:
            names = ", ".join(dict.fromkeys(self._written))
            raise RuntimeError(WEIGHTS_IN_BACKWARD.format(stage=self._stage, names=names))

    def _read_weights(self) -> dict[str, Weight]:
        """The weights by name; not those of embeddings with `max_norm`, which torch itself scales in forwards."""
        if self._run.is_sharded:  # others stand in their places while layers run
            return {}
        return {
            layer.full_name(name): Weight(version(parameter), digest([parameter]))
            for layer in self._stage.layers
            for path, module in layer.module.named_modules()
            if getattr(module, "max_norm", None) is None
            for name, parameter in module.named_parameters(path, recurse=False)
            if not is_lazy(parameter) and not parameter.is_meta
        }

    def _find_written(self) -> tuple[list[str], list[str]]:
        """The names of the weights that were written since they were last looked at, and of those with other bits."""
        before, self._weights = self._weights, self._read_weights()
        same = [(name, before[name], now) for name, now in self._weights.items() if name in before]
        bits = [name for name, was, now in same if bool(differ(was.digest, now.digest))]
        return [name for name, was, now in same if was.version != now.version or name in bits], bits
