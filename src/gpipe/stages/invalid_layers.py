"""Finds values that cannot be layers, and describes them in the user's words."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.stages.skips import Sequential, skip_names

BUILDS = "a callable without arguments that builds one"
OF_TORCHSCRIPT = "is of TorchScript, whose state cannot be looked after; give the plain module"
PIPE = ("gpipe.pipeline", "GPipe")  # by name: it stands on this module


def describe_invalid_layer(at: int, layer: object) -> str:
    """Why something cannot be a layer, and what to give instead."""
    kind, needed = type(layer).__name__, ", ".join(required_arguments(layer) or ["..."])
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
    return f"{prefix}{module.__name__}({'...' if required_arguments(module) else ''})"


def required_arguments(layer: object) -> list[str] | None:
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


def is_loss_of_torch(module: nn.Module) -> bool:
    """Whether torch wrote a module's forward, as that of a loss."""
    return getattr(getattr(type(module), "forward", None), "__module__", "") == "torch.nn.modules.loss"
