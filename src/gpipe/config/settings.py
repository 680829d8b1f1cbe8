"""What a pipe is made of: arguments checked, defaults filled in, layers weighed and cut."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from gpipe._torch.accelerator import memory_of
from gpipe.config.check import UNSAID, Arguments, Checked, Costs, check
from gpipe.distributed.mesh import Position
from gpipe.planner.measure import as_in_training, measure_each, measure_host, measure_seconds
from gpipe.planner.profile import UncountableError, count_flops, count_parameters, profile_layers
from gpipe.planner.search.cuts import partition
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import fits, fitting_remat, offloading
from gpipe.planner.search.found import Plan
from gpipe.planner.search.profile import NOTHING, LayerProfile, Line, Profile
from gpipe.planner.search.search import search
from gpipe.planner.search.shapes import AUTO, Choices
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost, stage_cost
from gpipe.schedule.lower import join_backwards, place_recompute
from gpipe.schedule.partition import Partition, given
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, table_in_training
from gpipe.schedule.schedules.by_name import to_json
from gpipe.schedule.simulate import BACKWARD_OVER_FORWARD, unsplit_stages
from gpipe.stages.microbatch import TWO_ROWS, first_micro_batch
from gpipe.stages.sequence import Outline
from gpipe.stages.shared_weights import tie
from gpipe.stages.tree import Tree
from gpipe.tracing.model import TracedModel

_LEAST_COST = 1e-9  # of a layer whose cost is 0


@dataclass(frozen=True)
class Settings(Checked):
    """What a pipe is made of; `tied` over processes alone, where identity cannot show it."""

    partition: Partition
    stage_costs: tuple[StageCost, ...] | None  # measured, or as the plan has them; None: told by the partition alone
    in_seconds: bool  # they were measured
    stage_bytes: tuple[StageCost, ...] | None  # what stages hold, where that was counted
    unsplit: frozenset[int]  # the stages whose backwards are not split
    traced: TracedModel | None = None  # if the layers are parts of a model
    searched: Plan | None = None  # by schedule="auto", where this process did

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        return self.partition.layers

    @property
    def costs(self) -> tuple[float, ...]:
        return self.partition.chain.costs

    @property
    def recomputes(self) -> bool:
        """Whether a stage may run a forward again."""
        return any(remat not in ("never", "offload") for remat in self.remat)

    @property
    def arguments(self) -> dict[str, Any]:
        """What makes a pipe of the same cuts, table and remat, with the schedule in JSON."""
        schedule = to_json(self.schedule, self.placement, self.micro_batches)
        return {
            "partitions": list(self.layers_per_partition),
            "micro_batches": self.micro_batches,
            "schedule": schedule,
            "stages_per_rank": len(self.placement) // len(self.devices) if isinstance(schedule, str) else None,
            "remat": list(self.remat),
        } | ({"slices": self.slices} if self.slices > 1 else {})


def settle(
    asked: Arguments,
    position: Position | None = None,
    outline: Outline | None = None,
    traced: TracedModel | None = None,
) -> Settings:
    """Checks all arguments, fills in the defaults, measures or counts what layers cost, and cuts them.

    Among several processes there is an `outline` of all layers; those given as callables stay on the meta device.
    """
    asked, checked = check(asked, position, outline, traced)
    plan = asked.plan
    if position is None:
        tie(checked.tied)
    layers, sample = _alone(asked, list(checked.layers.values()), traced)
    if asked.schedule == AUTO:
        plan = _search(asked, checked, layers, sample)
        asked = replace(asked, **UNSAID, plan=plan, costs=None, memory=None, seed=checked.seed).follow_plan()
        return settle(replace(asked, costs=plan.work), position, outline, traced)
    schedule, placement, micro_batches = checked.schedule, checked.placement, asked.micro_batches
    some = min(micro_batches, 2 * len(set(placement)))  # a fill, a middle and a drain show what pays
    program = _bare(schedule, placement, some if schedule.table(placement, some) is not None else micro_batches)
    cuts, seconds = _cut(asked, checked, layers, sample, program)
    measured = asked.in_seconds
    if plan is not None and asked.costs is plan.work:  # then nothing was measured anew
        seconds, measured = plan.costs, plan.measured
    held = plan.costs if plan is not None and micro_batches == plan.micro_batches else None
    remat, whole = checked.remat, partial(_bare, schedule, placement, micro_batches)
    limits = [inf] * len(checked.devices) if plan is None else [device.memory for device in plan.devices]
    if asked.remat == AUTO:
        held, limits = _count_stages(layers, sample, cuts, parts=_splits(program)), _limits(asked, checked.devices)
        try:
            remat = fitting_remat(whole(), held, limits)
        except ValueError as error:
            remedy = "take more partitions, more micro-batches, other cuts, or more memory="
            raise ValueError(f"remat='auto': {error}; {remedy}") from None
    elif held is None and "offload" in remat and sample is not None:
        with suppress(UncountableError):  # then the prediction has no moves to the host, as without a sample
            held = _count_stages(layers, sample, cuts, parts=_splits(program))
    if asked.in_seconds and seconds is not None and held is not None:
        seconds = _with_moves(seconds, held, checked.devices[0])
        if asked.remat == AUTO:
            remat = offloading(whole(), seconds, limits, remat)
    if seconds is not None and all(cost.weight_share is not None for cost in seconds):
        unsplit = unsplit_stages(place_recompute(program, remat), seconds)  # where it would not pay
        if unsplit and held is not None and not fits(join_backwards(whole(), unsplit), held, limits, remat):
            unsplit = frozenset()  # a whole backward needs more at once
    else:  # where nothing can wait
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in checked.layers.values()]
        unsplit = frozenset(stage for stage, (first, end) in enumerate(cuts.bounds) if not any(trains[first:end]))
    return Settings(
        **vars(checked) | {"remat": remat, "tied": ()},
        partition=cuts,
        stage_costs=seconds,
        in_seconds=measured,
        stage_bytes=held,
        unsplit=unsplit,
        traced=traced,
        searched=None if plan is None or plan.least_seconds is None else plan,
    )


def _alone(
    asked: Arguments, layers: Sequence[nn.Module], traced: TracedModel | None
) -> tuple[Sequence[nn.Module], Tree]:
    """The layers as they run one by one, and what the first takes of the sample's first micro-batch."""
    if traced is None:
        return layers, first_micro_batch(asked.sample, asked.micro_batches)
    sample = first_micro_batch(asked.sample, asked.micro_batches, least=TWO_ROWS)
    return traced.alone(), sample if sample is None else traced.first_state(sample)


