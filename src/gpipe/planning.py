"""Finds the fastest plan to train a model on devices, without using these devices."""

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from operator import truediv
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import CPU, accelerators, memory_of, name_of
from gpipe._torch.modules import AnyBatchNorm
from gpipe.batch.microbatch import TWO_ROWS, MicroBatches, count_rows, first_micro_batch, plain
from gpipe.config.arguments import Arguments, Costs
from gpipe.config.assemble import read
from gpipe.config.make_plan import costs_by, make_plan, read_profile
from gpipe.config.options import Remat, Threads
from gpipe.errors import int_remedy, is_count
from gpipe.pipeline import GPipe
from gpipe.planner.measure import as_in_training, measure_host, measure_seconds
from gpipe.planner.other_processes import Meter
from gpipe.planner.profile import ADAM, profile_layers
from gpipe.planner.search.candidates import AUTO, Choices, splits
from gpipe.planner.search.device import Device
from gpipe.planner.search.plan import Plan
from gpipe.planner.search.search import search
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import Program
from gpipe.schedule.schedules.by_name import Named
from gpipe.stages.buffers import untouched
from gpipe.stages.remote_layers import build_on_meta
from gpipe.stages.sequence import build_layers
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.layers_of import read_model, why_not_layers

COUNTED_ROWS, MEASURED_SHARES = (2, 4), (16, 4)
"""The number of rows of the two micro-batches whose costs are counted. All other costs are derived from these two. If
seconds are measured and M is not set, the micro-batches are at least these shares (1/16 and 1/4) of the sample."""
CPU_FLOPS_PER_SECOND, GPU_FLOPS_PER_SECOND = 5e10, 5e13
"""The assumed speed of a CPU core and of an accelerator of this machine. To set other speeds, pass `Device`
objects."""
RACE_SECONDS, HEATS, TURNS = 20.0, 4, 3
"""The maximum seconds of a race between plans, its number of heats, and the steps of each plan in the first heat. In
each later heat, the better half of the plans runs twice as many steps. A race of few plans starts at a later heat."""
BASELINE, PER_GROUP = "1f1b", 3
"""The schedule whose plans take part in each race, and the maximum number of plans for each number of ranks."""


REMAT = "remat={remat!r} requires balance=. Remove remat=: the search chooses what to recompute."


