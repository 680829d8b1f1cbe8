"""The user's sequence of layers, checked and given names."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from gpipe.run.shared import find_shared
from gpipe.run.skips import find_pops, names
from gpipe.run.stage import Layer, Stage
from gpipe.run.visit import visit_key

Layers: TypeAlias = nn.Sequential | Sequence[nn.Module | Callable[[], nn.Module]]


def named_layers(layers: object, seed: int) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers under the names that an `nn.Sequential` gives them, and what is wrong with them.

    Callables are built here, each under a key of its own, so that its weights do not depend on how many are built.
    """
    if isinstance(layers, nn.Sequential):
        return {name: module for name, module in layers._modules.items() if module is not None}, []
    if isinstance(layers, nn.Module) or not isinstance(layers, Iterable):
        return {}, [
            f"layers is a {type(layers).__name__}; give an nn.Sequential, or a list of modules or of callables that "
            f"build one"
        ]
    mistakes = []
    named = {}
    for at, layer in enumerate(layers):
        if not isinstance(layer, nn.Module) and callable(layer):
            layer = build(layer, seed, at)
        if isinstance(layer, nn.Module):
            named[str(at)] = layer
        else:
            mistakes.append(
                f"layer {at} is a {type(layer).__name__}; give an nn.Module or a callable that builds one"
            )
    return named, mistakes


def find_scripted(named: dict[str, nn.Module]) -> list[str]:
    """The layers that TorchScript has made its own: their parameters and buffers cannot be lent."""
    return [
        f"layer {name} holds a {type(module).__name__}, whose state cannot be looked after; give the plain module, "
        f"perhaps compiled by torch.compile"
        for name, layer in named.items()
        for module in layer.modules()
        if isinstance(module, torch.jit.ScriptModule)
    ]


def build(maker: Callable[[], object], seed: int, index: int) -> object:
    """Builds a layer whose weights depend on (seed, index) alone; torch's own generators stay untouched."""
    key = visit_key(seed, -1, index, 0)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(key)  # torch.manual_seed would seed CUDA whenever it comes to life
        if devices:
            torch.cuda.manual_seed_all(key)
        try:
            return maker()
        except Exception as error:
            error.add_note(f"while layer {index} was built")
            raise


def cut_into_stages(
    named: dict[str, nn.Module], counts: Sequence[int], devices: Sequence[torch.device]
) -> list[Stage]:
    """The stages of so many layers each, their modules moved to the devices."""
    pops = find_pops(list(named.values()))
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    layers = [
        Layer(
            index,
            name,
            module,
            stash=names(module, "stash"),
            pop=tuple(pop for pop in pops if pop.target == index),
        )
        for index, (name, module) in enumerate(named.items())
    ]
    stages = []
    first = 0
    for index, (count, device) in enumerate(zip(counts, devices, strict=True)):
        own = layers[first : first + count]
        for layer in own:
            layer.module.to(device)
        stages.append(Stage(index, own, device))
        first += count
    for shared in find_shared(list(named.values())):  # each lives where it is first used
        parameter = shared.parameter
        parameter.data = parameter.data.to(stages[stage_of[min(shared.places)]].device)
    return stages