def _search(asked: Arguments, checked: Checked, layers: Sequence[nn.Module], sample: Tree) -> Plan:
    """Cuts, placement, table and remat, searched together for the K and M of the user and what layers cost."""
    as_it_is = 1  # micro-batch, whatever its rows
    names, devices, ranks = list(checked.layers), checked.devices, len(checked.devices)
    with as_in_training(devices[0], asked.intra_op_threads):
        if sample is None:
            profile = Profile(tuple(LayerProfile(name, NOTHING, NOTHING) for name in names))
        else:
            device = devices[0] if asked.in_seconds else None
            at_once = _ranks_at_once(asked, checked)
            profile = profile_layers(
                layers, {as_it_is: sample}, names, measured_on=device, at_once=at_once, parts=True
            )
        if not asked.in_seconds:
            costs = _find_costs(asked.costs, layers, sample)
            shares = 1 / (1 + BACKWARD_OVER_FORWARD), BACKWARD_OVER_FORWARD / (1 + BACKWARD_OVER_FORWARD)
            lines = ([Line(share * (cost or _LEAST_COST)) for share in shares] for cost in costs)
            work = zip(profile.layers, lines, strict=True)
            profile = Profile(tuple(replace(layer, forward=f, backward=b) for layer, (f, b) in work))
    limits = [inf] * ranks if sample is None else _limits(asked, devices)
    try:
        paper = [Device(memory=limit, flops=1.0) for limit in limits]
        choices = Choices((ranks,), (asked.micro_batches,), (AUTO,))
        return search(profile, paper, asked.micro_batches * as_it_is, choices)
    except OverflowError:  # where seconds are told
        raise ValueError("schedule='auto': seconds exceed the largest number: take larger units") from None
    except ValueError as error:
        raise ValueError(f"schedule='auto': {error}") from None


