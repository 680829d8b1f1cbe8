"""What layers write and read beside what they are given and return: weights, gradients, buffers, what closures hold.

A pipe runs forwards ahead of backwards. Where one of them writes what another reads, the result would depend on the
schedule. The first run of a stage shows it: what would be wrong is refused, what may be is told.

Stages that reach into each other are refused: all of a weight's gradient must come from one stage, to be added up in
order, and what a buffer holds would depend on which of its stages comes first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import NoReturn, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.modules import NormWithStatistics, hooks_before_forward, hooks_of
from gpipe.stages.boundary import leaves_of
from gpipe.stages.buffers import Slot
from gpipe.stages.recompute_check import Digest, differ, digest
from gpipe.stages.stage import Layer, Stage, StageRun
from gpipe.stages.tree import Tree, storage_address, tensors_in, version

OF_TORCH = frozenset(vars(nn.Module()))
OF_SHARDS = "__composable_api"  # so begins what `fully_shard` keeps on modules
DEPTH = 3  # containers and objects around a value

BACKWARD_IN_FORWARD = (
    "the forward of {stage} adds to gradients of its parameters: a layer calls backward() in it. A recompute would "
    "do so again, and the order of the sums would depend on the schedule. Give such losses to loss_fn (stash them, "
    "and have loss_fn.pop), or train these layers by themselves"
)
WRITES_WHAT_IT_GAVE = (
    "a forward of {stage} has changed in place what an earlier one returned (a buffer or a workspace that a layer "
    "returns and writes again), and which the next stage may not have read yet. Return a clone"
)
WEIGHTS_IN_FORWARD = (
    "a forward of {stage} writes parameters of it ({names}) while earlier micro-batches wait for their backwards, "
    "which would see the new values; constrain weights behind optimizer.step(), or by "
    "torch.nn.utils.parametrize, which leaves the parameter as it is"
)
WEIGHTS_IN_BACKWARD = (
    "a backward of {stage} writes parameters of it ({names}), as an optimizer in a hook does "
    "(register_post_accumulate_grad_hook): the plain loop's next forward sees the new values; here forwards go ahead "
    "of backwards, as the schedule has it. Step the optimizer behind pipe.step(...), or have one micro-batch"
)
STATE_IN_BACKWARD = (
    "the backward of {stage} writes {names}. Where a later forward reads that, as scales of FP8 are read, the plain "
    "loop has it one micro-batch sooner: forwards go ahead of backwards here, and how far depends on the schedule"
)

FOREIGN = (
    "the backward of {stage} reaches {name}, which is not its own: by a reference past the layers, in loss_fn, or in "
    "a tensor that was left on a module{left}. Several partitions would add to its gradient. Hand on what is needed "
    "as part of the value, or stash it and pop it where it is used, in the loss too (loss_fn.pop); let a weight that "
    "several layers use be a parameter of each. For a penalty on weights give the optimizer weight_decay="
)
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


Snapshot: TypeAlias = Mapping[Place, object]  # by place what `note` says of what is there


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


def snapshot(layers: Mapping[str, nn.Module]) -> Snapshot:
    """What layers, by their words, refer to now, to be compared with later."""
    return {place: note(value) for place, value in references(layers)}


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


class FirstRunCheck:
    """Looks at what the layers of a stage write in one run, the first that trains."""

    def __init__(self, run: StageRun) -> None:
        self._run, self._stage = run, run.stage
        self._layers = {str(layer): layer.module for layer in run.stage.layers}
        self._began = snapshot(self._layers)
        self._written: list[str] = []  # weights, by a backward
        self._forwards = 0
        self.graphs = 0  # of micro-batches whose backwards are to come
        self.hand_on(())
        self.begin()

    def begin(self) -> None:
        """Begins a pass over micro-batches: between a call and its backward, users may have written weights."""
        self._weights = self._read_weights()

    def before_forward(self) -> None:
        """Notes what there is; raises if a backward has written weights that this forward would see."""
        self.refuse_written()
        self._gradients = self._stage.gradients()

    def after_forward(self, *, recomputed: bool) -> None:
        """Refuses what a forward must not write, if graphs of other micro-batches wait or it will run again."""
        self._forwards += 1
        if self._gradients != self._stage.gradients():
            raise RuntimeError(BACKWARD_IN_FORWARD.format(stage=self._stage))
        if [version(tensor) for tensor in self._handed_on] != self._versions:
            raise RuntimeError(WRITES_WHAT_IT_GAVE.format(stage=self._stage))
        written, bits = self._find_written()
        if (self.graphs and written) or (recomputed and bits and self._forwards > 1):
            raise RuntimeError(WEIGHTS_IN_FORWARD.format(stage=self._stage, names=", ".join(bits or written)))

    def hand_on(self, values: Tree) -> None:
        """Notes what a forward hands on: the next must not write it, whether or not it was read by then."""
        self._handed_on = tensors_in(values)
        self._versions = list(map(version, self._handed_on))

    def before_backward(self) -> None:
        """Notes what there is; raises if an earlier backward has written weights."""
        self.refuse_written()
        self._buffers, self._before = self._run.buffers.before(), snapshot(self._layers)

    def after_backward(self) -> list[str]:
        """What is to be told of the state that a backward has written."""
        self.after_weights()
        written = self._run.buffers.after(self._buffers, exact=True)
        buffers = {f"buffers of it ({type(module).__name__}.{name})" for module, name in written}
        after = snapshot(self._layers)
        places = [
            f"{layer}, {where}"
            for (layer, where), was in self._before.items()
            if was != after.get((layer, where))
            and was == self._began.get((layer, where))  # else a forward writes it too
        ]
        names = [*sorted(buffers), *places]
        return [STATE_IN_BACKWARD.format(stage=self._stage, names="; ".join(names))] if names else []

    def after_weights(self) -> None:
        """Looks at the weights behind a backward, or the second part of one."""
        self._written += self._find_written()[1]  # by its bits: what is written as it was, a recompute may write

    def refuse_written(self) -> None:
        if self._written:
            names = ", ".join(dict.fromkeys(self._written))
            raise RuntimeError(WEIGHTS_IN_BACKWARD.format(stage=self._stage, names=names))

    def _read_weights(self) -> dict[str, tuple[int, Digest]]:
        """Version and bits of the weights, since a write through `.data` counts as no version.

        Not of those of embeddings with `max_norm`, which torch itself scales in forwards, nor of sharded modules:
        other weights stand in their places while layers run.
        """
        found: dict[str, tuple[int, Digest]] = {}
        for layer in () if self._run.is_sharded else self._stage.layers:
            with layer.aliased:  # in a module that is several layers, another's aliases may be on another device
                found |= {
                    layer.full_name(name): (version(parameter), digest([parameter]))
                    for path, module in layer.module.named_modules()
                    if getattr(module, "max_norm", None) is None
                    for name, parameter in module.named_parameters(path, recurse=False)
                    if not is_lazy(parameter) and not parameter.is_meta
                }
        return found

    def _find_written(self) -> tuple[list[str], list[str]]:
        """The names of the weights that were written since they were last looked at, and of those with other bits."""
        before, self._weights = self._weights, self._read_weights()
        same = [(name, before[name], now) for name, now in self._weights.items() if name in before]
        bits = [name for name, was, now in same if bool(differ(was[1], now[1]))]
        return [name for name, was, now in same if was[0] != now[0] or name in bits], bits


class WeightOwners:
    """Which stage each weight of a run belongs to."""

    def __init__(self, stages: Sequence[Stage], shared: Iterable[Tensor]) -> None:
        self._stages = stages
        self._home: dict[int, int] = {}
        for stage in stages:
            for layer in stage.layers:
                self._home.update(dict.fromkeys(map(id, layer.module.parameters()), stage.index))
        for weight in shared:  # layers have aliases of these, and nothing else may use them
            self._home[id(weight)] = -1
        self._claimed: list[Tensor] = []  # what belongs to no layer is that of the first stage that came
        self._checked: set[int] = set()

    def check(self, stage: int, roots: Sequence[Tensor], given: Iterable[Tensor]) -> None:
        """Checks that a stage's first backward in a run reaches no weight of others; `given` are its other leaves."""
        if stage in self._checked:
            return
        self._checked.add(stage)
        own = set(map(id, given))
        for leaf in leaves_of(roots):
            if id(leaf) in own:
                continue
            if id(leaf) not in self._home:
                self._claimed.append(leaf)
            if (home := self._home.setdefault(id(leaf), stage)) != stage:
                self._refuse(stage, leaf, home)

    def _refuse(self, at: int, leaf: Tensor, home: int) -> NoReturn:
        names = [
            f"{name} of {layer}"
            for stage in self._stages
            for layer in stage.layers
            for name, parameter in layer.module.named_parameters()
            if parameter is leaf
        ]
        name = names[-1] if names else f"a weight of shape {tuple(leaf.shape)}, which stage {home} uses too"
        graphs = tensors_left_on(self._stages, graphs=True)
        left = f" ({graphs})" if graphs else ""
        (own,) = (stage for stage in self._stages if stage.index == at)
        raise RuntimeError(FOREIGN.format(stage=own, name=name, left=left))


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


