"""Finds values that cannot be layers of a pipe, and explains what to pass instead."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe.stages.skips import Sequential, skip_names

PIPE = ("gpipe.pipeline", "GPipe")
"""Module and name of the pipe class. Importing the class here would be a circular import."""


def describe_invalid_layer(index: int, layer: object) -> str:
    """Returns a message about a value that cannot be a layer, with a fix."""
    kind, required = type(layer).__name__, ", ".join(required_arguments(layer) or ["..."])
    if isinstance(layer, type):
        problem = f"the class {layer.__name__}, which requires arguments ({required})"
        fix = f"Pass an instance: {_constructor_call(layer)}"
    elif isinstance(owner := getattr(layer, "__self__", None), nn.Module):
        problem, fix = f"a method of a {type(owner).__name__}", "Pass the module itself"
    elif callable(layer):
        name = str(getattr(getattr(layer, "func", layer), "__name__", "<lambda>"))
        problem = "a function" if name == "<lambda>" else f"the function {name}"
        module = {key.lower(): value for key, value in vars(nn).items()}.get(name.replace("_", ""))
        if isinstance(module, type):
            fix = f"Pass a module: {_constructor_call(module)}"
        else:
            problem += f" with required arguments ({required})"
            fix = "Pass a module whose forward calls it, or a callable without arguments that builds a module"
    elif isinstance(layer, (list, tuple)):
        problem, fix = f"a {kind}", "Join its layers with nn.Sequential(*...), or unpack it for one layer per element"
    elif layer is None:
        problem, fix = "None", "Remove it"
    else:
        problem, fix = f"a {kind}", "Pass an nn.Module, or a callable without arguments that builds one"
    return f"layer {index} is {problem}. {fix}. [invalid-layer]"


def _constructor_call(module: type) -> str:
    """Returns code that creates a module, such as `nn.Linear(...)`."""
    prefix = "nn." if getattr(nn, module.__name__, None) is module else ""
    return f"{prefix}{module.__name__}({'...' if required_arguments(module) else ''})"


def required_arguments(layer: object) -> list[str] | None:
    """Returns the names of a callable's required arguments. Returns None if the callable has no signature."""
    try:
        parameters = inspect.signature(layer).parameters.values()  # type: ignore[arg-type]  # raises if not callable
    except (ValueError, TypeError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]


def describe_invalid_sequence(layers: object) -> str | None:
    """Returns a message if `layers` cannot be a sequence of layers, else None. Do not pass an `nn.Sequential`."""
    problem = f"layers is a {type(layers).__name__}, not a sequence of layers"
    match layers:
        case Mapping() | nn.ModuleDict():
            fix = "Pass its values in order: nn.Sequential(OrderedDict(...)), or list(layers.values())"
        case nn.ModuleList():
            fix = "Pass list(layers), or nn.Sequential(*layers)"
        case set() | frozenset():
            problem, fix = f"layers is a {type(layers).__name__}, which has no order", "Pass a list"
        case Iterable() if not isinstance(layers, (str, bytes, Tensor, nn.Module)):
            return None
        case _:
            fix = "Pass an nn.Sequential, or a list of modules or of callables that build one"
    return f"{problem}. {fix}. [invalid-layers]"


def find_invalid_layers(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields a message for each module that cannot be a layer.

    Args:
        layers: The layers by name.
    """
    for name, layer in layers.items():
        place = f"layer {name} ({type(layer).__name__})"
        if is_loss_of_torch(layer) and not skip_names(layer, "pop"):
            call = _constructor_call(type(layer))
            yield f"{place} is a loss. Pass it to each step: pipe.step(inputs, targets, {call}). [loss-as-layer]"
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            yield (
                f"{place} has no forward method. Pass its elements as layers, or join them with nn.Sequential(*...). "
                f"[layer-without-forward]"
            )
        elif layer.forward == MethodType(nn.Module.forward, layer) and type(layer).__call__ is nn.Module.__call__:
            yield f"{place} has no forward method. Define one: def forward(self, x). [layer-without-forward]"
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            yield (
                f"{place} already replicates its module. Pass its .module, and use mesh= to create replicas of the "
                f"pipe. [replicated-layer]"
            )
        classes = {base for part in layer.modules() for base in type(part).__mro__}
        if any((base.__module__, base.__qualname__) == PIPE for base in classes):
            yield (
                f"{place} contains a pipe, but a pipe cannot run inside another one. Pass its layers instead, *pipe, "
                f"and set the split points of all layers with partitions=. [pipe-in-layer]"
            )
        if any(isinstance(part, torch.jit.ScriptModule) for part in layer.modules()):
            yield (
                f"{place} is or contains a torch.jit.ScriptModule, whose state gpipe cannot track. Use the original "
                f"module, which is not scripted. [torchscript-module]"
            )
        if lazy := [path for path, buffer in layer.named_buffers() if is_lazy(buffer)]:
            yield (
                f"{place} is lazy, and its buffers ({', '.join(lazy)}) have no shapes. Run the layers once on an "
                f"example mini-batch before you create the pipe. [lazy-buffers]"
            )
        for part in _find_nested_skips(layer):
            yield (
                f"{place}: its submodule {part}, but only layers of the pipe can stash and pop. Pass the submodules "
                f"of layer {name} as separate layers (*block instead of block), or use gpipe.Sequential(...) to run "
                f"them. [skip-inside-layer]"
            )


def _find_nested_skips(layer: nn.Module) -> Iterator[str]:
    """Yields a description of each submodule with `stash` or `pop` that is not inside a `gpipe.Sequential`."""
    run = {part for outer in layer.modules() if isinstance(outer, Sequential) for part in list(outer.modules())[1:]}
    for path, part in layer.named_modules():
        for attribute in ("stash", "pop") if path and part not in run else ():
            names = {name for name in skip_names(part, attribute) if isinstance(name, str)}
            if names := names - {*skip_names(layer, attribute)}:
                yield f"{path} ({type(part).__name__}) has {attribute} = {tuple(sorted(names))}"


def is_loss_of_torch(module: nn.Module) -> bool:
    """Whether a module is a loss of `torch.nn`, or inherits the forward of one."""
    return getattr(getattr(type(module), "forward", None), "__module__", "") == "torch.nn.modules.loss"
