"""Checks all arguments of `GPipe`, and resolves them to settings."""

import os
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from torch import nn

from gpipe._torch.accelerator import CPU, accelerators, numbered
from gpipe.batch.microbatch import TWO_ROWS, find_unsplittable, first_micro_batch
from gpipe.config.arguments import PLAN_DEFAULTS, Arguments, Mistakes, Settings
from gpipe.config.options import DRIVERS, BatchNorm, Driver, Processes, Remat, Threads
from gpipe.distributed.launch_variables import several_without_group
from gpipe.distributed.mesh import Position, is_joined, world_size
from gpipe.errors import int_remedy, is_count
from gpipe.planner.search.candidates import AUTO
from gpipe.schedule import lower
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import MAX_MICRO_BATCHES, Program, ScheduleError, too_many_micro_batches
from gpipe.schedule.schedules import SCHEDULES, Placement, Schedule
from gpipe.schedule.schedules.by_name import (
    BreadthFirst,
    Interleaved,
    Sliced,
    no_table,
    schedule_of,
    schedule_of_function,
    schedule_of_program,
)
from gpipe.stages.invalid_layers import find_invalid_layers
from gpipe.stages.remote_layers import MetaLayers, find_without_values
from gpipe.stages.sequence import build_layers
from gpipe.stages.shared_weights import Tied, find_ties
from gpipe.stages.skips import find_pops
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import is_model, read_model, why_not_layers
from gpipe.tracing.model import TracedModel

RematOf: TypeAlias = tuple[lower.Remat, ...]
"""The recomputation mode of each stage."""


def resolve(
    arguments: Arguments,
    position: Position | None,
    outline: MetaLayers | None,
    traced: TracedModel | None,
    *others: str,
) -> tuple[Settings, Placement, RematOf]:
    """Returns the settings, the rank of each stage, and the recomputation mode of each stage.

    Raises:
        ValueError: If arguments are invalid. The error lists `others` and then all other mistakes.
    """
    mistakes = Mistakes(others)
    seed = _read_seed(arguments.seed, mistakes)
    layers: dict[str, nn.Module] = {}
    invalid = why_not_layers(arguments.model) if traced is None else []
    mistakes += invalid
    if traced is not None:
        layers = dict(traced.layers)
        mistakes.check(not arguments.ties, "ties= is only for a sequence of layers. Remove it.")
    elif not is_model(arguments.model):
        if outline is None:
            in_files = arguments.weights == "host" and not accelerators()
            layers, invalid = build_layers(arguments.model, seed, in_files=in_files)
        else:
            layers, invalid = outline.layers, outline.mistakes
    count = len(layers) + len(invalid) if layers else 0  # 0: unknown
    tied = _check_layers(layers, invalid, arguments.ties, mistakes) if traced is None else ()
    driver = _read_execution(arguments, mistakes)
    planned = 0 if arguments.plan is None else sum(arguments.plan.layers_per_partition)
    message = f"plan= is for {planned} layers, but the model has {count}. Call gpipe.find_plan with this model."
    mistakes.check(planned in (0, count) or not count, message)
    makers = {} if outline is None else outline.makers
    _check_costs(arguments, count, bool(makers), traced, mistakes)
    mistakes += find_unsplittable("sample", arguments.sample)
    schedule = read_schedule(arguments, mistakes)
    placement = _read_placement(arguments, schedule, count, mistakes)
    if schedule.slices > 1:
        _check_slices(arguments, traced, mistakes)
    remat = _read_remat(arguments, len(placement), len(set(placement)), mistakes)
    resident = _read_weights(arguments, schedule, driver, mistakes)
    devices = _read_devices(arguments.devices, len(set(placement)), position, mistakes)
    if traced is None:
        built = {name: layer for index, (name, layer) in enumerate(layers.items()) if index not in makers}
        mistakes += find_without_values(built)
    mistakes.raise_all()
    settings = Settings(layers, traced, tied, schedule, devices, driver, arguments.batch_norm, seed, resident)
    return settings, placement, remat


