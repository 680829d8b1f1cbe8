"""Says of what is given as a layer and cannot be one what it is, in the user's words, and what to write instead."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.layers.losses import TORCH_LOSSES, module_of_forward
from gpipe.layers.skips import Sequential, skip_names

BUILDS = "a callable that builds one"
PIPE = ("gpipe.pipeline", "GPipe")  # by name: it stands on this module


def is_maker(layer: object) -> bool:
    """Whether a layer is given as a callable without arguments that builds it."""
    return callable(layer) and _function_of_torch(layer) is None and _needed(layer) == []


def describe_invalid_layer(at: int, layer: object) -> str:
    """Why something cannot be a layer, and what to give instead.

    >>> describe_invalid_layer(1, torch.relu)
    'layer 1 is the function relu; give a module: nn.ReLU()'
    """
    start = f"layer {at} is "
    if isinstance(layer, type):
        needed = ", ".join(_needed(layer) or ["..."])
        return f"{start}the class {layer.__name__}, which needs {needed}; give one of it: {_written(layer)}"
    if isinstance(owner := getattr(layer, "__self__", None), nn.Module):
        return f"{start}a method of a {type(owner).__name__}; give the module itself"
    if callable(layer):
        return f"{start}{_function(layer)}"
    if isinstance(layer, (list, tuple)):
        return f"{start}a {type(layer).__name__}; join its layers: nn.Sequential(*...), or *... for a layer each"
    if layer is None:
        return f"{start}a NoneType; leave it out, or give nn.Identity()"
    return f"{start}a {type(layer).__name__}; give an nn.Module or {BUILDS}"


def _function_of_torch(layer: object) -> str | None:
    """The name of a function of tensors, perhaps with some of its arguments, as torch has it."""
    while isinstance(layer, partial):
        layer = layer.func
    if not isinstance(layer, type):
        for home in (functional, torch):
            for name, found in vars(home).items():
                if found is layer:
                    return name
    return None


def _function(layer: Callable[..., object]) -> str:
    name = _function_of_torch(layer) or str(getattr(layer, "__name__", ""))
    modules = {key.lower(): found for key, found in vars(nn).items() if isinstance(found, type)}
    module = modules.get(name.replace("_", ""))
    if module is not None and issubclass(module, nn.Module):
        return f"the function {name}; give a module: {_written(module)}"
    arguments = ", ".join(_needed(layer) or ["..."])
    called = "a function" if name in ("", "<lambda>") else f"the function {name}"
    return (
        f"{called} of ({arguments}); give a module whose forward does it, or {BUILDS}, which is called without "
        f"arguments"
    )


def _written(module: type) -> str:
    prefix = "nn." if getattr(nn, module.__name__, None) is module else ""
    return f"{prefix}{module.__name__}({'...' if _needed(module) else ''})"


def _needed(layer: object) -> list[str] | None:
    """The arguments that must be given to a callable; None where it does not say, as functions of torch."""
    try:
        parameters = inspect.signature(layer).parameters.values()  # type: ignore[arg-type]  # if it is callable
    except (ValueError, TypeError):
        return None
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in positional]


def describe_invalid_sequence(layers: object) -> str | None:
    """Why something other than an nn.Sequential cannot be the sequence of layers; None if it can."""
    kind = type(layers).__name__
    if isinstance(layers, (Mapping, nn.ModuleDict)):
        return (
            f"layers is a {kind}; give its values in order: nn.Sequential(OrderedDict(...)), or list(layers.values())"
        )
    if isinstance(layers, nn.ModuleList):
        return f"layers is a {kind}; give list(layers), or nn.Sequential(*layers)"
    if isinstance(layers, (set, frozenset)):
        return f"layers is a {kind}, which has no order; give a list"
    if isinstance(layers, (str, bytes, Tensor, nn.Module)) or not isinstance(layers, Iterable):
        return f"layers is a {kind}; give an nn.Sequential, or a list of modules or of callables that build one"
    return None


def find_invalid_layers(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules that cannot be layers, and what to do."""
    for name, layer in named.items():
        start = f"layer {name} ({type(layer).__name__})"
        if module_of_forward(layer) == TORCH_LOSSES and not skip_names(layer, "pop"):
            yield f"{start} is a loss; give it to each step: pipe.step(inputs, targets, {_written(type(layer))})"
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield f"{start} has no forward; give its parts as layers, or join them by nn.Sequential(*...)"
        elif _lacks_forward(layer):
            yield f"{start} has no forward; give it one: def forward(self, x)"
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            yield f"{start} is replicated already; give the plain layer, .module, and see mesh= for replicas"
        yield from _find_buried_skips(name, layer)


def _lacks_forward(layer: nn.Module) -> bool:
    kind = type(layer)
    inherits = getattr(kind, "forward", None) is nn.Module.forward and kind.__call__ is nn.Module.__call__
    return inherits and "forward" not in vars(layer)


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


def find_pipes(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The layers that are, or hold, a pipe."""
    for name, layer in named.items():
        kinds = {kind for part in layer.modules() for kind in type(part).__mro__}
        if any((kind.__module__, kind.__qualname__) == PIPE for kind in kinds):
            yield (
                f"layer {name} ({type(layer).__name__}) holds a pipe, and a pipe cannot run in another; give its "
                f"layers instead, *pipe, and choose the cuts of all by partitions="
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


def find_scripted(named: dict[str, nn.Module]) -> list[str]:
    """The layers that TorchScript has made its own: their parameters and buffers cannot be lent."""
    return [
        f"layer {name} holds a {type(module).__name__}, whose state cannot be looked after; give the plain module, "
        f"perhaps compiled by torch.compile"
        for name, layer in named.items()
        for module in layer.modules()
        if isinstance(module, torch.jit.ScriptModule)
    ]