def _ranks_at_once(asked: Arguments, checked: Checked) -> int:
    return len(checked.devices) if asked.driver in (None, "threads") and asked.mesh is None else 1


def _bare(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    rows = table_in_training(schedule, placement, micro_batches)
    return join_backwards(Program.of(rows, micro_batches, rank_of=placement))  # as it is run


def _cut(
    asked: Arguments, checked: Checked, layers: Sequence[nn.Module], sample: Tree, program: Program
) -> tuple[Partition, tuple[StageCost, ...] | None]:
    """Cuts the layers into stages, as the user says or by what they cost; the seconds of each, where measured."""
    found, devices = None, checked.devices
    with as_in_training(devices[0], asked.intra_op_threads):
        if asked.in_seconds:
            at_once, parts = _ranks_at_once(asked, checked), _splits(program)
            found = measure_seconds(layers, sample, devices[0], at_once=at_once, parts=parts)
            redone = "never" not in checked.remat
            costs: Sequence[float] = [
                each.forward + each.backward + redone * (each.recompute or 0.0) for each in found
            ]
        else:
            costs = _find_costs(asked.costs, layers, sample)
    if isinstance(asked.partitions, int):
        cuts = partition(costs, program.stages, balance=asked.balance)
    else:
        cuts = given(asked.partitions, costs)
    return cuts, None if found is None else tuple(stage_cost(found[first:end]) for first, end in cuts.bounds)


def _find_costs(costs: Costs, layers: Sequence[nn.Module], sample: Tree) -> Sequence[float]:
    if callable(costs):  # the user's, given a layer and what it takes of the sample
        return measure_each(layers, sample, lambda run: float(costs(run.layer, run.given()[0][0])))
    if costs == "flops":
        return count_flops(layers, sample)
    return count_parameters(layers) if costs is None or isinstance(costs, str) else costs


def _splits(program: Program) -> bool:
    return any(action.kind is Kind.BACKWARD_WEIGHT for action in program.actions)


def _count_stages(
    layers: Sequence[nn.Module], sample: Tree, cuts: Partition, *, parts: bool
) -> tuple[StageCost, ...]:
    """What the stages of layers that run one by one hold of such a micro-batch as the sample, in bytes."""
    as_it_is = 1  # micro-batch, whatever its rows
    profile = profile_layers(layers, {as_it_is: sample}, [""] * len(layers), parts=parts).of_micro_batch(as_it_is)
    return tuple(profile.cost(first, end, speed=1.0) for first, end in cuts.bounds)


def _with_moves(
    seconds: Sequence[StageCost], held: Sequence[StageCost], device: torch.device
) -> tuple[StageCost, ...]:
    """What stages cost in seconds, moves to the host and back among them, and in bytes."""
    speed = measure_host(device)
    names = ("boundary", "inside", "working", "state")
    return tuple(
        replace(cost, move=own.inside / speed, **{name: getattr(own, name) for name in names})
        for cost, own in zip(seconds, held, strict=True)
    )


def _limits(asked: Arguments, devices: Sequence[torch.device]) -> list[float]:
    if asked.memory is None:
        return [memory_of(device) / list(devices).count(device) for device in devices]
    memory: Any = asked.memory
    return list(memory) if isinstance(memory, Iterable) else [memory] * len(devices)
