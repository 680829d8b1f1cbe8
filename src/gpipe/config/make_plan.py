"""Makes the plan of a pipe: measures or counts the cost of each layer, and splits the model into stages."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from gpipe._torch.accelerator import memory_of
from gpipe.batch.microbatch import first_micro_batch
from gpipe.config.arguments import Arguments, Costs, Settings
from gpipe.config.options import Threads
from gpipe.config.resolve import RematOf, first_rows
from gpipe.planner.measure import as_in_training, measure_each, measure_host, measure_seconds
from gpipe.planner.other_processes import Meter
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

LEAST_COST = 1e-9  # replaces the cost of a layer whose cost is 0
ONE = 1  # The planner counts in micro-batches, not rows: the sample is one micro-batch.


def make_plan(
    arguments: Arguments, settings: Settings, placement: Placement, remat: RematOf
) -> tuple[Settings, Plan]:
    """Returns the settings and a plan. The settings have the schedule of the plan.

    Args:
        arguments: The arguments. If they contain a plan, this function returns that plan.
        settings: The settings that `resolve` returned.
        placement: The rank of each stage, as `resolve` returned it.
        remat: The recomputation mode of each stage, as `resolve` returned it.
    """
    meter = Meter()
    if arguments.plan is not None:
        plan = arguments.plan.of_micro_batches(arguments.micro_batches)
    elif arguments.schedule == AUTO:
        plan = _search(arguments, settings)
        settings = settings.with_schedule_of(plan)
    else:
        plan = _split(arguments, settings, placement, remat)
    if arguments.plan is None and plan.measured:
        plan = replace(plan, other_cores=meter.other_cores())
    if plan.unsplit is None:
        plan = replace(plan, unsplit=_find_unsplit(plan, settings))
    return settings, plan


def _layers_and_sample(arguments: Arguments, settings: Settings) -> tuple[Sequence[nn.Module], Tree]:
    """Returns the layers as standalone modules, and the input of the first layer for one micro-batch."""
    if (traced := settings.traced) is None:
        return list(settings.layers.values()), first_micro_batch(arguments.sample, arguments.micro_batches)
    rows = first_rows(arguments)
    return traced.single_layers(), None if rows is None else traced.first_state(rows)


def _program(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    """Returns the program of a schedule without recomputation and messages."""
    count = micro_batches * schedule.slices
    rows = table_in_training(schedule, placement, count, schedule.slices)
    return join_backwards(Program.of(rows, count, rank_of=placement, slices=schedule.slices))


def _short_program(schedule: Schedule, placement: Placement, micro_batches: int) -> Program:
    """Returns a program of few micro-batches that still has the warm-up, steady and cool-down phases of a step."""
    few = min(micro_batches, 2 * len(set(placement)))
    has_table = schedule.slices > 1 or schedule.table(placement, few) is not None
    return _program(schedule, placement, few if has_table else micro_batches)


# Plans for a fixed schedule.


def _split(arguments: Arguments, settings: Settings, placement: Placement, remat: RematOf) -> Plan:
    """Splits the layers into stages, by the counts in `partitions` or by cost. Chooses `remat` if it is "auto"."""
    schedule, devices = settings.schedule, settings.devices
    layers, sample = _layers_and_sample(arguments, settings)
    program = _short_program(schedule, placement, arguments.micro_batches)
    splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in program.actions)
    measured = _measure(arguments, settings, layers, sample, splits) if arguments.measures_time else None
    if measured is None:
        with as_in_training(devices[0], settings.driver.intra_op_threads):
            work = find_costs(_costs_of(arguments, settings), layers, sample)
    else:
        recomputes = arguments.fits_remat or any(mode != "never" for mode in remat)
        work = [each.forward + each.backward + recomputes * (each.recompute or 0.0) for each in measured]

    def costs_of(cuts: Partition) -> tuple[StageCost, ...]:
        if measured is None:
            return stage_costs(cuts)
        return tuple(stage_cost(measured[first:end]) for first, end in cuts.bounds)

    if isinstance(arguments.partitions, int):
        cuts = partition(work, len(placement), balance=arguments.balance)
        if len(placement) > len(devices):
            cuts = _split_for_ranks(arguments, schedule, placement, remat, cuts, costs_of)
    else:
        cuts = Partition.of_sizes(arguments.partitions, work)
    costs = costs_of(cuts)
    held, limits, on_host = None, list[float](), settings.resident is not None
    count_bytes = partial(_count_bytes, layers, sample, cuts, splits, on_host=on_host)
    full_program = partial(_program, schedule, placement, arguments.micro_batches)
    if arguments.fits_remat:
        held, limits = count_bytes(), memory_limits(arguments.memory, devices)
        try:
            remat = fitting_remat(full_program(), held, limits)
        except ValueError as error:
            raise ValueError(
                f"remat={arguments.remat!r}: {error}. Use more partitions, more micro-batches, different split "
                f"points, or more memory."
            ) from None
    elif (on_host or {"offload", "offload_inputs"} & {*remat}) and sample is not None:
        with suppress(UncountableError):  # Then the prediction ignores transfers to the host, as without a sample.
            held = count_bytes()
    if held is not None:
        costs = tuple(cost.with_bytes_of(size) for cost, size in zip(costs, held, strict=True))
        if measured is not None:
            speed = measure_host(devices[0])
            costs = tuple(cost.with_host(speed, mode) for cost, mode in zip(costs, remat, strict=True))
            if arguments.fits_remat:
                remat = choose_offload(full_program(), costs, limits, remat)
    return Plan(
        micro_batches=arguments.micro_batches,
        layers_per_partition=cuts.layers,
        rank_of=tuple(placement),
        schedule=schedule.name,
        slices=schedule.slices,
        table=None if isinstance(arguments.schedule, Named) else full_program(),
        remat=remat,
        names=tuple(settings.layers),
        work=tuple(cuts.layer_costs.costs),
        costs=costs,
        costs_by="time" if measured is not None else costs_by(_costs_of(arguments, settings)),
        counted=held is not None,
        resident=settings.resident,
        devices=tuple(Device(memory=limit) for limit in limits),
    )


def _costs_of(arguments: Arguments, settings: Settings) -> Costs:
    """Returns `costs=`. For a model on the meta device, the default is "params", which does not run the layers."""
    lacks_values = settings.traced is not None and settings.traced.lacks_values
    return "params" if arguments.costs is None and lacks_values else arguments.costs


def _measure(
    arguments: Arguments, settings: Settings, layers: Sequence[nn.Module], sample: Tree, splits: bool
) -> list[LayerSeconds] | None:
    if _costs_of(arguments, settings) == "params":
        return None
    device = settings.devices[0]
    with as_in_training(device, settings.driver.intra_op_threads):
        return measure_seconds(layers, sample, device, at_once=_ranks_at_once(settings), parts=splits)


def _ranks_at_once(settings: Settings) -> int:
    """Returns how many ranks run in this process at the same time."""
    return len(settings.devices) if isinstance(settings.driver, Threads) else 1


def _split_for_ranks(
    arguments: Arguments,
    schedule: Schedule,
    placement: Placement,
    remat: RematOf,
    balanced: Partition,
    costs_of: Callable[[Partition], tuple[StageCost, ...]],
) -> Partition:
    """Returns the split with the shortest predicted step, for ranks with several stages.

    Stages of equal cost are not always the fastest split: ranks can still have unequal work and wait for each other.
    """
    work = balanced.layer_costs.costs
    program = _program(schedule, placement, arguments.micro_batches)
    if len(program.actions) * MAX_SPLITS_TRIED > MAX_TIMED_ACTIONS:
        program = _short_program(schedule, placement, arguments.micro_batches)
    simulator = Simulator(place_recompute(program, remat))

    def seconds(layers: tuple[int, ...]) -> float:
        return simulator.seconds(costs_of(Partition.of_sizes(layers, work)))

    starts = [balanced.layers, partition(work, len(placement), balance="minmax").layers]
    attempts = max(MAX_SPLITS_TRIED, MAX_TIMED_ACTIONS // len(program.actions))
    return Partition.of_sizes(fastest_sizes(starts, seconds, attempts), work)


def costs_by(costs: Costs) -> CostsBy:
    """Returns the name of the source of costs, for costs that gpipe does not measure."""
    if callable(costs):
        return "function"
    return "flops" if costs == "flops" else "params" if costs is None or isinstance(costs, str) else "numbers"


def find_costs(costs: Costs, layers: Sequence[nn.Module], sample: Tree) -> Sequence[float]:
    """Returns the cost of each layer without measuring time."""
    if callable(costs):  # The user's function of a layer and its sample input.
        return measure_each(layers, sample, lambda run: float(costs(run.layer, run.inputs()[0][0])))
    if costs == "flops":
        return count_flops(layers, sample)
    return count_parameters(layers) if costs is None or isinstance(costs, str) else costs


def _count_bytes(
    layers: Sequence[nn.Module], sample: Tree, cuts: Partition, splits: bool, *, on_host: bool
) -> tuple[StageCost, ...]:
    """Returns the memory cost of each stage, in bytes, for the sample as one micro-batch."""
    profile = profile_layers(layers, {ONE: sample}, [""] * len(layers), parts=splits).of_micro_batch(ONE)
    return tuple(profile.cost(first, end, speed=1.0, on_host=on_host) for first, end in cuts.bounds)


def memory_limits(memory: Any, devices: Sequence[torch.device]) -> list[float]:
    """Returns the number of bytes that each rank may hold.

    Without a limit from the user, ranks share the memory of their device evenly.
    """
    if memory is None:
        return [memory_of(device) / list(devices).count(device) for device in devices]
    return list(memory) if isinstance(memory, Iterable) else [memory] * len(devices)


def _find_unsplit(plan: Plan, settings: Settings) -> frozenset[int]:
    """Returns the stages whose backward pass is not split into input-gradient and weight-gradient passes."""
    if any(cost.weight_share is None for cost in plan.costs):  # Not measured: split all stages that are trained.
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in settings.layers.values()]
        return frozenset(stage for stage, (a, b) in enumerate(plan.partition.bounds) if not any(trains[a:b]))
    program = _short_program(settings.schedule, plan.rank_of, plan.micro_batches)
    unsplit = unsplit_stages(place_recompute(program, plan.remat), plan.costs)
    limits = [device.memory for device in plan.devices] or [inf] * plan.partitions
    if unsplit and plan.counted:  # A whole backward pass may need more memory at once.
        full = _program(settings.schedule, plan.rank_of, plan.micro_batches)
        if not fits(join_backwards(full, unsplit), plan.costs, limits, plan.remat):
            return frozenset()
    return unsplit


# schedule="auto": split points, placement, table and recomputation are searched for together.


def _search(arguments: Arguments, settings: Settings) -> Plan:
    """Searches for the fastest plan with the user's number of ranks (K) and number of micro-batches (M)."""
    devices = settings.devices
    limits = [inf] * len(devices) if arguments.sample is None else memory_limits(arguments.memory, devices)
    try:
        ranks = [Device(memory=limit, flops=1.0) for limit in limits]
        choices = Choices((len(devices),), (arguments.micro_batches,), (AUTO,))
        plan = search(read_profile(arguments, settings), ranks, arguments.micro_batches * ONE, choices)
    except OverflowError:  # Only possible with costs that the user passed.
        raise ValueError("schedule='auto': costs are too large for a float. Use larger units.") from None
    except ValueError as error:
        raise ValueError(f"schedule='auto': {error}") from None
    source = plan.costs_by if plan.measured else costs_by(_costs_of(arguments, settings))
    return replace(plan, counted=arguments.sample is not None, costs_by=source)


def read_profile(arguments: Arguments, settings: Settings) -> Profile:
    """Returns a profile with the cost of each layer, measured or from `costs=`, and its memory if a sample exists."""
    layers, sample = _layers_and_sample(arguments, settings)
    names, device, costs = list(settings.layers), settings.devices[0], _costs_of(arguments, settings)
    with as_in_training(device, settings.driver.intra_op_threads):
        measures = arguments.measures_time and costs != "params"
        if sample is None:
            profile = Profile(tuple(LayerProfile(name, NOTHING, NOTHING) for name in names))
        else:
            profile = profile_layers(
                layers,
                {ONE: sample},
                names,
                measured_on=device if measures else None,
                at_once=_ranks_at_once(settings),
                parts=True,
            )
        if measures:
            return profile
        numbers = find_costs(costs, layers, sample)
    shares = 1 / (1 + BACKWARD_OVER_FORWARD), BACKWARD_OVER_FORWARD / (1 + BACKWARD_OVER_FORWARD)
    lines = ([Line(share * (cost or LEAST_COST)) for share in shares] for cost in numbers)
    return Profile(
        tuple(replace(layer, forward=f, backward=b) for layer, (f, b) in zip(profile.layers, lines, strict=True))
    )