def trace_model(arguments: Arguments) -> TracedModel | None:
    """Traces the model on the first micro-batch of the sample. Returns None for a sequence of layers."""
    can_split = is_model(arguments.model) and is_count(arguments.micro_batches)
    return read_model(arguments.model, first_rows(arguments) if can_split else arguments.sample)


def first_rows(arguments: Arguments) -> Tree:
    """Returns the first micro-batch of the sample, with at least two rows if the sample has two rows."""
    return first_micro_batch(arguments.sample, arguments.micro_batches, least=TWO_ROWS)


def draw_seed() -> int:
    """Draws a seed from torch's generator."""
    return int(torch.randint(2**62, (), device="cpu").item())


def _read_seed(seed: int | None, mistakes: Mistakes) -> int:
    if seed is None:
        return draw_seed()
    fits = isinstance(seed, int) and -(2**63) <= seed < 2**63
    mistakes.check(fits, f"seed={seed!r} is not a 64-bit integer. Pass an int, or None to draw a seed from torch.")
    return seed if fits else 0


def _check_layers(
    layers: dict[str, nn.Module], invalid: Sequence[str], ties: Sequence[Sequence[str]], mistakes: Mistakes
) -> Tied:
    """Adds a message for each layer that cannot run. Returns the module and attribute name of tied parameters."""
    mistakes += invalid
    mistakes.check(bool(layers) or bool(invalid), "model= has no layers. Pass at least one layer.")
    mistakes += find_invalid_layers(layers)
    try:
        find_pops(list(layers.values()))
    except ValueError as error:
        mistakes += str(error).splitlines()
    if not all(isinstance(name, str) for group in map(_listed, _listed(ties)) for name in group):
        mistakes.append(f"ties={ties!r} is not a list of groups of names. Pass e.g. [('0.weight', '5.weight')].")
        return ()
    tied, wrong_ties = find_ties(layers, ties)
    mistakes += wrong_ties
    return tied


