"""What a pipe is made of, once the arguments are checked, the defaults filled in and the layers cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from gpipe.build.arguments import (
    Arguments,
    Costs,
    Driver,
    check_costs,
    check_layers,
    check_measurable,
    check_numbers_and_names,
    read_devices,
    read_remat,
    read_seed,
)
from gpipe.build.auto_remat import AUTO, check_auto, find_remat
from gpipe.build.mistakes import Mistakes
from gpipe.build.planned import has_measured, planned_costs
from gpipe.build.schedules import read_placement, read_schedule
from gpipe.comm.mesh import Position
from gpipe.costs.counts import count_flops, count_parameters
from gpipe.costs.measure import as_in_training, measure_by, measure_seconds
from gpipe.layers.invalid_layers import find_without_values
from gpipe.layers.outline import Outline
from gpipe.layers.sequence import build_layers
from gpipe.layers.tied import Tied, tie
from gpipe.plan.action import Kind
from gpipe.plan.cost import StageCost, stage_cost
from gpipe.plan.lower import Remat, place_recompute
from gpipe.plan.partition import Partition, given, partition
from gpipe.plan.program import Program
from gpipe.plan.schedules import Placement, Schedule, rows_in_training
from gpipe.plan.splits import stages_left_whole
from gpipe.splitting.model import ReplayedModel
from gpipe.splitting.reading import why_not_layers
from gpipe.values.input_checks import find_unsplittable
from gpipe.values.microbatch import MicroBatches, count_rows, split, take_parts
from gpipe.values.tree import Tree

FLOPS_OF_MODEL = "costs='flops' counts layers that run by themselves; for a model give 'time' or 'params'"
MEASURED_WITHOUT_VALUES = "costs cannot be measured of a model without values; give costs=[...] or 'params'"


@dataclass(frozen=True)
class Settings:
    """What a pipe is made of, after all has been checked."""

    layers: dict[str, nn.Module]
    partition: Partition
    placement: tuple[int, ...]  # the rank of each stage
    stage_costs: tuple[StageCost, ...] | None  # measured, or as the plan has them; None: told by the partition alone
    in_seconds: bool  # they were measured
    whole: frozenset[int]  # the stages whose backwards are not split
    micro_batches: int
    remat: tuple[Remat, ...]
    devices: tuple[torch.device, ...]
    schedule: Schedule
    driver: Driver | None
    seed: int
    intra_op_threads: int
    deferred_batch_norm: bool
    sync_batch_norm: bool
    replayed: ReplayedModel | None = None  # if the layers are parts of a model
    tied: Tied = ()  # over processes: where identity cannot show it

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return self.partition.layers

    @property
    def costs(self) -> tuple[float, ...]:
        """What each layer costs."""
        return self.partition.chain.costs


def settle(
    asked: Arguments,
    position: Position | None = None,
    outline: Outline | None = None,
    replayed: ReplayedModel | None = None,
) -> Settings:
    """Checks all arguments and fills in the defaults.

    With the outline of one of several processes, layers that are given as callables stay on the meta device.

    Args:
        asked: What the user gave.
        position: Where this process stands among several.
        outline: All layers, if there are several processes.
        replayed: The model, if it is one.

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
    remats = read_remat(asked.remat, len(placement), mistakes)
    check_auto(asked, len(set(placement)), mistakes)
    devices = read_devices(asked.devices, len(set(placement)), position, mistakes)
    if replayed is not None:
        asked = _check_for_model(asked, replayed, mistakes)
    elif all(device.type != "meta" for device in devices):
        makers = {} if outline is None else outline.makers
        modules = {name: layer for at, (name, layer) in enumerate(named.items()) if at not in makers}
        mistakes.found += find_without_values(modules)
    mistakes.raise_all()
    if position is None:
        tie(tied)
    layers, sample = _to_measure(asked, list(named.values()), replayed)
    program = _to_weigh(schedule, placement, asked.micro_batches)
    found, costs = _cut(asked, layers, sample, program, remats, devices)
    if asked.remat == AUTO:
        remats = find_remat(asked, layers, sample, found, _bare(schedule, placement, asked.micro_batches), devices)
    return Settings(
        layers=named,
        partition=found,
        placement=placement,
        stage_costs=costs,
        in_seconds=asked.in_seconds or has_measured(asked),
        whole=_find_whole(named, found, place_recompute(program, remats), costs),
        micro_batches=asked.micro_batches,
        remat=remats,
        devices=devices,
        schedule=schedule,
        driver=asked.driver,  # type: ignore[arg-type]  # checked above
        seed=seed,
        intra_op_threads=asked.intra_op_threads,
        deferred_batch_norm=asked.deferred_batch_norm,
        sync_batch_norm=asked.sync_batch_norm,
        replayed=replayed,
    )


