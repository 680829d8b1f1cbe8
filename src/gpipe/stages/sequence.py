"""Reads the user's sequence of layers, names and builds them, and cuts them into stages.

Layers given as callables are known without their weights: all processes have an `outline` of all layers, and then
each builds its own for real: `realize`. A layer's weights depend on (seed, index) alone, so one process that builds
all has the same. What another process holds stands there without values, and refuses what needs some, or a gradient.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gpipe._torch.accelerator import CPU, default_generator, initialized_accelerators, keep_parameters, put_data
from gpipe.stages.invalid_layers import describe_invalid_layer, describe_invalid_sequence, required_arguments
from gpipe.stages.memory_layout import moved
from gpipe.stages.rng import rng_seed
from gpipe.stages.shared_weights import find_shared
from gpipe.stages.skips import find_pops, skip_names
from gpipe.stages.stage import Layer, Stage, stage_of_layers

Maker: TypeAlias = Callable[[], nn.Module]
Layers: TypeAlias = nn.Sequential | Sequence[nn.Module | Maker]


def is_maker(layer: object) -> bool:
    """Whether a layer is given as a callable without arguments that builds it."""
    function = layer.func if isinstance(layer, partial) else layer
    of_torch = getattr(functional, getattr(function, "__name__", ""), None) is function
    return callable(layer) and not isinstance(layer, nn.Module) and not of_torch and required_arguments(layer) == []


def build_layers(layers: object, seed: int) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers under the names that an `nn.Sequential` gives them, all built, and what is wrong with them."""
    return name_layers(layers, lambda maker, index: build(maker, seed, index))


def name_layers(layers: object, make: Callable[[Maker, int], object]) -> tuple[dict[str, nn.Module], list[str]]:
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
    devices = initialized_accelerators()
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
