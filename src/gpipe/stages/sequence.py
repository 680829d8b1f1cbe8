"""Reads the user's sequence of layers, names and builds them, and cuts them into stages.

Says of what is given as a layer and cannot be one what it is, in the user's words, and what to write instead.

Layers given as callables are known without their weights: all processes have an `outline` of all layers, and then
each builds its own for real: `realize`. A layer's weights depend on (seed, index) alone, so one process that builds
all has the same. What another process holds stands there without values, and refuses what needs some, or a gradient.
"""

import inspect
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from gpipe._torch.accelerator import CPU, awake, default_generator, keep_parameters, put_data
from gpipe._torch.modules import refresh_weights_of_rnn
from gpipe._torch.trees import tree_leaves, tree_map
from gpipe.stages.losses import is_loss_of_torch
from gpipe.stages.quantized import forget_beside, is_quantized
from gpipe.stages.rng import rng_seed
from gpipe.stages.shared_weights import find_shared
from gpipe.stages.skips import Sequential, find_pops, skip_names
from gpipe.stages.stage import Layer, Stage, stage_of_layers
from gpipe.stages.tree import moved

BUILDS = "a callable without arguments that builds one"
OF_TORCHSCRIPT = "is of TorchScript, whose state cannot be looked after; give the plain module"
PIPE = ("gpipe.pipeline", "GPipe")  # by name: it stands on this module


def is_maker(layer: object) -> bool:
    """Whether a layer is given as a callable without arguments that builds it."""
    function = layer.func if isinstance(layer, partial) else layer
    of_torch = getattr(functional, getattr(function, "__name__", ""), None) is function
    return callable(layer) and not isinstance(layer, nn.Module) and not of_torch and _needed(layer) == []


def describe_invalid_layer(at: int, layer: object) -> str:
    """Why something cannot be a layer, and what to give instead."""
    kind, needed = type(layer).__name__, ", ".join(_needed(layer) or ["..."])
    if isinstance(layer, type):
        text = f"the class {layer.__name__}, which needs {needed}; give one of it: {_written(layer)}"
    elif isinstance(owner := getattr(layer, "__self__", None), nn.Module):
        text = f"a method of a {type(owner).__name__}; give the module itself"
    elif callable(layer):
        name = str(getattr(getattr(layer, "func", layer), "__name__", "<lambda>"))
        called = "a function" if name == "<lambda>" else f"the function {name}"
        module = {key.lower(): found for key, found in vars(nn).items()}.get(name.replace("_", ""))
        if isinstance(module, type):
            text = f"{called}; give a module: {_written(module)}"
        else:
            text = f"{called} of ({needed}); give a module whose forward does it, or {BUILDS}"
    elif isinstance(layer, (list, tuple)):
        text = f"a {kind}; join its layers: nn.Sequential(*...), or *... for a layer each"
    else:
        text = f"a {kind}; " + ("leave it out" if layer is None else f"give an nn.Module or {BUILDS}")
    return f"layer {at} is {text}"


def _written(module: type) -> str:
    prefix = "nn." if getattr(nn, module.__name__, None) is module else ""
    return f"{prefix}{module.__name__}({'...' if _needed(module) else ''})"


def _needed(layer: object) -> list[str] | None:
    """The arguments that must be given to a callable; None where it does not say, as functions of torch."""
    try:
        parameters = inspect.signature(layer).parameters.values()  # type: ignore[arg-type]  # if it is callable
    except (ValueError, TypeError):
        return None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in several]


def describe_invalid_sequence(layers: object) -> str | None:
    """Why something other than an nn.Sequential cannot be the sequence of layers; None if it can."""
    match layers:
        case Mapping() | nn.ModuleDict():
            remedy = "; give its values in order: nn.Sequential(OrderedDict(...)), or list(layers.values())"
        case nn.ModuleList():
            remedy = "; give list(layers), or nn.Sequential(*layers)"
        case set() | frozenset():
            remedy = ", which has no order; give a list"
        case Iterable() if not isinstance(layers, (str, bytes, Tensor, nn.Module)):
            return None
        case _:
            remedy = "; give an nn.Sequential, or a list of modules or of callables that build one"
    return f"layers is a {type(layers).__name__}{remedy}"