def find_shared_buffers(stages: Sequence[Stage]) -> dict[Slot, str]:
    """The buffers that several stages see, each with a layer of two of them: of one module, or in one memory."""
    home: dict[object, tuple[Stage, Layer]] = {}
    found: dict[Slot, str] = {}
    places = (
        (stage, layer, module) for stage in stages for layer in stage.layers for module in layer.module.modules()
    )
    for stage, layer, module in places:
        for name, buffer in module._buffers.items():
            address = 0 if buffer is None else storage_address(buffer)
            for seen in (module, address) if address else (module,):
                first = home.setdefault(seen, (stage, layer))
                if first[0] is not stage:
                    found[module, name] = f"{first[1]} and {layer}"
        if isinstance(module, NormWithStatistics) and module.track_running_stats and home[module][0] is not stage:
            raise ValueError(
                f"{layer} uses a {type(module).__name__} that stage {home[module][0].index} uses too, and its "
                f"running statistics depend on which comes first; use a module for each, or put both into one stage"
            )
    return found


class SharedBufferCheck:
    """Watches the buffers that several stages see: a change would depend on which of them comes first."""

    def __init__(self, shared_buffers: Mapping[Slot, str]) -> None:
        self._shared = shared_buffers
        self._before = self._read()

    def _read(self) -> list[TensorVersion]:
        tensors = (module._buffers.get(name) for module, name in self._shared)
        return [TensorVersion(tensor, version(tensor)) for tensor in tensors]

    def check(self) -> None:
        states = zip(self._shared.items(), self._before, self._read(), strict=True)
        changed = [f"{name} ({users})" for ((_, name), users), before, now in states if before != now]
        if changed:
            raise RuntimeError(
                f"a forward changed a buffer that layers of several stages use, so that the result depends on which "
                f"comes first: {', '.join(changed)}; use one module for each, or put the layers into one stage"
            )
