"""What the layers of a pipe cost, and what follows: the cuts, what is recomputed, which backwards stay whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gpipe.config.arguments import Arguments, Costs, has_measured, planned_bytes, planned_costs
from gpipe.config.auto_remat import AUTO, count_stages, find_remat
from gpipe.config.check import Checked
from gpipe.planner.counts import count_flops, count_parameters
from gpipe.planner.measure import as_in_training, measure_by, measure_seconds
from gpipe.planner.search.cuts import partition
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost, stage_cost
from gpipe.schedule.lower import Remat, place_recompute, stages_left_whole
from gpipe.schedule.partition import Partition, given
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, rows_in_training
from gpipe.stages.microbatch import TWO_ROWS, first_micro_batch
from gpipe.stages.tree import Tree
from gpipe.tracing.model import TracedModel


@dataclass(frozen=True)
class Weighed:
    """What follows from the costs of the layers.

    Attributes:
        partition: The layers of each stage.
        seconds: What each stage costs, measured or as the plan has it; None: told by the partition alone.
        in_seconds: Whether that was measured.
        bytes: What each stage holds, where that was counted, by a plan or for `remat="auto"`.
        remat: What each stage recomputes.
        whole: The stages whose backwards are not split.
    """

    partition: Partition
    seconds: tuple[StageCost, ...] | None
    in_seconds: bool
    bytes: tuple[StageCost, ...] | None
    remat: tuple[Remat, ...]
    whole: frozenset[int]


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
        whole=_find_whole(checked.layers, cuts, place_recompute(program, remat), seconds),
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
