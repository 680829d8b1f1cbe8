"""Checks the arguments of a pipe, all of them together, and reads what they say."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from gpipe.config.arguments import (
    Arguments,
    Mistakes,
    check_auto,
    check_costs,
    check_layers,
    check_measurable,
    check_numbers_and_names,
    read_devices,
    read_remat,
    read_seed,
)
from gpipe.config.schedules import read_placement, read_schedule
from gpipe.distributed.mesh import Position
from gpipe.schedule.lower import Remat
from gpipe.schedule.schedules import Placement, Schedule
from gpipe.stages.microbatch import find_unsplittable
from gpipe.stages.outline import Outline
from gpipe.stages.sequence import build_layers, find_without_values
from gpipe.stages.shared_weights import Tied
from gpipe.tracing.layers_of import why_not_layers
from gpipe.tracing.model import TracedModel

FLOPS_OF_MODEL = "costs='flops' counts layers that run by themselves; for a model give 'time' or 'params'"
MEASURED_WITHOUT_VALUES = "costs cannot be measured of a model without values; give costs=[...] or 'params'"


@dataclass(frozen=True)
class Checked:
    """What the user gave, read and without mistakes; defaults are filled in where they depend on no cost.

    Attributes:
        asked: The arguments.
        layers: By name.
        tied: The parameters that are one.
        seed: Of all randomness.
        schedule: By which the stages work.
        placement: The rank of each stage.
        remat: What each stage recomputes; with `"auto"` everything, until costs are known.
        devices: Of the partitions.
    """

    asked: Arguments
    layers: dict[str, nn.Module]
    tied: Tied
    seed: int
    schedule: Schedule
    placement: Placement
    remat: tuple[Remat, ...]
    devices: tuple[torch.device, ...]


def check(
    asked: Arguments, position: Position | None, outline: Outline | None, replayed: TracedModel | None
) -> Checked:
    """Checks all arguments; they are those of `settle`.

    Raises:
        ValueError: Lists every mistake, each with what to do.
    """
    mistakes = Mistakes()
    seed = read_seed(asked.seed, mistakes)
    named, wrong = _find_layers(asked, outline, replayed, seed)
    known = 0 if wrong else len(named)
    check_measurable(asked, outline, mistakes)
    tied = check_layers(named, wrong, asked.ties, mistakes) if replayed is None else ()
    check_numbers_and_names(asked, mistakes)
    check_costs(asked.costs, asked.sample, known, mistakes)
    mistakes.found += find_unsplittable("sample", asked.sample)
    schedule = read_schedule(asked, mistakes)
    placement = read_placement(asked, schedule, known, mistakes)
    remat = read_remat(asked.remat, len(placement), mistakes)
    check_auto(asked, len(set(placement)), mistakes)
    devices = read_devices(asked.devices, len(set(placement)), position, mistakes)
    if replayed is not None:
        asked = _check_for_model(asked, replayed, mistakes)
    elif all(device.type != "meta" for device in devices):
        makers = {} if outline is None else outline.makers
        modules = {name: layer for at, (name, layer) in enumerate(named.items()) if at not in makers}
        mistakes.found += find_without_values(modules)
    mistakes.raise_all()
    return Checked(asked, named, tied, seed, schedule, placement, remat, devices)


def _find_layers(
    asked: Arguments, outline: Outline | None, replayed: TracedModel | None, seed: int
) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers by name, and what is wrong with what they are made of."""
    if replayed is not None:
        return dict(replayed.layers), []
    if wrong := why_not_layers(asked.model, asked.blocks):
        return {}, wrong
    return build_layers(asked.model, seed) if outline is None else (outline.layers, outline.mistakes)


def _check_for_model(asked: Arguments, replayed: TracedModel, mistakes: Mistakes) -> Arguments:
    """Checks what a model cannot be given; the arguments with the costs of one without values filled in."""
    mistakes.check(asked.costs != "flops", FLOPS_OF_MODEL)
    mistakes.check(not asked.ties, "ties= is for layers; a model has its parameters tied already")
    if not replayed.lacks_values:
        return asked
    mistakes.check(not callable(asked.costs) and asked.costs != "time", MEASURED_WITHOUT_VALUES)
    return replace(asked, costs="params" if asked.costs is None else asked.costs)