def find_plan(
    model: Any,
    sample: Tree,
    devices: int | Sequence[Device],
    global_batch: int | None = None,
    *,
    partitions: int | Sequence[int] | None = None,
    micro_batches: int | None = None,
    schedule: Named | Program | None = None,
    remat: str | int | Remat | Sequence[str | int] | None = None,
    costs: Costs = None,
    balance: Balance | None = None,
    measure: bool = False,
    intra_op_threads: int = 1,
    optimizer_numbers: float = ADAM,
    weights: Literal["device", "host"] | None = None,
    host_memory: float = math.inf,
) -> Plan:
    """Returns the fastest plan that fits on devices: K, M, split points, schedule and recomputation.

    By default, operations and bytes are counted. No layer runs, no accelerator is used, and layers can be on the meta
    device. The counted operations are matrix products, convolutions, attention and LSTMs. Predictions include neither
    data loading nor the optimizer.

    Args:
        model: The model, as for `gpipe.GPipe`: layers, callables that each build a layer, or any module.
        sample: An example mini-batch of inputs. Pass at least 4 rows, to separate fixed costs from costs per row.
            Pass None if `costs` does not need a sample.
        devices: A list of `gpipe.Device`, in the order in which the devices are linked. Or the number of devices of
            this machine to use: its accelerators, otherwise CPU cores that share its memory.
        global_batch: The rows of a mini-batch. Default: the rows of the sample.
        partitions: K, the number of ranks. With `balance`, also a list with the number of layers of each stage.
            Default: found by the search, or with `costs` or `balance` the number of devices.
        micro_batches: M, the number of micro-batches. Default: found by the search, with at least 2 rows per
            micro-batch if there is a BatchNorm.
        schedule: The name of a schedule. Or `"auto"`: compares all named schedules, and also searches for a new
            schedule. With `balance`, any schedule that `gpipe.GPipe` accepts. Default: the fastest named schedule.
        remat: What to recompute, as for `gpipe.GPipe`. Only with `balance`. Default: found by the search.
        costs: The cost of each layer. Requires `micro_batches`. One of:

            - a sequence with one number per layer, for forward and backward.
            - a function of a layer and its sample input.
            - `"time"`: measured seconds of forward, recompute and backward.
            - `"flops"`: counted operations. This requires layers, not a model.
            - `"params"`: numbers of parameters.

            To reproduce the split of a different pipe, pass `pipe.costs` of that pipe. Default: counted operations.
            With `balance`, the default is `"time"`, or `"params"` without a sample.
        balance: Only balances the stages by `costs`, like `gpipe.GPipe` without a plan, for a given K and M. Then the
            default of `schedule` is `"gpipe"`, and the default of `remat` is `"always"`. One of:

            - `"variance"`: the least sum of squared differences from the mean, as in the paper.
            - `"minmax"`: the least time of the slowest stage.

            Both searches are exact. If ranks have several stages, nearby split points are chosen if they make the
            predicted step faster. Default: None, the full search.
        measure: Whether to measure the seconds of each layer on this machine, for the first device. Other devices are
            scaled by `flops`. See Note. Default: False.
        intra_op_threads: The number of CPU threads per operation, for measurements. Default: 1.
        optimizer_numbers: How many numbers the optimizer keeps for each element of a parameter. Default: 2, as for
            Adam.
        weights: Where the weights are, as for `gpipe.GPipe`. With `"host"`, the search chooses the number of stages
            per rank and of loaded stages. Requires `host` of each device. Default: on the host only if no other plan
            fits.
        host_memory: The bytes of host memory that weights, gradients, optimizer state and inputs on the host may use,
            for all devices together. Default: unlimited.

    Returns:
        The plan. Train with `gpipe.GPipe(model, plan=plan)`. `plan.explain()` describes it.

    Raises:
        ValueError: If an argument is invalid, or if no plan fits. The message then describes the plan that is closest
            to fitting.

    Note:
        If `devices` is a number, `measure=True` also

        - measures how fast activations move to host memory and back, and plans to offload activations if this is
          faster than recomputation,
        - on CPU cores, measures layers in one thread per rank at the same time,
        - on CPU cores, runs steps of the most promising plans and some plans with one rank, for at most 20 seconds.
          The fastest of these plans is returned. This requires layers, and a sample that is a whole mini-batch.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Linear(64, 64) for _ in range(4)]
    >>> devices = [Device(memory=2**20, flops=1e9)] * 2
    >>> plan = find_plan(layers, torch.zeros(8, 64), devices, schedule="1f1b")
    >>> plan.partitions, plan.micro_batches, plan.layers_per_partition, plan.remat
    (2, 8, (2, 2), ('never', 'never'))
    """
    if balance is not None or costs is not None:
        settings: dict[str, Any] = {"schedule": schedule or "gpipe", "remat": "always" if remat is None else remat}
        settings |= {"driver": Threads(intra_op_threads), "costs": costs, "seed": 0}
        if balance is None and remat is not None:
            raise ValueError(REMAT.format(remat=remat))
        if weights == "host":
            raise ValueError("weights='host' cannot be combined with balance= or costs=. Remove one of them.")
        if measure and costs is not None:
            raise ValueError("measure=True cannot be combined with costs=. Remove one of them.")
        arguments = Arguments(model, partitions, micro_batches, plain(sample), **settings)
        plan = _plan_by_costs(arguments, devices, balance, schedule)
        samples = sample if isinstance(sample, MicroBatches) else [] if sample is None else [sample]
        return replace(plan, global_batch=global_batch or sum(map(count_rows, samples)))
    fixed = _only(partitions), _only(micro_batches), _only(schedule)
    choices = Choices(*fixed, weights=weights, host_memory=host_memory)
    rows = count_rows(sample)
    batch = rows if global_batch is None else global_batch
    count = len(devices) if isinstance(devices, Sequence) else devices if is_count(devices) else math.inf
    mistakes = [
        *_invalid_devices(devices),
        *choices.mistakes(count, batch),
        *_invalid_options(measure, intra_op_threads, optimizer_numbers, remat),
        *(_not_measurable(model, sample) if measure is True else ()),
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    planned = devices if isinstance(devices, Sequence) else _devices_here(devices)
    sample = plain(sample)
    layers, names, input_of = _read(model, sample, measure)
    parts = [_first_rows(size, sample) for size in _sizes(rows, batch, micro_batches, measure)]
    samples_by_rows = {count_rows(part): input_of(part) for part in parts}
    profiled = partial(profile_layers, layers, samples_by_rows, names, optimizer_numbers=optimizer_numbers)
    profiled = partial(profiled, parts=schedule in (None, AUTO) or splits(str(schedule)))
    choices = replace(choices, least_rows=_least_rows([*layers, model]))
    if not measure:
        return search(profiled(), planned, batch, choices)
    device, meter = (accelerators() or [CPU])[0], Meter()
    if isinstance(devices, int):
        planned = list(map(partial(replace, host=measure_host(device)), planned))
    at_once = (choices.partitions or (len(planned),))[0] if isinstance(devices, int) else 1
    with as_in_training(device, intra_op_threads):
        profile = profiled(measured_on=device, at_once=at_once)
    plan = search(profile, planned, batch, choices)
    plan = replace(plan, other_cores=meter.other_cores())
    if device != CPU or not isinstance(devices, int) or plan.resident is not None:
        return plan
    if input_of is _whole and batch == rows:
        rivals = _rivals(plan, choices, partial(search, profile, planned, batch))
        plan = _race(rivals, layers, sample, intra_op_threads)
    without_gpipe = []
    for threads in {at_once * intra_op_threads, 1}:  # On a busy machine, one thread can be faster than all cores.
        with as_in_training(device, threads):
            measured = measure_seconds(layers, input_of(sample), device)
        without_gpipe.append(batch / rows * sum(layer.forward + layer.backward for layer in measured))
    return replace(plan, plain_seconds=min(without_gpipe), other_cores=meter.other_cores())


def _plan_by_costs(arguments: Arguments, devices: Any, balance: Balance | None, schedule: Any) -> Plan:
    """Returns a plan for a given M and the costs of layers: only balanced, or found by a search."""
    if mistakes := [*_invalid_devices(devices)]:
        raise ValueError("\n".join(mistakes))
    count = devices if isinstance(devices, int) else len(devices)
    arguments = replace(arguments, partitions=count if arguments.partitions is None else arguments.partitions)
    if balance is not None:
        arguments = replace(arguments, balance=balance)
    builds = arguments.measures_time or callable(arguments.costs)
    settings, placement, remat = read(arguments, builds=builds)
    if balance is not None:
        _, plan = make_plan(arguments, settings, placement, remat)
        return plan.timed()
    planned = _devices_here(devices) if isinstance(devices, int) else devices
    # Costs are seconds of the first device, so speeds are relative to it.
    planned = [replace(device, flops=device.flops / planned[0].flops) for device in planned]
    choices = Choices(_only(arguments.partitions), (arguments.micro_batches,), _only(schedule), weights="device")
    if mistakes := [*choices.mistakes(count, arguments.micro_batches)]:
        raise ValueError("\n".join(mistakes))
    try:
        meter = Meter()
        profile, other_cores = read_profile(arguments, settings), meter.other_cores()
        plan = search(profile, planned, arguments.micro_batches, choices)
    except OverflowError:
        raise ValueError("costs: the sum of the costs overflows a float. Use larger units.") from None
    source = plan.costs_by if plan.measured else costs_by(arguments.costs)
    return replace(plan, counted=arguments.sample is not None, costs_by=source, other_cores=other_cores)


def _only(value: Any) -> tuple[Any, ...] | None:
    """Returns the choices of a search: only this value, or None (all values)."""
    return None if value is None else (value,)


def _invalid_devices(devices: object) -> Iterator[str]:
    if isinstance(devices, Device):
        yield f"devices={devices!r} is a single device. Pass a list: [gpipe.Device(...)] * 4."
    elif isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        for other in dict.fromkeys(repr(device) for device in devices if not isinstance(device, Device)):
            yield f"devices contains {other}. Pass gpipe.Device objects with memory, flops and link."
    elif not is_count(devices):
        remedy = f"Pass gpipe.Device objects, or a number of devices of this machine{int_remedy(devices)}."
        yield f"devices={devices!r} is neither a list of devices nor a number. {remedy}"


def _invalid_options(measure: object, threads: object, optimizer_numbers: object, remat: object) -> Iterator[str]:
    if remat is not None:
        yield REMAT.format(remat=remat)
    if not isinstance(measure, bool):
        yield f"measure={measure!r} is not a bool. Use True or False."
    if not is_count(threads):
        yield f"intra_op_threads={threads!r} is not a number of threads. Use an integer >= 1{int_remedy(threads)}."
    is_number = isinstance(optimizer_numbers, (int, float)) and not isinstance(optimizer_numbers, bool)
    if not is_number or not 0 <= optimizer_numbers < math.inf:  # type: ignore[operator]  # it is a number
        yield (
            f"optimizer_numbers={optimizer_numbers!r} is not a finite number >= 0. Use 2 for Adam, 1 for SGD with "
            "momentum, and 0 for SGD without momentum."
        )


def _not_measurable(model: Any, sample: Tree) -> Iterator[str]:
    if any(tensor.is_meta for tensor in tensors_in(sample)):
        yield "measure=True runs the sample, which is on the meta device. Pass real tensors. [measure-on-meta]"
    parts = model if isinstance(model, Sequence) else [model]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    if any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers())):
        yield (
            "measure=True runs the layers, and some layers are on the meta device. Pass layers with values or "
            "callables that build them, or use measure=False to count operations. [measure-on-meta]"
        )