def _listed(value: object) -> list[Any]:
    """Returns the items of a sequence. Returns [None] for any other value, so that the caller rejects it."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [None]


def read_driver(arguments: Arguments, mistakes: Mistakes) -> Driver:
    """Returns the driver with its options. Returns `Threads` if `driver=` is invalid."""
    driver = arguments.driver
    if driver is None:
        return Threads() if arguments.mesh is None else Processes()
    if isinstance(driver, str) and driver in DRIVERS:
        return DRIVERS[driver]()
    if not isinstance(driver, Driver):
        known = ", ".join(map(repr, DRIVERS))
        mistakes.append(f"driver={driver!r} is unknown. Pass {known}, or an object such as gpipe.Threads().")
        return Threads()
    n = driver.intra_op_threads
    mistakes.check(is_count(n), f"intra_op_threads={n!r} is invalid. Pass an integer of at least 1{int_remedy(n)}.")
    if isinstance(driver, Processes) and not isinstance(driver.survive, bool):
        mistakes.append(f"survive={driver.survive!r} is invalid. Pass True or False.")
    return driver


def _read_execution(arguments: Arguments, mistakes: Mistakes) -> Driver:
    """Checks the number of micro-batches (M) and the arguments that determine how ranks run. Returns the driver."""
    m = arguments.micro_batches
    mistakes.check(is_count(m), f"micro_batches={m!r} is invalid. Pass M, an integer of at least 1{int_remedy(m)}.")
    driver, mesh, norm = read_driver(arguments, mistakes), arguments.mesh, arguments.batch_norm
    if arguments.driver is None and mesh is None and not is_joined():
        if launched := several_without_group(os.environ):
            mistakes.append(f"driver= is missing: {launched}")
    elif arguments.driver is None and mesh is None and (size := world_size()) > 1:
        mistakes.append(
            f"driver= is missing, but torch.distributed has {size} processes. Pass driver='process' for one pipe "
            f"over all processes, or driver='threads' for a separate pipe in each process."
        )
    if mesh is not None and not isinstance(driver, Processes):
        mistakes.append(f"driver={driver.name!r} uses one process, but mesh= is for several. Remove one argument.")
    for name, value, known in (("batch_norm", norm, BatchNorm), ("balance", arguments.balance, Balance)):
        choices = get_args(known)
        mistakes.check(value in choices, f"{name}={value!r} is unknown. Pass one of {', '.join(map(repr, choices))}.")
    if isinstance(driver, Processes) and driver.survive is True:
        mistakes.check(mesh is None, "survive=True does not support mesh=. Remove mesh=.")
        message = "survive=True does not support batch_norm='synchronized'. Use batch_norm='deferred'."
        mistakes.check(norm != "synchronized", message)
        message = "survive=True: measured costs differ per replica. Pass plan=, or partitions=[...] without sample=."
        mistakes.check(not arguments.measures_time, message)
    return driver


def _check_costs(
    arguments: Arguments, layers: int, is_spread: bool, traced: TracedModel | None, mistakes: Mistakes
) -> None:
    """Adds a message if `costs=` is invalid or cannot be measured.

    `is_spread` is True if no process holds all layers.
    """
    costs = arguments.costs
    is_name, needs_run = isinstance(costs, str), arguments.measures_time or callable(costs)
    if callable(costs) or (is_name and costs in ("time", "flops")):
        message = f"costs={costs if is_name else 'a function'!r} requires sample=. Pass an example mini-batch."
        mistakes.check(arguments.sample is not None, message)
    elif isinstance(costs, Sequence) and not is_name:
        message = f"costs= has {len(costs)} numbers for {layers} layers. Pass one number per layer."
        mistakes.check(not layers or len(costs) == layers, message)
        for index, cost in enumerate(costs):
            valid = isinstance(cost, (int, float)) and 0 <= cost < float("inf")
            mistakes.check(valid, f"costs[{index}]={cost!r} is invalid. Pass a finite number of at least 0.")
            is_float = not isinstance(cost, int) or cost <= sys.float_info.max
            mistakes.check(is_float, f"costs[{index}] is too large for a float. Use larger units.")
    else:
        message = f"costs={costs!r} is invalid. Pass one number per layer, 'params', 'time', 'flops' or a function."
        mistakes.check(costs is None or (is_name and costs == "params"), message)
    message = "costs= cannot be measured, because no process has all layers. Remove sample=, or pass plan=."
    mistakes.check(not (is_spread and needs_run), message)
    if traced is not None:
        mistakes.check(
            costs != "flops", "costs='flops' needs a list of layers. For a model, use costs='time' or 'params'."
        )
        message = "costs= cannot be measured, because the model is on the meta device. Pass costs=[...] or 'params'."
        mistakes.check(costs is None or not needs_run or not traced.lacks_values, message)


def _one_for_each(name: str, value: object, count: int, places: str, mistakes: Mistakes) -> list[Any]:
    """Returns `value` as a list of `count` entries, and repeats a single value. A `count` of 0 means unknown."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    values = list(value) if several else [value] * max(count, 1)  # type: ignore[call-overload]  # just checked
    message = f"{name}= has length {len(values)}, but there are {count} {places}. Pass one entry for each."
    mistakes.check(not count or len(values) == count, message)
    return values


def _read_remat(arguments: Arguments, stages: int, ranks: int, mistakes: Mistakes) -> RematOf:
    """Returns the recomputation mode of each stage. Returns "always" for modes that the plan determines later."""
    remat, memory = arguments.remat, arguments.memory
    if arguments.schedule == AUTO:
        message = f"remat={remat!r}: schedule='auto' chooses remat. Remove remat=, or pass gpipe.Remat(memory=...)."
        mistakes.check(arguments.fits_remat or remat == PLAN_DEFAULTS["remat"], message)
    if memory is not None or (arguments.fits_remat and arguments.schedule != AUTO):
        message = f"remat={remat!r} requires sample= to count activation memory. Pass an example mini-batch."
        mistakes.check(arguments.sample is not None, message)
    if memory is not None:
        limits = _one_for_each("memory", memory, ranks, "partitions", mistakes)
        valid = all(isinstance(it, (int, float)) and not isinstance(it, bool) and it > 0 for it in limits)
        mistakes.check(valid, f"memory={memory!r} is invalid. Pass a positive number of bytes, or one per partition.")
    if arguments.fits_remat or arguments.schedule == AUTO:
        return tuple[lower.Remat, ...](["always"]) * stages
    modes = _one_for_each("remat", remat, stages, "stages", mistakes)
    known = ", ".join(map(repr, lower.REMATS))
    mistakes.check(
        all(mode >= 0 if type(mode) is int else mode in lower.REMATS for mode in modes),
        f"remat={remat!r} is unknown. Pass one of {known}, the number of micro-batches that may keep their "
        f"activations at the same time, a list with one such entry for each stage, or 'auto'.",
    )
    return tuple(modes)


