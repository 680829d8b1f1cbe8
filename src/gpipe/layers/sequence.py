"""Reads the user's sequence of layers, names and builds them, and cuts them into stages."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from gpipe.layers.invalid_layers import describe_invalid_layer, describe_invalid_sequence, is_maker
from gpipe.layers.skips import find_pops, skip_names
from gpipe.layers.stage import Layer, Stage, stage_of_layers
from gpipe.layers.tied import find_shared
from gpipe.rng.visit import visit_key
from gpipe.values.layout import moved

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
    with seeded(visit_key(seed, -1, index, 0)):
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
            stash=skip_names(module, "stash"),
            pop=tuple(pop for pop in pops if pop.target == index),
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
