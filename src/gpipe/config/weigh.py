"""What the layers of a pipe cost, and what follows: the cuts, what is recomputed, which backwards stay whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpipe.config.arguments import AUTO, Arguments, Costs, has_measured, planned_bytes, planned_costs
from gpipe.config.check import Checked
from gpipe.distributed.mesh import Position
from gpipe.planner.counts import count_parameters
from gpipe.planner.measure import as_in_training, measure_by, measure_seconds, memory_of
from gpipe.planner.profile import count_flops, profile_layers
from gpipe.planner.search.cuts import partition
from gpipe.planner.search.fitting import fitting_remat
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost, stage_cost
from gpipe.schedule.lower import Remat, place_recompute, unsplit_stages
from gpipe.schedule.partition import Partition, given
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, rows_in_training
from gpipe.stages.microbatch import TWO_ROWS, first_micro_batch
from gpipe.stages.tree import Tree
from gpipe.tracing.model import TracedModel

NO_FIT = "remat='auto': {why}; take more partitions, more micro-batches, other cuts, or more memory="


@dataclass(frozen=True)
class Weighed:
    """What follows from the costs of the layers.

    Attributes:
        partition: The layers of each stage.
        seconds: What each stage costs, measured or as the plan has it; None: told by the partition alone.
        in_seconds: Whether that was measured.
        bytes: What each stage holds, where that was counted, by a plan or for `remat="auto"`.
        remat: What each stage recomputes.
        unsplit: The stages whose backwards are not split.
    """

    partition: Partition
    seconds: tuple[StageCost, ...] | None
    in_seconds: bool
    bytes: tuple[StageCost, ...] | None
    remat: tuple[Remat, ...]
    unsplit: frozenset[int]


def weigh(checked: Checked, replayed: TracedModel | None) -> Weighed:
    """Measures or counts what layers cost, as far as the user does not say it, and cuts them.

    Raises:
        ValueError: With `remat="auto"` they do not fit, though everything is recomputed.
    """
    asked = checked.asked
    layers, sample = _to_measure(asked, list(checked.layers.values()), replayed)
    program = _to_weigh(checked.schedule, checked.placement, asked.micro_batches)
    cuts, seconds = _cut(checked, layers, sample, program)
    remat, held = checked.remat, planned_bytes(asked)
    if asked.remat == AUTO:
        held = count_stages(layers, sample, cuts)
        whole_table = _bare(checked.schedule, checked.placement, asked.micro_batches)
        remat = find_remat(asked, held, whole_table, checked.devices)
    return Weighed(
        partition=cuts,
        seconds=seconds,
        in_seconds=asked.in_seconds or has_measured(asked),
        bytes=held,
        remat=remat,
        unsplit=_find_unsplit(checked.layers, cuts, place_recompute(program, remat), seconds),
    )


def _to_measure(
    asked: Arguments, layers: Sequence[nn.Module], replayed: TracedModel | None
) -> tuple[Sequence[nn.Module], Tree]:
    """The layers as they run one by one, and what the first takes of the sample's first micro-batch."""
    if replayed is None:
        return layers, first_micro_batch(asked.sample, asked.micro_batches)
    sample = first_micro_batch(asked.sample, asked.micro_batches, least=TWO_ROWS)
    return replayed.alone(), sample if sample is None else replayed.begin([sample]).states[0]


def _cut(
    checked: Checked, layers: Sequence[nn.Module], sample: Tree, program: Program
) -> tuple[Partition, tuple[StageCost, ...] | None]:
    """Cuts the layers into stages, as the user says or by what they cost; what the stages cost, if that is known."""
    asked, devices = checked.asked, checked.devices
    with as_in_training(devices[0], asked.intra_op_threads):
        if not asked.in_seconds:
            cuts = _partition(asked, _find_costs(asked.costs, layers, sample), program.stages)
            return cuts, planned_costs(asked)
        parts = any(action.kind is Kind.BACKWARD_WEIGHT for action in program.actions)
        at_once = len(devices) if asked.driver in (None, "threads") and asked.mesh is None else 1
        found = measure_seconds(layers, sample, devices[0], at_once=at_once, parts=parts)
    forwards = 1 if "never" in checked.remat else 2
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


def _find_unsplit(
    layers: Mapping[str, nn.Module], cuts: Partition, program: Program, costs: Sequence[StageCost] | None
) -> frozenset[int]:
    """The stages whose backwards are not split: it would not pay, where that was measured, or nothing can wait."""
    if costs is not None and all(cost.weight_share is not None for cost in costs):
        return unsplit_stages(program, costs)
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


def count_stages(layers: Sequence[nn.Module], sample: Tree, cuts: Partition) -> tuple[StageCost, ...]:
    """What the stages of layers that run one by one hold of such a micro-batch as the sample, in bytes."""
    as_it_is = 1  # micro-batch, whatever its rows
    profile = profile_layers(layers, {as_it_is: sample}, [""] * len(layers)).of_micro_batch(as_it_is)
    return tuple(profile.cost(first, end, speed=1.0) for first, end in cuts.bounds)


def find_remat(
    asked: Arguments, costs: Sequence[StageCost], program: Program, devices: Sequence[torch.device]
) -> tuple[Remat, ...]:
    """What each stage recomputes.

    Args:
        asked: What the user gave.
        costs: What the stages hold.
        program: The table of forwards and backwards.
        devices: Of the partitions.

    Raises:
        ValueError: They do not fit though everything is recomputed.
    """
    try:
        return fitting_remat(program, costs, _limits(asked, devices))
    except ValueError as error:
        raise ValueError(NO_FIT.format(why=error)) from None


def memory_by_row(position: Position, hosts: Sequence[str], memory: Sequence[float]) -> list[float]:
    """The bytes that a rank of each row may hold: the least of its replicas; processes of a host share its CPU's.

    Args:
        position: Of this process.
        hosts: Of each process of the world.
        memory: Of the device of each.
    """
    shared = position.device.type == "cpu"
    each = [own / (hosts.count(host) if shared else 1) for own, host in zip(memory, hosts, strict=True)]
    replicas = range(position.replicas)
    return [
        min(each[position.members[position.rank_of(row, replica)]] for replica in replicas)
        for row in range(position.rows)
    ]


def _limits(asked: Arguments, devices: Sequence[torch.device]) -> list[float]:
    if isinstance(asked.memory, Sequence):
        return list(asked.memory)
    if isinstance(asked.memory, (int, float)):
        return [asked.memory] * len(devices)
    return [memory_of(device) / list(devices).count(device) for device in devices]