def _read_weights(arguments: Arguments, schedule: Schedule, driver: Driver, mistakes: Mistakes) -> int | None:
    """Returns the number of stages of a rank that are loaded at once, or None if weights stay on the device."""
    weights, remat = arguments.weights, arguments.remat
    mistakes.check(weights in ("device", "host"), f"weights={weights!r} is unknown. Pass 'device' or 'host'.")
    if weights != "host":
        return None
    message = (
        "weights='host' requires schedule=gpipe.BreadthFirst(stages=...). Other schedules need each stage often."
    )
    is_named = isinstance(arguments.schedule, BreadthFirst)  # Its numbers may be wrong, which is a different mistake.
    mistakes.check(is_named or schedule.name == "breadth_first", message)
    message = f"weights='host' does not support remat={remat!r}. Use remat='always' or remat='offload_inputs'."
    modes = {remat} if isinstance(remat, (str, int, Remat)) else {*_listed(remat)}
    mistakes.check(modes <= {"always", "offload_inputs"}, message)
    survives = isinstance(driver, Processes) and driver.survive is True
    mistakes.check(not survives, "weights='host' does not support survive=True. Remove one of them.")
    requested = arguments.schedule
    return requested.resident if isinstance(requested, BreadthFirst) else BreadthFirst.resident


def _check_slices(arguments: Arguments, traced: TracedModel | None, mistakes: Mistakes) -> None:
    """Adds a message for each argument that cannot be combined with slices of a sequence."""
    schedule, norm = f"schedule={arguments.schedule!r}", arguments.batch_norm
    message = f"{schedule} requires a causal language model of transformers. Pass such a model with sample=."
    mistakes.check(traced is not None, message)
    message = f"{schedule}: gpipe does not count the memory of slices. Pass an explicit remat= for each stage."
    mistakes.check(not arguments.fits_remat, message)
    mistakes.check(norm == "micro", f"{schedule} does not support batch_norm={norm!r}. Remove batch_norm=.")


def _read_devices(
    devices: object, ranks: int, position: Position | None, mistakes: Mistakes
) -> tuple[torch.device, ...]:
    """Returns the device of each rank. With several processes, every entry is the device of this process."""
    if position is not None:
        message = "devices= is only for one process. Remove it: each process uses the device of mesh= or LOCAL_RANK."
        mistakes.check(devices is None, message)
        return (position.device,) * ranks
    if devices is None:
        available = accelerators() or [CPU]
        return tuple(available[rank % len(available)] for rank in range(ranks))
    items = _one_for_each("devices", devices, ranks, "partitions", mistakes)
    return tuple(device for item in items if (device := _read_device(item, mistakes)) is not None)


def _read_device(item: Any, mistakes: Mistakes) -> torch.device | None:
    try:
        device = torch.device(item)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("tensors on it have no values. Use gpipe.find_plan, which needs none.")
    except Exception as error:  # torch raises many types.
        reason, *_ = str(error).split("\n")
        mistakes.append(f"device {item!r} cannot be used: {reason}")
        return None
    return numbered(device)


def read_schedule(arguments: Arguments, mistakes: Mistakes) -> Schedule:
    """Returns the schedule with a cache for its action lists. Returns fill-drain if `schedule=` is invalid."""
    requested = arguments.schedule
    schedule = SCHEDULES["gpipe"]
    try:
        match requested:
            case Program():
                schedule = schedule_of_program(requested)
            case Interleaved() | BreadthFirst() | Sliced():
                schedule = schedule_of(requested)
            case str() if requested in SCHEDULES:
                schedule = SCHEDULES[requested]
            case _ if callable(requested):
                schedule = schedule_of_function(requested, arguments.micro_batches)
            case _ if requested != AUTO:
                known = ", ".join(map(repr, [*SCHEDULES, AUTO]))
                mistakes.append(
                    f"schedule={requested!r} is unknown. Pass one of {known}, a Program, or a function of K and M "
                    f"that returns a Program."
                )
    except ScheduleError as error:
        mistakes.append(f"schedule: {error}")
    except ValueError as error:
        mistakes += str(error).splitlines()
    return schedule.once()