def find_invalid_layers(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules that cannot be layers, and what to do."""
    for name, layer in named.items():
        start = f"layer {name} ({type(layer).__name__})"
        if is_loss_of_torch(layer) and not skip_names(layer, "pop"):
            yield f"{start} is a loss; give it to each step: pipe.step(inputs, targets, {_written(type(layer))})"
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield f"{start} has no forward; give its parts as layers, or join them by nn.Sequential(*...)"
        elif layer.forward == MethodType(nn.Module.forward, layer) and type(layer).__call__ is nn.Module.__call__:
            yield f"{start} has no forward; give it one: def forward(self, x)"
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            yield f"{start} is replicated already; give the plain layer, .module, and see mesh= for replicas"
        kinds = {kind for part in layer.modules() for kind in type(part).__mro__}
        if any((kind.__module__, kind.__qualname__) == PIPE for kind in kinds):
            yield (
                f"{start} holds a pipe, and a pipe cannot run in another; give its layers instead, *pipe, and choose "
                f"the cuts of all by partitions="
            )
        if any(isinstance(part, torch.jit.ScriptModule) for part in layer.modules()):
            yield f"{start} {OF_TORCHSCRIPT}"
        if lazy := [path for path, buffer in layer.named_buffers() if is_lazy(buffer)]:
            yield (
                f"{start} is lazy, and its buffers ({', '.join(lazy)}) have no shapes. Run the layers once on an "
                f"example mini-batch before you make the pipe"
            )
        for part in _find_buried_skips(layer):
            yield (
                f"{start}: its part {part}, which only a layer of the pipe itself can; give the parts of layer "
                f"{name} as layers of their own (*block instead of block), or have gpipe.Sequential(...) run them"
            )


def _find_buried_skips(layer: nn.Module) -> Iterator[str]:
    """Parts of a layer that would stash or pop: only what runs them sees their stashes, and that is the layer."""
    run = {part for outer in layer.modules() if isinstance(outer, Sequential) for part in list(outer.modules())[1:]}
    for path, part in layer.named_modules():
        for what in ("stash", "pop") if path and part not in run else ():
            names = {name for name in skip_names(part, what) if isinstance(name, str)} - {*skip_names(layer, what)}
            if names:
                yield f"{path} ({type(part).__name__}) has {what} = {tuple(sorted(names))}"


def find_without_values(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules that have no values, as those of other stages once a pipe of several processes is built."""
    for name, layer in named.items():
        if empty := [path for path, tensor in _state(layer).items() if tensor.is_meta and not is_lazy(tensor)]:
            yield (
                f"layer {name} ({type(layer).__name__}) has no values: {', '.join(empty[:3])} on the meta "
                f"device, as layers of other stages once a pipe over processes is built; build the layers anew, or "
                f"give callables that build them"
            )


Maker: TypeAlias = Callable[[], nn.Module]
Layers: TypeAlias = nn.Sequential | Sequence[nn.Module | Maker]


def build_layers(layers: object, seed: int) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers under the names that an `nn.Sequential` gives them, all built, and what is wrong with them."""
    return _name_layers(layers, lambda maker, index: build(maker, seed, index))


def _name_layers(layers: object, make: Callable[[Maker, int], object]) -> tuple[dict[str, nn.Module], list[str]]:
    """Reads what the user gave; `make` turns the callable of an index into a layer."""
    if isinstance(layers, nn.Sequential):
        return {name: module for name, module in layers._modules.items() if module is not None}, []
    if wrong := describe_invalid_sequence(layers):
        return {}, [wrong]
    assert isinstance(layers, Iterable)
    made = [make(layer, at) if is_maker(layer) else layer for at, layer in enumerate(layers)]
    mistakes = [describe_invalid_layer(at, one) for at, one in enumerate(made) if not isinstance(one, nn.Module)]
    return {str(at): one for at, one in enumerate(made) if isinstance(one, nn.Module)}, mistakes


def build(maker: Callable[[], object], seed: int, index: int) -> object:
    """Builds a layer whose weights depend on (seed, index) alone, not on how many are built."""
    with seeded(rng_seed(seed, -1, index, 0)):
        try:
            return maker()
        except Exception as error:
            error.add_note(f"while layer {index} was built")
            raise


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seeds torch's generators, numpy's and Python's; they are as they were when it is left."""
    devices = awake()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            for device in (CPU, *devices):  # torch.manual_seed would seed CUDA whenever it comes to life
                default_generator(device).manual_seed(key)
            random.seed(key)
            np.random.seed(key % 2**32)  # takes no more bits
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def cut_into_stages(
    named: dict[str, nn.Module],
    counts: Sequence[int],
    devices: Sequence[torch.device],
    own: Collection[int] | None = None,
    make: Callable[[int, Sequence[Layer], torch.device], Stage] = Stage,
) -> list[Stage]:
    """The stages of so many layers each; the modules of stages that are `own`, or all, are moved to their devices."""
    own = range(len(counts)) if own is None else own
    pops = find_pops(list(named.values()))
    layers = [
        Layer(
            index,
            name,
            module,
            skip_names(module, "stash"),
            tuple(pop for pop in pops if pop.target == index),
            kind=str(vars(module).get("stands_for", "")),
            prefix="" if "stands_for" in vars(module) else None,
        )
        for index, (name, module) in enumerate(named.items())
    ]
    stages, rest = [], iter(layers)
    for index, (count, device) in enumerate(zip(counts, devices, strict=True)):
        held = list(islice(rest, count))
        for layer in held if index in own else ():
            keep_parameters(layer.module, device, partial(moved, device=device))
            if device.type != "cpu":
                layer.module._apply(partial(moved, device=device))  # as `to` does, and tensors lie as they did
            layer.module.to(device)
        stages.append(make(index, held, device))
    for shared in find_shared(list(named.values())):  # each lives where it is first used
        home = stage_of_layers(stages)[min(shared.slots)]
        if home in own:
            put_data(shared.parameter, moved(shared.parameter.data, stages[home].device))
    return stages


READERS = (nn.Module._apply.__code__,)  # moves gradients along with their parameters, if there are any
HELD = "this parameter is held by another process (layer {layer}); {instead}"
TRAIN = "use pipe.parameters(), pipe.zero_grad(), pipe.clip_grad_norm_"
COMPUTE = (
    "compute by pipe(inputs) or pipe.step(...), which all processes call, or have the whole model in one process: "
    "gpipe.save_weights(folder, pipe), and load it there"
)
WITHOUT_VALUES = frozenset({
    "data", "detach", "detach_", "clone", "contiguous", "copy_", "requires_grad_", "share_memory_", "pin_memory",
    "to", "type", "type_as", "cpu", "cuda", "double", "float", "half", "bfloat16",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor",
})  # fmt: skip
"""What gives a tensor and needs no values: copies and moves, which have none either, and what is shaped alike."""


class RemoteParameter(nn.Parameter):
    """Stands for a parameter of another process in a module of the user's; whoever computes with it is told so.

    So is whoever asks for its gradient. A copy of it is one too. In another process, where a pickle may come to, it
    is a plain parameter without values.
    """

    layer: int

    @property
    def grad(self) -> Tensor | None:
        """Refused; to let go of it is fine, since there is none."""
        if sys._getframe(1).f_code in READERS:
            return None
        raise RuntimeError(HELD.format(layer=self.layer, instead=TRAIN))

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(HELD.format(layer=self.layer, instead=TRAIN))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses what needs values; attributes, sizes, copies and moves are as of any tensor on the meta device."""
        named = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if named == "__get__" else named
        cause = None
        try:
            # of another class, since torch has it handle a function as if there were no subclass
            result = nn.Parameter.__torch_function__(func, types, args, kwargs or {})
            if name in WITHOUT_VALUES or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                return result
        except RuntimeError as error:  # "no data", or not of the meta device
            cause = error
        remote = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RemoteParameter))
        raise RuntimeError(HELD.format(layer=remote.layer, instead=COMPUTE)) from cause

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found: Tensor = memo.setdefault(id(self), stand_in(self, self.layer))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def stand_in(empty: Tensor, layer: int) -> Tensor:
    """What stands for a tensor of another process's layer; `empty` is without values; buffers stay just that."""
    if not isinstance(empty, nn.Parameter):
        return empty
    made = RemoteParameter(empty.data, empty.requires_grad)
    made.layer = layer
    return made


@dataclass(frozen=True)
class Outline:
    """All layers, on the meta device where they are given as callables, and what it takes to build those."""

    layers: dict[str, nn.Module]  # by name; modules are the user's own
    makers: dict[int, Maker]  # the callables, by the index of their layer
    seed: int  # what the weights depend on
    mistakes: list[str]  # what is wrong with the layers


def outline(layers: object, seed: int) -> Outline:
    """The layers as far as they can be known without weights: names, routes, shapes and numbers of parameters.

    Callables are called with the meta device as the default, where nothing is allocated. One that needs values there,
    or has a device of its own, is built for real and left with shapes alone, so that one such layer at a time is in
    memory.
    """
    makers: dict[int, Maker] = {}
    known = WeakIdKeyDictionary()
    if isinstance(layers, Iterable) and not describe_invalid_sequence(layers):
        layers = list(layers)
        for layer in layers:
            if isinstance(layer, nn.Module):  # stays as it is, also where a callable puts it into another
                known.update({part: part for part in (*layer.modules(), *_state(layer).values())})

    def without_values(maker: Maker, index: int) -> object:
        makers[index] = maker
        return _without_values(_build_on_meta(maker, seed, index), known)

    named, mistakes = _name_layers(layers, without_values)
    return Outline(named, makers, seed, mistakes)


def realize(found: Outline, own: Collection[int]) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers of an outline with those of the indices `own` built anew for real, and what is wrong with them."""
    mistakes: list[str] = []
    named = dict(found.layers)
    for index, maker in found.makers.items():
        if index in own:
            layer = build(maker, found.seed, index)
            mistakes += _find_differences(index, found.layers[str(index)], layer)
            if isinstance(layer, nn.Module):
                named[str(index)] = layer
    return named, mistakes


def release(stages: Sequence[Stage], own: Sequence[Stage], others: Iterable[Tensor] = ()) -> None:
    """Leaves the layers of other stages without values, but for what a layer of one's own has too, and `others`.

    They would keep the weights that they began with, and a model of the user's that holds them would be half trained.
    """
    mine = {part for stage in own for layer in stage.layers for part in layer.module.modules()}
    kept = {id(tensor) for part in mine for tensor in (*part._parameters.values(), *part._buffers.values())}
    kept |= set(map(id, others))
    known = WeakIdKeyDictionary()
    layers = [layer for stage in stages for layer in stage.layers]
    for part, index in {part: layer.index for layer in layers for part in layer.module.modules()}.items():
        if part not in mine:
            forget_beside(part)
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in kept and not _is_empty(tensor):
                    held[name] = known.setdefault(tensor, stand_in(_on_meta(tensor), index))
        refresh_weights_of_rnn(part)


def _build_on_meta(maker: Maker, seed: int, index: int) -> object:
    """Builds a layer on the meta device, or for real if it asks for values there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever builds the layer for real is warned
        with suppress(Exception), torch.device("meta"):  # whatever is raised without values; other errors come again
            return build(maker, seed, index)
        return build(maker, seed, index)


def _without_values(value: object, known: WeakIdKeyDictionary) -> object:
    """The same module or, if it has values, one of the same class, parts and names on the meta device.

    The module itself stays as it is: it may be the user's. What is shared stays shared, by way of `known`.
    """
    if isinstance(value, Tensor):
        return value if _is_empty(value) else known.setdefault(value, _on_meta(value))
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        return value
    if all(map(_is_empty, _state(value).values())):
        return value
    if value not in known:
        known[value] = twin = value.__new__(type(value))
        twin.__dict__ = tree_map(lambda leaf: _without_values(leaf, known), value.__dict__)
    return known[value]


def _on_meta(tensor: Tensor) -> Tensor:
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_quantized(tensor) else tensor
    empty = torch.empty_like(like, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or is_lazy(tensor)


def _state(module: object) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _find_differences(index: int, empty: nn.Module, layer: object) -> Iterator[str]:
    """What is wrong with a layer built for real, beside the one built without values."""
    first, later = (
        {name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in _state(one).items()}
        for one in (empty, layer)
    )
    same = type(layer).__name__ == type(empty).__name__  # some are of classes made for them alone
    if not same or first != later:
        names = [name for name in first | later if first.get(name) != later.get(name)]
        apart = [f"{name}: {first.get(name)}, then {later.get(name)}" for name in names]
        yield (
            f"layer {index}: its callable built a {type(empty).__name__} first and a {type(layer).__name__} later "
            f"({'; '.join(apart)}); it is called in every process, so let every call build the same layer"
        )
    elif missing := [name for name, tensor in _state(layer).items() if tensor.is_meta]:
        yield (
            f"layer {index}: its callable gave no values to {', '.join(missing)}; let every call build the whole "
            f"layer anew, and name weights that it shares with another layer in ties=... instead"
        )
