"""Reads the user's sequence of layers, builds layers that are passed as callables, and splits the layers into stages.

The weights of a layer that a callable builds depend only on the seed and the layer's index. Each process therefore
builds the same weights, whether it builds all layers or only the layers of its own stages.
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
from gpipe.stages.host_weights import find_unsupported, move_to_host
from gpipe.stages.invalid_layers import describe_invalid_layer, describe_invalid_sequence, required_arguments
from gpipe.stages.memory_layout import moved
from gpipe.stages.rng import rng_seed
from gpipe.stages.shared_weights import find_shared
from gpipe.stages.skips import find_pops, skip_names
from gpipe.stages.stage import Layer, Stage, stage_of_layers

Maker: TypeAlias = Callable[[], nn.Module]
Layers: TypeAlias = nn.Sequential | Sequence[nn.Module | Maker]


def is_maker(layer: object) -> bool:
    """Whether a layer is a callable without arguments that builds a module, and not a function of torch."""
    function = layer.func if isinstance(layer, partial) else layer
    is_of_torch = getattr(functional, getattr(function, "__name__", ""), None) is function
    is_module = isinstance(layer, nn.Module)
    return callable(layer) and not is_module and not is_of_torch and required_arguments(layer) == []


def build_layers(layers: object, seed: int, *, in_files: bool = False) -> tuple[dict[str, nn.Module], list[str]]:
    """Builds all layers.

    Args:
        layers: The layers that the user passed.
        seed: The seed of the pipe.
        in_files: Whether to move the parameters of each layer to files before the next layer is built, because they
            may not fit in memory together.

    Returns:
        The layers by name, and messages about values that are not layers.
    """

    def make(maker: Maker, index: int) -> object:
        layer = build(maker, seed, index)
        if in_files and isinstance(layer, nn.Module) and not find_unsupported({str(index): layer}):
            move_to_host(layer, CPU)
        return layer

    return name_layers(layers, make)


def name_layers(layers: object, make: Callable[[Maker, int], object]) -> tuple[dict[str, nn.Module], list[str]]:
    """Returns the layers by name, and messages about values that are not layers.

    The names of an `nn.Sequential` are used. In other sequences, the names are the indices.

    Args:
        layers: The layers that the user passed.
        make: Builds a layer from a callable and the index of the layer.
    """
    if isinstance(layers, nn.Sequential):
        return {name: module for name, module in layers._modules.items() if module is not None}, []
    if error := describe_invalid_sequence(layers):
        return {}, [error]
    assert isinstance(layers, Iterable)
    built = dict(enumerate(make(layer, index) if is_maker(layer) else layer for index, layer in enumerate(layers)))
    modules = {str(index): layer for index, layer in built.items() if isinstance(layer, nn.Module)}
    errors = [describe_invalid_layer(index, layer) for index, layer in built.items() if str(index) not in modules]
    return modules, errors


def build(maker: Callable[[], object], seed: int, index: int) -> object:
    """Builds a layer whose weights depend only on the seed and the index, not on the layers built before."""
    with seeded(rng_seed(seed, -1, index, 0)):
        try:
            return maker()
        except Exception as error:
            error.add_note(f"while building layer {index}")
            raise


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python inside the context, and restores their states after it."""
    devices = initialized_accelerators()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            for device in (CPU, *devices):  # torch.manual_seed would also seed CUDA when it is initialized later.
                default_generator(device).manual_seed(key)
            random.seed(key)
            np.random.seed(key % 2**32)  # NumPy accepts only 32 bits.
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def split_into_stages(
    layers_by_name: dict[str, nn.Module],
    counts: Sequence[int],
    devices: Sequence[torch.device],
    own: Collection[int] | None = None,
    make: Callable[[int, Sequence[Layer], torch.device], Stage] = Stage,
    *,
    on_host: bool = False,
) -> list[Stage]:
    """Splits layers into stages and moves their modules to the devices.

    Args:
        layers_by_name: All layers.
        counts: The number of layers of each stage.
        devices: The device of each stage.
        own: The stages whose modules to move. Default: all.
        make: Creates a stage from its index, its layers and its device.
        on_host: Whether the parameters stay on the host.
    """
    own = range(len(counts)) if own is None else own
    pops = find_pops(list(layers_by_name.values()))
    layers = iter(
        [
            Layer(
                index,
                name,
                module,
                skip_names(module, "stash"),
                tuple(pop for pop in pops if pop.target == index),
                kind=str(vars(module).get("stands_for", "")),
                prefix="" if "stands_for" in vars(module) else None,
            )
            for index, (name, module) in enumerate(layers_by_name.items())
        ]
    )
    stages = []
    for index, (count, device) in enumerate(zip(counts, devices, strict=True)):
        stage_layers = list(islice(layers, count))
        stages.append(make(index, stage_layers, device))
        stages[-1].home = CPU if on_host else device
        for layer in stage_layers if index in own else ():
            if on_host:
                move_to_host(layer.module, device)
                continue
            keep_parameters(layer.module, device, partial(moved, device=device))
            if device.type != "cpu":
                layer.module._apply(partial(moved, device=device))  # Like `to`, but keeps the memory layout.
            layer.module.to(device)
    for shared in find_shared(list(layers_by_name.values())):  # A shared parameter is on the device of its first use.
        home = stage_of_layers(stages)[min(shared.slots)]
        if home in own:
            put_data(shared.parameter, moved(shared.parameter.data, stages[home].home))
    return stages