def count_ranks(arguments: Arguments, schedule: Schedule) -> int:
    """Returns the number of ranks (K), or 0 if the arguments do not determine it."""
    partitions, stages_per_rank = arguments.partitions, schedule.stages_per_rank
    if isinstance(partitions, int):
        return partitions if is_count(partitions) else 0
    stages = len(partitions) if isinstance(partitions, Sequence) and not isinstance(partitions, str) else 0
    if stages_per_rank:
        return 0 if stages % stages_per_rank else stages // stages_per_rank

    def fits(ranks: int) -> bool:
        try:
            return len(schedule.placement(ranks, 0) or ()) == stages
        except Exception:  # The user's function need not return a program for every K.
            return False

    return next(filter(fits, range(stages, 0, -1)), 0)


def _read_placement(arguments: Arguments, schedule: Schedule, layers: int, mistakes: Mistakes) -> Placement:
    """Returns the rank of each stage, or () if the arguments are invalid. `layers` is 0 if it is unknown."""
    partitions, m = arguments.partitions, arguments.micro_batches
    ranks, stages_per_rank = count_ranks(arguments, schedule), schedule.stages_per_rank
    if arguments.schedule == AUTO:
        message = f"partitions={partitions!r}: schedule='auto' chooses the split points. Pass partitions=K."
        mistakes.check(isinstance(partitions, int), message)
    if not _are_counts(partitions, ranks, stages_per_rank, layers, mistakes):
        return ()
    stages = ranks * max(stages_per_rank, 1)
    if layers and stages > layers:  # Checked here so that no table of this size is built.
        message = (
            f"partitions={partitions} has {stages} stages, but there are only {layers} layers. Use fewer stages."
        )
        mistakes.append(message)
        return ()
    try:
        placement = schedule.placement(ranks, stages_per_rank)
    except ValueError as error:  # The user's function may raise a ValueError.
        mistakes.append(f"schedule: {error}")
        return ()
    count = m * schedule.slices if is_count(m) else 0
    if placement is None:
        mistakes.append(f"schedule= has no placement for partitions={ranks}. Pass a Program with {ranks} ranks.")
    elif count > MAX_MICRO_BATCHES:
        mistakes.append(too_many_micro_batches(count))
    elif count and schedule.slices == 1 and not schedule.table(placement, m):
        mistakes.append(no_table(schedule, placement, m))
    return placement or ()


def _are_counts(partitions: Any, ranks: int, stages_per_rank: int, layers: int, mistakes: Mistakes) -> bool:
    """Returns whether `partitions=` is a valid number of ranks or list of layer counts for the schedule."""
    if isinstance(partitions, Sequence) and not isinstance(partitions, str) and partitions:
        counts = list(partitions)
        message = f"partitions={counts} has an invalid number of layers. Pass integers of at least 1."
        if mistakes.check(all(map(is_count, counts)), message):
            message = f"partitions={counts} has {sum(counts)} layers, but the model has {layers}. Adjust the numbers."
            mistakes.check(not layers or sum(counts) == layers, message)
        if ranks:
            return True
        place = f"needs a multiple of {stages_per_rank}" if stages_per_rank else "is for a different number"
        mistakes.append(f"partitions={counts} has {len(counts)} stages, but schedule= {place}. Change one argument.")
        return False
    is_array = isinstance(partitions, (set, np.ndarray, torch.Tensor))
    remedy = ", as a list of ints" if is_array else int_remedy(partitions)
    message = f"partitions={partitions!r} is invalid. Pass K (at least 1), or the layers of each partition{remedy}."
    return mistakes.check(is_count(partitions), message)