def _find_layers(
    asked: Arguments, outline: Outline | None, replayed: ReplayedModel | None, seed: int
) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers by name, and what is wrong with what they are made of."""
    if replayed is not None:
        return dict(replayed.segments), []
    if wrong := why_not_layers(asked.model, asked.blocks):
        return {}, wrong
    return build_layers(asked.model, seed) if outline is None else (outline.layers, outline.mistakes)


def _check_for_model(asked: Arguments, replayed: ReplayedModel, mistakes: Mistakes) -> Arguments:
    """Checks what a model cannot be given; the arguments with the costs of one without values filled in."""
    mistakes.check(asked.costs != "flops", FLOPS_OF_MODEL)
    mistakes.check(not asked.ties, "ties= is for layers; a model has its parameters tied already")
    if not replayed.lacks_values:
        return asked
    mistakes.check(not callable(asked.costs) and asked.costs != "time", MEASURED_WITHOUT_VALUES)
    return replace(asked, costs="params" if asked.costs is None else asked.costs)


def _to_measure(
    asked: Arguments, layers: Sequence[nn.Module], replayed: ReplayedModel | None
) -> tuple[Sequence[nn.Module], Tree]:
    """The layers as they run one by one, and what the first takes of the sample's first micro-batch."""
    if replayed is None:
        return layers, first_micro_batch(asked.sample, asked.micro_batches)
    sample = first_micro_batch(asked.sample, asked.micro_batches, least=TWO_ROWS)
    return replayed.alone(), sample if sample is None else replayed.begin([sample]).states[0]


def _cut(
    asked: Arguments,
    layers: Sequence[nn.Module],
    sample: Tree,
    program: Program,
    remats: Sequence[Remat],
    devices: Sequence[torch.device],
) -> tuple[Partition, tuple[StageCost, ...] | None]:
    """Cuts the layers into stages, as the user says or by what they cost; what the stages cost, if that is known."""
    with as_in_training(devices[0], asked.intra_op_threads):
        if not asked.in_seconds:
            cuts = _partition(asked, _find_costs(asked.costs, layers, sample), program.stages)
            return cuts, planned_costs(asked)
        parts = any(action.kind is Kind.BACKWARD_WEIGHT for action in program.actions)
        at_once = len(devices) if asked.driver in (None, "threads") and asked.mesh is None else 1
        found = measure_seconds(layers, sample, devices[0], at_once=at_once, parts=parts)
    forwards = 1 if "never" in remats else 2
    cuts = _partition(asked, [forwards * each.forward + each.backward for each in found], program.stages)
    return cuts, tuple(stage_cost(found[first:end]) for first, end in cuts.bounds)


def _partition(asked: Arguments, costs: Sequence[float], stages: int) -> Partition:
    if isinstance(asked.partitions, int):
        return partition(costs, stages, balance=asked.balance)
    return given(asked.partitions, costs)


def _bare(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    """The table of forwards and backwards of a mini-batch."""
    return Program.of(rows_in_training(schedule, placement, micro_batches), micro_batches, rank_of=placement)


def _to_weigh(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    """The table by which it is decided which backwards are split: of no more than a fill, a middle and a drain."""
    some = min(micro_batches, 2 * len(set(placement)))
    return _bare(schedule, placement, micro_batches if schedule.rows(placement, some) is None else some)


def _find_whole(
    layers: Mapping[str, nn.Module], cuts: Partition, program: Program, costs: Sequence[StageCost] | None
) -> frozenset[int]:
    """The stages whose backwards are not split: it would not pay, where that was measured, or nothing can wait."""
    if costs is not None and all(cost.weight_share is not None for cost in costs):
        return stages_left_whole(program, costs)
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in layers.values()]
    return frozenset(stage for stage, (first, end) in enumerate(cuts.bounds) if not any(trains[first:end]))


def _find_costs(costs: Costs, layers: Sequence[nn.Module], sample: Tree) -> Sequence[float]:
    if callable(costs):
        return measure_by(layers, sample, costs)
    match costs:
        case "flops":
            return count_flops(layers, sample)
        case None | "params" | "time":  # time was measured before
            return count_parameters(layers)
        case _:
            return costs


TWO_ROWS = 2
"""What a model's forward is recorded on at least, if there are so many: BatchNorm in training refuses one."""


def first_micro_batch(sample: Tree, micro_batches: int, least: int = 1) -> Tree:
    """The first micro-batch of a sample, of so many rows at least, if it has them."""
    if sample is None:
        return None
    if isinstance(sample, MicroBatches):
        return take_parts(sample)[0]
    rows = count_rows(sample)
    return split(sample, rows, min(micro_batches, max(rows // least, 1)), "sample")[0]
