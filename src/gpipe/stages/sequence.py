"""Reads the user's sequence of layers, names and builds them, and cuts them into stages.

Says of what is given as a layer and cannot be one what it is, in the user's words, and what to write instead.
"""

import inspect
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.stages.layout import moved
from gpipe.stages.losses import TORCH_LOSSES, module_of_forward
from gpipe.stages.rng import rng_seed
from gpipe.stages.shared_weights import find_shared
from gpipe.stages.skips import Sequential, find_pops, skip_names
from gpipe.stages.stage import Layer, Stage, stage_of_layers

BUILDS = "a callable without arguments that builds one"
PIPE = ("gpipe.pipeline", "GPipe")  # by name: it stands on this module


def is_maker(layer: object) -> bool:
    """Whether a layer is given as a callable without arguments that builds it."""
    function = _function(layer)
    of_torch = getattr(functional, getattr(function, "__name__", ""), None) is function
    return callable(layer) and not of_torch and _needed(layer) == []


def _function(layer: object) -> object:
    """What is called in the end, perhaps with some of its arguments."""
    while isinstance(layer, partial):
        layer = layer.func
    return layer


def describe_invalid_layer(at: int, layer: object) -> str:
    """Why something cannot be a layer, and what to give instead.

    >>> describe_invalid_layer(1, torch.relu)
    'layer 1 is the function relu; give a module: nn.ReLU()'
    """
    kind = type(layer).__name__
    if isinstance(layer, type):
        needed = ", ".join(_needed(layer) or ["..."])
        text = f"the class {layer.__name__}, which needs {needed}; give one of it: {_written(layer)}"
    elif isinstance(owner := getattr(layer, "__self__", None), nn.Module):
        text = f"a method of a {type(owner).__name__}; give the module itself"
    elif callable(layer):
        name = str(getattr(_function(layer), "__name__", "<lambda>"))
        called = "a function" if name == "<lambda>" else f"the function {name}"
        module = {key.lower(): found for key, found in vars(nn).items()}.get(name.replace("_", ""))
        if isinstance(module, type):
            text = f"{called}; give a module: {_written(module)}"
        else:
            needed = ", ".join(_needed(layer) or ["..."])
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
        if module_of_forward(layer) == TORCH_LOSSES and not skip_names(layer, "pop"):
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
            yield f"{start} is of TorchScript, whose state cannot be looked after; give the plain module"
        yield from _find_buried_skips(name, layer)


def _find_buried_skips(layer_name: str, layer: nn.Module) -> Iterator[str]:
    """Parts of a layer that would stash or pop: only what runs them sees their stashes, and that is the layer."""
    runs_them = [path for path, part in layer.named_modules() if isinstance(part, Sequential)]
    for path, part in layer.named_modules():
        if not path or any(not outer or path.startswith(f"{outer}.") for outer in runs_them):
            continue
        for what in ("stash", "pop"):
            buried = {name for name in skip_names(part, what) if isinstance(name, str)} - {*skip_names(layer, what)}
            if buried:
                yield (
                    f"layer {layer_name} ({type(layer).__name__}): its part {path} ({type(part).__name__}) has "
                    f"{what} = {tuple(sorted(buried))}, which only a layer of the pipe itself can; give the parts of "
                    f"layer {layer_name} as layers of their own (*block instead of block), or have "
                    f"gpipe.Sequential(...) run them inside it"
                )


def find_without_values(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules that have no values, as those of other stages once a pipe of several processes is built."""
    for name, layer in named.items():
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        if empty := [path for path, tensor in tensors if tensor.is_meta and not torch.nn.parameter.is_lazy(tensor)]:
            yield (
                f"layer {name} ({type(layer).__name__}) has no values: {', '.join(empty[:3])} on the meta "
                f"device, as layers of other stages once a pipe over processes is built; build the layers anew, or "
                f"give callables that build them"
            )


Maker: TypeAlias = Callable[[], nn.Module]
Layers: TypeAlias = nn.Sequential | Sequence[nn.Module | Maker]


def build_layers(layers: object, seed: int) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers under the names that an `nn.Sequential` gives them, and what is wrong with them.

    Callables are built here, each under a key of its own, so that its weights do not depend on how many are built.
    """
    return name_layers(layers, lambda maker, index: build(maker, seed, index))


def name_layers(layers: object, make: Callable[[Maker, int], object]) -> tuple[dict[str, nn.Module], list[str]]:
    """Reads what the user gave; `make` turns the callable of an index into a layer."""
    if isinstance(layers, nn.Sequential):
        return {name: module for name, module in layers._modules.items() if module is not None}, []
    if wrong := describe_invalid_sequence(layers):
        return {}, [wrong]
    assert isinstance(layers, Iterable)
    mistakes = []
    named = {}
    for at, layer in enumerate(layers):
        if not isinstance(layer, nn.Module) and is_maker(layer):
            layer = make(layer, at)
        if isinstance(layer, nn.Module):
            named[str(at)] = layer
        else:
            mistakes.append(describe_invalid_layer(at, layer))
    return named, mistakes


def build(maker: Callable[[], object], seed: int, index: int) -> object:
    """Builds a layer whose weights depend on (seed, index) alone.

    Torch's own generators, numpy's and Python's stay untouched.
    """
    with seeded(rng_seed(seed, -1, index, 0)):
        try:
            return maker()
        except Exception as error:
            error.add_note(f"while layer {index} was built")
            raise


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seeds torch's generators, numpy's and Python's; they are as they were when it is left."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(key)  # torch.manual_seed would seed CUDA whenever it comes to life
            if devices:
                torch.cuda.manual_seed_all(key)
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
    stages = []
    first = 0
    for index, (count, device) in enumerate(zip(counts, devices, strict=True)):
        held = layers[first : first + count]
        for layer in held if index in own else ():
            if device.type != "cpu":
                layer.module._apply(partial(moved, device=device))  # as `to` does, and tensors lie as they did
            layer.module.to(device)
        stages.append(make(index, held, device))
        first += count
    for shared in find_shared(list(named.values())):  # each lives where it is first used
        home = stage_of_layers(stages)[min(shared.slots)]
        if home in own:
            shared.parameter.data = moved(shared.parameter.data, stages[home].device)
    return stages