def _least_rows(parts: Sequence[object]) -> int:
    """Returns the minimum number of rows per micro-batch: BatchNorm cannot normalize a single row in training."""
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    return 2 if any(isinstance(module, AnyBatchNorm) and module.training for module in modules) else 1


def _sizes(rows: int, batch: int, micro_batches: int | None, measure: bool) -> set[int]:
    """Returns the numbers of rows of the micro-batches that are counted or measured.

    Measured micro-batches have a realistic size.
    """
    if not measure:
        return set(COUNTED_ROWS)
    if micro_batches is not None:
        return {batch // micro_batches}
    return {max(least, rows // share) for least, share in zip(COUNTED_ROWS, MEASURED_SHARES, strict=True)}


def _first_rows(size: int, sample: Tree) -> Tree:
    """Returns the first micro-batch of the sample, with about `size` rows.

    Returns the whole sample if it is smaller.
    """
    return first_micro_batch(sample, max(1, count_rows(sample) // size))


def _read(model: Any, sample: Tree, measure: bool) -> tuple[Sequence[nn.Module], list[str], Callable[[Tree], Tree]]:
    """Returns the layers, their names, and a function that converts a micro-batch to the input of the first layer."""
    traced = read_model(model, _first_rows(TWO_ROWS, sample))
    if traced is not None:
        return traced.single_layers(), list(traced.layers), traced.first_state
    if mistakes := why_not_layers(model):
        raise ValueError("\n".join(mistakes))
    if measure:
        layers, mistakes = build_layers(model, seed=0)
    else:
        outlined = build_on_meta(model, seed=0)
        layers, mistakes = outlined.layers, outlined.mistakes
    if mistakes or not layers:
        raise ValueError("\n".join(mistakes or ["model has no layers. Pass at least one layer."]))
    return list(layers.values()), list(layers), _whole


def _whole(part: Tree) -> Tree:
    return part


def _rivals(plan: Plan, choices: Choices, find: Callable[[Choices], Plan]) -> list[Plan]:
    """Returns the plans for a race: the plan, its alternatives, and baseline plans with K ranks and with one rank.

    The best plans of each group come first.
    """
    name = BASELINE if choices.schedules in (None, (AUTO,)) else plan.schedule
    groups = [[plan, *plan.alternatives]]
    for ranks in {plan.partitions, 1} & {*(choices.partitions or (plan.partitions, 1))}:
        baseline = replace(choices, partitions=(ranks,), schedules=(name,))
        plans = list[Plan]()
        for shape in baseline.shapes(ranks, plan.global_batch, len(plan.names)):
            with suppress(ValueError):  # It does not fit.
                plans.append(find(replace(baseline, micro_batches=(shape.micro_batches,))))
        groups.append(sorted(plans, key=lambda plan: plan.seconds)[:PER_GROUP])
    ordered = [plan for plan in chain.from_iterable(zip_longest(*groups)) if plan is not None]
    most = max(2, int(RACE_SECONDS / (1 + TURNS) / plan.seconds))
    return list({plan.shape: plan for plan in ordered}.values())[:most]


def _race(plans: Sequence[Plan], layers: Sequence[nn.Module], sample: Tree, threads: int) -> Plan:
    """Runs steps of all plans in turn. Returns the fastest plan, with the best other plans as alternatives.

    The order is random, so that other load on the machine affects all plans alike. The costs of the plans are scaled
    to the measured seconds.
    """
    seconds: list[list[float]] = [[] for _ in plans]
    running, rng = list(range(len(plans))), random.Random(0)
    with _without_log(), as_in_training(CPU, threads), ExitStack() as stack:
        stack.enter_context(untouched(*layers))
        make = partial(GPipe, layers, seed=0, driver=Threads(threads))
        pipes = [stack.enter_context(make(plan=plan)) for plan in plans]
        for pipe in pipes:
            _seconds_of_step(pipe, sample)  # The first step is verified, so it takes longer.
        end = time.perf_counter() + RACE_SECONDS
        while len(running) > 1 or not seconds[running[0]]:
            heats = (len(running) - 1).bit_length() or HEATS
            for _ in range(max(1, TURNS << HEATS >> heats)):
                for index in rng.sample(running, len(running)):
                    seconds[index].append(_seconds_of_step(pipes[index], sample))
                if time.perf_counter() > end:
                    break
            running = sorted(running, key=lambda index: median(seconds[index]))[: -(-len(running) // 2)]
    fastest = running[0]
    best = seconds[fastest]
    ratios = [max(1.0, median(map(truediv, each, best))) for each in seconds]  # over the turns that both ran
    scaled = [_scaled(plan, ratio * median(best)) for plan, ratio in zip(plans, ratios, strict=True)]
    winner = scaled.pop(fastest)
    others = sorted(scaled, key=lambda plan: plan.seconds)[:PER_GROUP]
    return replace(winner, alternatives=tuple(others), rejected=plans[0].rejected)


def _seconds_of_step(pipe: GPipe, sample: Tree) -> float:
    start = time.perf_counter()
    pipe.step(sample, None, _sum_of_outputs, reduction="sum")
    seconds = time.perf_counter() - start
    pipe.zero_grad()
    return seconds


def _sum_of_outputs(output: Tree, target: object) -> Tensor:
    """Returns a loss that depends on all outputs that require gradients."""
    outputs = (tensor.sum().abs() for tensor in tensors_in(output) if tensor.requires_grad)
    return sum(outputs, torch.zeros((), requires_grad=True))


def _scaled(plan: Plan, seconds: float) -> Plan:
    """Returns the plan with costs that are scaled to a total of `seconds`."""
    factor = seconds / plan.seconds
    least = None if plan.least_seconds is None else factor * plan.least_seconds
    costs, work = (
        tuple(cost.divided_by(1 / factor) for cost in plan.costs),
        tuple(factor * work for work in plan.work),
    )
    scaled = replace(plan, costs=costs, work=work, least_seconds=least)
    return replace(scaled, seconds=scaled.simulation.timeline.seconds)


@contextmanager
def _without_log() -> Iterator[None]:
    """Disables the log, so that pipes in a race do not report findings."""
    logger = logging.getLogger("gpipe")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _devices_here(count: int) -> list[Device]:
    """Returns devices of this machine.

    If there are fewer accelerators than `count`, several ranks share an accelerator.
    """
    available = accelerators()
    if not available:
        return [Device(memory_of(CPU) / count, CPU_FLOPS_PER_SECOND, name="cpu")] * count
    devices = []
    for index in (rank % len(available) for rank in range(count)):
        device, ranks = available[index], len(range(index, count, len(available)))
        devices.append(Device(memory_of(device) / ranks, GPU_FLOPS_PER_SECOND / ranks, name=name_of(device)))
    return devices
