"""A pipe is put together in several processes: the same everywhere, each with its own layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.arguments import Settings, settle
from gpipe.run.council import Council
from gpipe.run.layers import Layers, Outline, outline, realize
from gpipe.run.place import Place
from gpipe.run.shared import Place as ParameterPlace
from gpipe.run.shared import find_ties, tie


def settle_together(
    place: Place,
    also: Mapping[str, object],
    layers: Layers,
    partitions: int | Sequence[int],
    micro_batches: int,
    **given: Any,
) -> Settings:
    """Settles what the pipe is made of, the same in all processes, and builds this one's layers.

    What else must be the same is in `also`.

    Raises:
        ValueError: Something cannot be, or differs between the processes.
        RemoteError: Another process failed.
    """
    council = Council(place)
    drawn = int(torch.randint(2**62, (), device="cpu").item()) if given["seed"] is None else None
    first = council.tell_world(drawn=drawn)[0]["drawn"]
    seed = first if given["seed"] is None else given["seed"]
    costs = given["costs"]
    if place.rank:
        costs = council.tell()[0]["costs"]  # who measures by himself would cut elsewhere
    with council.speaking():
        sketch = outline(layers, seed if isinstance(seed, int) else 0)
        if place.rank and len(costs) != len(sketch.layers):
            raise ValueError(f"there are {len(costs)} layers on rank 0 and {len(sketch.layers)} on rank {place.rank}")
        settings = settle(
            layers, partitions, micro_batches, **{**given, "seed": seed, "costs": costs}, place=place, sketch=sketch
        )
    if not place.rank:
        council.tell(costs=list(settings.costs))
    with council.speaking():
        counts = settings.layers_per_partition
        begin = sum(counts[: place.stage])
        own = range(begin, begin + counts[place.stage])
        named, mistakes = realize(sketch, own)
        if mistakes:
            raise ValueError("GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in mistakes))
        tied = _tie(named, given["ties"], sketch, own)
    council.compare(
        partitions=counts,
        micro_batches=micro_batches,
        remat=settings.remat,
        schedule=settings.schedule,
        seed=seed,
        intra_op_threads=settings.intra_op_threads,
        **also,
        ties=[list(group) for group in given["ties"]],
        **{f"layer {name}": _words(layer) for name, layer in named.items()},
    )
    return replace(settings, layers=named, tied=tied)


def _words(layer: nn.Module) -> str:
    shapes = (f"{name} {tuple(parameter.shape)}" for name, parameter in layer.named_parameters())
    return f"{type(layer).__name__}({', '.join(shapes)})"


def _tie(
    named: dict[str, nn.Module], ties: Sequence[Sequence[str]], sketch: Outline, own: range
) -> list[list[ParameterPlace]]:
    """Gives this process's copies of tied weights the value of the first; places of each group, in all processes."""
    groups, _ = find_ties(named, ties)
    index_of = {name: index for index, name in enumerate(named)}
    held = [module for index, layer in enumerate(named.values()) if index in own for module in layer.modules()]
    for group, places in zip(ties, groups, strict=True):
        same = {id(_parameter(place)) for place in places}
        here = [(module, leaf) for module in held for leaf, p in module._parameters.items() if id(p) in same]
        if not here:
            continue
        first = index_of[_layer(group[0])]
        if first not in own:
            built, _ = realize(sketch, [first])
            (((module, name), *_), *_), _ = find_ties(built, [group])
            with torch.no_grad():
                _parameter(here[0]).copy_(_parameter((module, name)))
        tie([here])
    return groups


def _layer(name: str) -> str:
    return name.partition(".")[0]


def _parameter(place: ParameterPlace) -> Tensor:
    parameter = place[0]._parameters[place[1]]
    assert parameter is not None
    return parameter
