"""Makes the plan that a pipe follows: measures or counts what layers cost, and cuts them into stages."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from gpipe._torch.accelerator import memory_of
from gpipe.batch.microbatch import TWO_ROWS, first_micro_batch
from gpipe.config.check import Arguments, Costs, RematOf
from gpipe.config.options import Threads
from gpipe.config.settings import Settings
from gpipe.planner.measure import as_in_training, measure_each, measure_host, measure_seconds
from gpipe.planner.profile import UncountableError, count_flops, count_parameters, profile_layers
from gpipe.planner.search.balance import partition
from gpipe.planner.search.candidates import AUTO, Choices
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import choose_offload, fits, fitting_remat
from gpipe.planner.search.plan import CostsBy, Plan
from gpipe.planner.search.profile import NOTHING, LayerProfile, Line, Profile
from gpipe.planner.search.search import search
from gpipe.planner.search.trial import MAX_SPLITS_TRIED, MAX_TIMED_ACTIONS, fastest_sizes
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import LayerSeconds, StageCost, stage_cost
from gpipe.schedule.lower import join_backwards, place_recompute
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, table_in_training
from gpipe.schedule.schedules.by_name import Named
from gpipe.schedule.simulate import BACKWARD_OVER_FORWARD, Simulator, stage_costs, unsplit_stages
from gpipe.stages.tree import Tree
from gpipe.tracing.model import TracedModel

LEAST_COST = 1e-9  # of a layer whose cost is 0
AS_IT_IS = 1  # micro-batch, whatever its rows


def make_plan(asked: Arguments, settings: Settings, placement: Placement, remat: RematOf) -> tuple[Settings, Plan]:
    """Makes the plan that the arguments ask for, or takes the one that they have; the settings follow it.

    `placement` and `remat` are those of the stages, as `check` reads them.
    """
    if asked.plan is not None:
        plan = asked.plan.of_micro_batches(asked.micro_batches)
    elif asked.schedule == AUTO:
        plan = _search(asked, settings)
        settings = settings.following(plan)
    else:
        plan = _cut(asked, settings, placement, remat)
    if plan.unsplit is None:
        plan = replace(plan, unsplit=_find_unsplit(plan, settings))
    return settings, plan


def first_sample(sample: Tree, micro_batches: int, traced: TracedModel | None) -> Tree:
    """Returns what the first layer takes of the first micro-batch of the sample."""
    if traced is None:
        return first_micro_batch(sample, micro_batches)
    first = first_micro_batch(sample, micro_batches, least=TWO_ROWS)
    return first if first is None else traced.first_state(first)


def _layers(settings: Settings) -> Sequence[nn.Module]:
    """The layers as they run one by one."""
    return list(settings.layers.values()) if settings.traced is None else settings.traced.alone()


def _bare(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    """The program of a schedule, as it is run, without recomputation and messages."""
    count = micro_batches * schedule.slices
    rows = table_in_training(schedule, placement, count, schedule.slices)
    return join_backwards(Program.of(rows, count, rank_of=placement, slices=schedule.slices))


def _typical(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    """A program of few micro-batches: a fill, a middle and a drain show what pays."""
    few = min(micro_batches, 2 * len(set(placement)))
    has_table = schedule.slices > 1 or schedule.table(placement, few) is not None
    return _bare(schedule, placement, few if has_table else micro_batches)


# Cuts of a schedule that is settled.


def _cut(asked: Arguments, settings: Settings, placement: Placement, remat: RematOf) -> Plan:
    """Cuts the layers into stages, as the user says or by what they cost; finds remat where it is to fit."""
    schedule, devices = settings.schedule, settings.devices
    layers, sample = _layers(settings), first_sample(asked.sample, asked.micro_batches, settings.traced)
    program = _typical(schedule, placement, asked.micro_batches)
    splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in program.actions)
    measured = _measure(asked, settings, layers, sample, splits) if asked.in_seconds else None
    if measured is None:
        with as_in_training(devices[0], settings.driver.intra_op_threads):
            work = find_costs(_costs_of(asked, settings), layers, sample)
    else:
        redone = asked.fits_remat or any(each != "never" for each in remat)
        work = [each.forward + each.backward + redone * (each.recompute or 0.0) for each in measured]

    def costs_of(cuts: Partition) -> tuple[StageCost, ...]:
        if measured is None:
            return stage_costs(cuts)
        return tuple(stage_cost(measured[first:end]) for first, end in cuts.bounds)

    if isinstance(asked.partitions, int):
        cuts = partition(work, len(placement), balance=asked.balance)
        if len(placement) > len(devices):
            cuts = _cut_for_ranks(asked, schedule, placement, remat, cuts, costs_of)
    else:
        cuts = Partition.of_sizes(asked.partitions, work)
    costs = costs_of(cuts)
    held, limits = None, list[float]()
    if asked.fits_remat:
        held, limits = _count(layers, sample, cuts, splits), memory_limits(asked.memory, devices)
        try:
            remat = fitting_remat(_bare(schedule, placement, asked.micro_batches), held, limits)
        except ValueError as error:
            remedy = "take more partitions, more micro-batches, other cuts, or more memory"
            raise ValueError(f"remat='auto': {error}; {remedy}") from None
    elif "offload" in remat and sample is not None:
        with suppress(UncountableError):  # then the prediction has no moves to the host, as without a sample
            held = _count(layers, sample, cuts, splits)
    if held is not None:
        costs = tuple(cost.with_bytes_of(own) for cost, own in zip(costs, held, strict=True))
        if measured is not None:
            speed = measure_host(devices[0])
            costs = tuple(replace(cost, move=cost.activations / speed) for cost in costs)
            if asked.fits_remat:
                remat = choose_offload(_bare(schedule, placement, asked.micro_batches), costs, limits, remat)
    is_named = isinstance(asked.schedule, Named)
    return Plan(
        micro_batches=asked.micro_batches,
        layers_per_partition=cuts.layers,
        rank_of=tuple(placement),
        schedule=schedule.name,
        slices=schedule.slices,
        table=None if is_named else _bare(schedule, placement, asked.micro_batches),
        remat=remat,
        names=tuple(settings.layers),
        work=tuple(cuts.layer_costs.costs),
        costs=costs,
        costs_by="time" if measured is not None else costs_by(_costs_of(asked, settings)),
        counted=held is not None,
        devices=tuple(Device(memory=limit) for limit in limits),
    )


def _costs_of(asked: Arguments, settings: Settings) -> Costs:
    """The costs that were asked for; of a model without values its parameters, which need none."""
    lacks_values = settings.traced is not None and settings.traced.lacks_values
    return "params" if asked.costs is None and lacks_values else asked.costs


def _measure(
    asked: Arguments, settings: Settings, layers: Sequence[nn.Module], sample: Tree, parts: bool
) -> list[LayerSeconds] | None:
    if _costs_of(asked, settings) == "params":
        return None
    device = settings.devices[0]
    with as_in_training(device, settings.driver.intra_op_threads):
        return measure_seconds(layers, sample, device, at_once=_ranks_at_once(settings), parts=parts)


def _ranks_at_once(settings: Settings) -> int:
    return len(settings.devices) if isinstance(settings.driver, Threads) else 1


def _cut_for_ranks(
    asked: Arguments,
    schedule: Schedule,
    placement: Placement,
    remat: RematOf,
    balanced: Partition,
    costs_of: Callable[[Partition], tuple[StageCost, ...]],
) -> Partition:
    """Finds the cuts with which a step is predicted to be fastest, where ranks have several stages.

    Balanced stages would not balance the ranks, nor how long these wait for each other.
    """
    work = balanced.layer_costs.costs
    program = _bare(schedule, placement, asked.micro_batches)
    if len(program.actions) * MAX_SPLITS_TRIED > MAX_TIMED_ACTIONS:
        program = _typical(schedule, placement, asked.micro_batches)
    simulator = Simulator(place_recompute(program, remat))

    def seconds(layers: tuple[int, ...]) -> float:
        return simulator.seconds(costs_of(Partition.of_sizes(layers, work)))

    starts = [balanced.layers, partition(work, len(placement), balance="minmax").layers]
    attempts = max(MAX_SPLITS_TRIED, MAX_TIMED_ACTIONS // len(program.actions))
    return Partition.of_sizes(fastest_sizes(starts, seconds, attempts), work)


def costs_by(costs: Costs) -> CostsBy:
    """Returns how costs that are not timed were obtained."""
    if callable(costs):
        return "function"
    return "flops" if costs == "flops" else "params" if costs is None or isinstance(costs, str) else "numbers"


def find_costs(costs: Costs, layers: Sequence[nn.Module], sample: Tree) -> Sequence[float]:
    """Returns what each layer costs, where that is not timed."""
    if callable(costs):  # the user's, given a layer and what it takes of the sample
        return measure_each(layers, sample, lambda run: float(costs(run.layer, run.given()[0][0])))
    if costs == "flops":
        return count_flops(layers, sample)
    return count_parameters(layers) if costs is None or isinstance(costs, str) else costs


def _count(layers: Sequence[nn.Module], sample: Tree, cuts: Partition, parts: bool) -> tuple[StageCost, ...]:
    """What the stages hold of such a micro-batch as the sample, in bytes."""
    profile = profile_layers(layers, {AS_IT_IS: sample}, [""] * len(layers), parts=parts).of_micro_batch(AS_IT_IS)
    return tuple(profile.cost(first, end, speed=1.0) for first, end in cuts.bounds)


def memory_limits(memory: Any, devices: Sequence[torch.device]) -> list[float]:
    """The bytes that each rank may hold; of those of a device by default an equal share."""
    if memory is None:
        return [memory_of(device) / list(devices).count(device) for device in devices]
    return list(memory) if isinstance(memory, Iterable) else [memory] * len(devices)


def _find_unsplit(plan: Plan, settings: Settings) -> frozenset[int]:
    """Finds the stages whose backwards had better not be split."""
    if any(cost.weight_share is None for cost in plan.costs):  # where nothing can wait
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in settings.layers.values()]
        return frozenset(stage for stage, (a, b) in enumerate(plan.partition.bounds) if not any(trains[a:b]))
    program = _typical(settings.schedule, plan.rank_of, plan.micro_batches)
    unsplit = unsplit_stages(place_recompute(program, plan.remat), plan.costs)
    limits = [device.memory for device in plan.devices] or [inf] * plan.partitions
    if unsplit and plan.counted:  # a whole backward may need more at once
        whole = _bare(settings.schedule, plan.rank_of, plan.micro_batches)
        if not fits(join_backwards(whole, unsplit), plan.costs, limits, plan.remat):
            return frozenset()
    return unsplit


# Cuts, placement, table and remat, searched for together.


def _search(asked: Arguments, settings: Settings) -> Plan:
    """Searches for the K and M of the user, by what layers cost."""
    devices = settings.devices
    limits = [inf] * len(devices) if asked.sample is None else memory_limits(asked.memory, devices)
    try:
        paper = [Device(memory=limit, flops=1.0) for limit in limits]
        choices = Choices((len(devices),), (asked.micro_batches,), (AUTO,))
        plan = search(read_profile(asked, settings), paper, asked.micro_batches * AS_IT_IS, choices)
    except OverflowError:  # where seconds are told
        raise ValueError("schedule='auto': seconds exceed the largest number: take larger units") from None
    except ValueError as error:
        raise ValueError(f"schedule='auto': {error}") from None
    by = plan.costs_by if plan.measured else costs_by(_costs_of(asked, settings))
    return replace(plan, counted=asked.sample is not None, costs_by=by)


def read_profile(asked: Arguments, settings: Settings) -> Profile:
    """What layers cost, by the user's costs or timed, and hold, where there is a sample."""
    layers, sample = _layers(settings), first_sample(asked.sample, asked.micro_batches, settings.traced)
    names, devices, costs = list(settings.layers), settings.devices, _costs_of(asked, settings)
    with as_in_training(devices[0], settings.driver.intra_op_threads):
        times = asked.in_seconds and costs != "params"
        if sample is None:
            profile = Profile(tuple(LayerProfile(name, NOTHING, NOTHING) for name in names))
        else:
            device, at_once = (devices[0] if times else None), _ranks_at_once(settings)
            profile = profile_layers(
                layers, {AS_IT_IS: sample}, names, measured_on=device, at_once=at_once, parts=True
            )
        if times:
            return profile
        numbers = find_costs(costs, layers, sample)
    shares = 1 / (1 + BACKWARD_OVER_FORWARD), BACKWARD_OVER_FORWARD / (1 + BACKWARD_OVER_FORWARD)
    lines = ([Line(share * (cost or LEAST_COST)) for share in shares] for cost in numbers)
    work = zip(profile.layers, lines, strict=True)
    return Profile(tuple(replace(layer, forward=f, backward=b) for layer, (f, b) in work))
