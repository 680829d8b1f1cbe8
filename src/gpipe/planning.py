"""`find_plan`: the fastest way to train a network on given devices, found without them."""

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
from typing import Any

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

REMAT = "remat={remat!r} is for cuts by balance=; leave it out, and it is found"
DEVICES = "give gpipe.Device objects, or how many of this machine, at least 1"
COUNTED_ROWS, MEASURED_SHARES = (2, 4), (16, 4)
"""Rows of the micro-batches that are counted, if the sample has so many, and from which all others are told. Where
seconds are measured and M is not settled, they are these shares of the sample, if those have more rows."""
CPU_FLOPS_PER_SECOND, GPU_FLOPS_PER_SECOND = 5e10, 5e13
"""What a CPU core and an accelerator here are taken to do in a second; whoever knows better gives `Device`s."""
RACE_SECONDS, HEATS, TURNS = 20.0, 4, 3
"""How long plans run in turns at most. Of so many heats the first has so many turns, each other twice as many for the
better half of them; fewer plans begin with a later heat."""
PLAIN, EACH = "1f1b", 3
"""The schedule whose plans run beside those that should be fastest, and how many of each number of ranks."""


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
) -> Plan:
    """Finds the fastest way to train a network on devices that it fits on: K, M, cuts, schedule and remat.

    Nothing runs on an accelerator, and without `measure` nothing is computed at all: floating-point operations and
    bytes are counted, and layers may be on the meta device. What counts is matrix products, convolutions,
    attention and LSTMs; data loading and the weight update are left out.

    Args:
        model: What `gpipe.GPipe` takes: layers, callables that build one, or any module.
        sample: An example mini-batch of inputs; 4 rows or more tell fixed costs from those of each row. None if the
            `costs` need none.
        devices: In the order in which they are linked; or how many of this machine: its accelerators, else CPU cores
            that share its memory.
        global_batch: The rows of a mini-batch; by default those of the sample.
        partitions: K, if it is settled; with `balance`, also the number of layers of each stage.
        micro_batches: M, if it is settled; else a micro-batch has at least 2 rows where there is a BatchNorm.
        schedule: By name, if it is settled; or `"auto"`: beside those by name, tables are searched for.
        remat: What to recompute, as `gpipe.GPipe` takes it, with `balance`; else it is found.
        costs: What each layer costs, for M micro-batches that are settled: one number a layer, of its forward and
            backward; a function of a layer and its sample input; `"time"`, seconds of forward, recompute and
            backward; `"flops"`, of layers, not of a model; or `"params"`. `pipe.costs` of another pipe gives the
            same cuts.
        balance: Cuts by what layers cost, and searches for nothing else, as `gpipe.GPipe` does without a plan: K and
            M are settled, and so are the schedule, by default `"gpipe"`, and `remat`, by default `"always"`.
            `"variance"`, the paper's: least sum of squared differences from the mean; or `"minmax"`, the fastest
            slowest partition. Both exact; where ranks have several stages, the cuts near them with which a step is
            predicted to be fastest. Default: None, all of this is searched for.
        measure: Take the seconds of each layer on this machine for those on the first device, and on others by
            `flops` in proportion. Where `devices` is a number of CPU cores, so many threads are measured at once, or
            K, if it is settled; and of layers, if the sample is a whole mini-batch, steps of the plans that should be
            fastest, and of some of one rank, are run in turns, for 20 seconds at most: the fastest is taken.
            Of this machine's devices it is also measured how fast what is inside goes to the host and back: it is
            offloaded where that takes less than to recompute it.
        intra_op_threads: CPU threads that one operation may use, where seconds are measured.
        optimizer_numbers: How many numbers the optimizer keeps of each that it trains: Adam keeps 2.

    Returns:
        The plan: `gpipe.GPipe(model, plan=plan)` trains by it, `plan.explain()` says what it is and why.

    Raises:
        ValueError: Nothing fits, and how near the nearest comes; or an argument cannot be.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Linear(64, 64) for _ in range(4)]
    >>> devices = [Device(memory=2**20, flops=1e9)] * 2
    >>> plan = find_plan(layers, torch.zeros(8, 64), devices, schedule="1f1b")
    >>> plan.partitions, plan.micro_batches, plan.layers_per_partition, plan.remat
    (2, 8, (2, 2), ('never', 'never'))
    """
    if balance is not None or costs is not None:
        how: dict[str, Any] = {"schedule": schedule or "gpipe", "remat": "always" if remat is None else remat}
        driver = Threads(intra_op_threads)
        asked = Arguments(model, partitions, micro_batches, plain(sample), driver=driver, costs=costs, seed=0, **how)
        if balance is None and remat is not None:
            raise ValueError(REMAT.format(remat=remat))
        if measure and costs is not None:
            raise ValueError("measure=True and costs= both say what layers cost; leave one of them out")
        plan = _plan_by_costs(asked, devices, balance, schedule)
        given = sample if isinstance(sample, MicroBatches) else [] if sample is None else [sample]
        return replace(plan, global_batch=global_batch or sum(map(count_rows, given)))
    choices = Choices(_only(partitions), _only(micro_batches), _only(schedule))
    rows = count_rows(sample)
    batch = rows if global_batch is None else global_batch
    count = len(devices) if isinstance(devices, Sequence) else devices if is_count(devices) else math.inf
    wrong = [
        *_wrong_devices(devices),
        *choices.mistakes(count, batch),
        *_wrong_others(measure, intra_op_threads, optimizer_numbers, remat),
        *(_unmeasurable(model, sample) if measure is True else ()),
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    here = devices if isinstance(devices, Sequence) else _devices_here(devices)
    sample = plain(sample)
    layers, names, taken = _read(model, sample, measure)
    some = [_about(size, sample) for size in _sizes(rows, batch, micro_batches, measure)]
    samples = {count_rows(part): taken(part) for part in some}
    parts = schedule in (None, AUTO) or splits(str(schedule))
    profiled = partial(profile_layers, layers, samples, names, optimizer_numbers=optimizer_numbers, parts=parts)
    choices = replace(choices, least_rows=_least_rows([*layers, model]))
    if not measure:
        return search(profiled(), here, batch, choices)
    device = (accelerators() or [CPU])[0]
    if isinstance(devices, int):
        here = list(map(partial(replace, host=measure_host(device)), here))
    at_once = (choices.partitions or (len(here),))[0] if isinstance(devices, int) else 1
    with as_in_training(device, intra_op_threads):
        profile = profiled(measured_on=device, at_once=at_once)
    plan = search(profile, here, batch, choices)
    if device != CPU or not isinstance(devices, int):
        return plan
    if taken is _as_it_is and batch == rows:
        rivals = _rivals(plan, choices, partial(search, profile, here, batch))
        plan = _race(rivals, layers, sample, intra_op_threads)
    with as_in_training(device, at_once * intra_op_threads):
        took = measure_seconds(layers, taken(sample), device)
    return replace(plan, plain_seconds=batch / rows * sum(layer.forward + layer.backward for layer in took))


def _plan_by_costs(asked: Arguments, devices: int | Sequence[Device], balance: Balance | None, schedule: Any) -> Plan:
    """StageSizes, or searches for a plan, by what layers cost where M is settled."""
    if wrong := [*_wrong_devices(devices)]:
        raise ValueError("\n".join(wrong))
    count = devices if isinstance(devices, int) else len(devices)
    asked = replace(asked, partitions=count if asked.partitions is None else asked.partitions)
    if balance is not None:
        asked = replace(asked, balance=balance)
    builds = asked.measures_time or callable(asked.costs)
    settings, placement, remat = read(asked, builds=builds)
    if balance is not None:
        _, plan = make_plan(asked, settings, placement, remat)
        return plan.timed()
    here = _devices_here(devices) if isinstance(devices, int) else devices
    paper = [replace(device, flops=device.flops / here[0].flops) for device in here]  # seconds are those of the first
    choices = Choices(_only(asked.partitions), (asked.micro_batches,), _only(schedule))
    if wrong := [*choices.mistakes(count, asked.micro_batches)]:
        raise ValueError("\n".join(wrong))
    try:
        plan = search(read_profile(asked, settings), paper, asked.micro_batches, choices)
    except OverflowError:
        raise ValueError("costs= in seconds exceed the largest number: take larger units") from None
    by = plan.costs_by if plan.measured else costs_by(asked.costs)
    return replace(plan, counted=asked.sample is not None, costs_by=by)


def _only(settled: Any) -> tuple[Any, ...] | None:
    """What there is to choose from, if it is settled; else anything."""
    return None if settled is None else (settled,)


def _wrong_devices(devices: object) -> Iterator[str]:
    if isinstance(devices, Device):
        yield f"devices={devices!r}; give a list: [gpipe.Device(...)] * 4"
    elif isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        for other in dict.fromkeys(repr(device) for device in devices if not isinstance(device, Device)):
            yield f"devices has {other}; give gpipe.Device objects: memory, flops and link are what is planned for"
    elif not is_count(devices):
        yield f"devices={devices!r}; {DEVICES}{int_remedy(devices)}"


def _wrong_others(measure: object, threads: object, optimizer_numbers: object, remat: object) -> Iterator[str]:
    if remat is not None:
        yield REMAT.format(remat=remat)
    if not isinstance(measure, bool):
        yield f"measure={measure!r}; give True or False"
    if not is_count(threads):
        yield f"intra_op_threads={threads!r}; give a whole number of at least 1{int_remedy(threads)}"
    is_number = isinstance(optimizer_numbers, (int, float)) and not isinstance(optimizer_numbers, bool)
    if not is_number or not 0 <= optimizer_numbers < math.inf:  # type: ignore[operator]  # a number
        yield (
            f"optimizer_numbers={optimizer_numbers!r}; give how many numbers the optimizer keeps of each that it "
            "trains: Adam 2, SGD with momentum 1, without 0"
        )


def _unmeasurable(model: Any, sample: Tree) -> Iterator[str]:
    if any(tensor.is_meta for tensor in tensors_in(sample)):
        yield "measure=True runs the sample, which is on the meta device; give one with numbers"
    parts = model if isinstance(model, Sequence) else [model]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    if any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers())):
        why = "measure=True runs the layers, of which some are on the meta device; give layers with numbers"
        yield f"{why}, callables that build them, or leave measure out, to have operations counted"


def _least_rows(parts: Sequence[object]) -> int:
    """Of a micro-batch: those of one row may have no variance."""
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    return 2 if any(isinstance(module, AnyBatchNorm) and module.training for module in modules) else 1


def _sizes(rows: int, batch: int, micro_batches: int | None, measure: bool) -> set[int]:
    """The rows of the micro-batches that are run: where seconds are measured about as many as there will be."""
    if not measure:
        return set(COUNTED_ROWS)
    if micro_batches is not None:
        return {batch // micro_batches}
    return {max(least, rows // share) for least, share in zip(COUNTED_ROWS, MEASURED_SHARES, strict=True)}


def _about(size: int, sample: Tree) -> Tree:
    """The first micro-batch of the sample, of about so many rows, or all that it has."""
    return first_micro_batch(sample, max(1, count_rows(sample) // size))


def _read(model: Any, sample: Tree, measure: bool) -> tuple[Sequence[nn.Module], list[str], Callable[[Tree], Tree]]:
    """The layers, their names, and what the first takes of a micro-batch."""
    traced = read_model(model, _about(TWO_ROWS, sample))
    if traced is not None:
        return traced.alone(), list(traced.layers), traced.first_state
    if wrong := why_not_layers(model):
        raise ValueError("\n".join(wrong))
    if measure:
        named, wrong = build_layers(model, seed=0)
    else:
        found = build_on_meta(model, seed=0)
        named, wrong = found.layers, found.mistakes
    if wrong or not named:
        raise ValueError("\n".join(wrong or ["there are no layers; give at least one"]))
    return list(named.values()), list(named), _as_it_is


def _as_it_is(part: Tree) -> Tree:
    return part


def _rivals(plan: Plan, choices: Choices, find: Callable[[Choices], Plan]) -> list[Plan]:
    """The plan, those next to it and, by a plain schedule, of its rank count and of one: best of each first."""
    name = PLAIN if choices.schedules in (None, (AUTO,)) else plan.schedule
    groups = [[plan, *plan.alternatives]]
    for ranks in {plan.partitions, 1} & {*(choices.partitions or (plan.partitions, 1))}:
        plain = replace(choices, partitions=(ranks,), schedules=(name,))
        found = list[Plan]()
        for shape in plain.shapes(ranks, plan.global_batch, len(plan.names)):
            with suppress(ValueError):  # it does not fit
                found.append(find(replace(plain, micro_batches=(shape.micro_batches,))))
        groups.append(sorted(found, key=lambda plan: plan.seconds)[:EACH])
    by_turns = [each for each in chain.from_iterable(zip_longest(*groups)) if each is not None]
    most = max(2, int(RACE_SECONDS / (1 + TURNS) / plan.seconds))
    return list({each.shape: each for each in by_turns}.values())[:most]


def _race(plans: Sequence[Plan], layers: Sequence[nn.Module], sample: Tree, threads: int) -> Plan:
    """The plan whose steps are fastest where all take turns in an order drawn anew, and then the others.

    What others do on this machine meanwhile is so alike for all. Their costs are made to add up to what was measured.
    """
    took: list[list[float]] = [[] for _ in plans]
    running, chance = list(range(len(plans))), random.Random(0)
    with _unheard(), as_in_training(CPU, threads), ExitStack() as stack:
        stack.enter_context(untouched(*layers))
        make = partial(GPipe, layers, seed=0, driver=Threads(threads))
        pipes = [stack.enter_context(make(plan=plan)) for plan in plans]
        for pipe in pipes:
            _seconds_of_step(pipe, sample)  # the first looks more closely at what layers do
        end = time.perf_counter() + RACE_SECONDS
        while len(running) > 1 or not took[running[0]]:
            heats = (len(running) - 1).bit_length() or HEATS
            for _ in range(max(1, TURNS << HEATS >> heats)):
                for at in chance.sample(running, len(running)):
                    took[at].append(_seconds_of_step(pipes[at], sample))
                if time.perf_counter() > end:
                    break
            running = sorted(running, key=lambda at: median(took[at]))[: -(-len(running) // 2)]
    fastest = running[0]
    best = took[fastest]
    ratios = [max(1.0, median(map(truediv, each, best))) for each in took]  # of the turns that both took
    raced = [_lasting(plan, ratio * median(best)) for plan, ratio in zip(plans, ratios, strict=True)]
    first = raced.pop(fastest)
    others = sorted(raced, key=lambda plan: plan.seconds)[:EACH]
    return replace(first, alternatives=tuple(others), rejected=plans[0].rejected)


def _seconds_of_step(pipe: GPipe, sample: Tree) -> float:
    start = time.perf_counter()
    pipe.step(sample, None, _any_loss, reduction="sum")
    seconds = time.perf_counter() - start
    pipe.zero_grad()
    return seconds


def _any_loss(output: Tree, target: object) -> Tensor:
    """A number of which all that wants a gradient is part."""
    wanting = (tensor.sum().abs() for tensor in tensors_in(output) if tensor.requires_grad)
    return sum(wanting, torch.zeros((), requires_grad=True))


def _lasting(plan: Plan, seconds: float) -> Plan:
    """The plan with costs that add up to so many seconds."""
    longer = seconds / plan.seconds
    least = None if plan.least_seconds is None else longer * plan.least_seconds
    costs = tuple(cost.divided_by(1 / longer) for cost in plan.costs)
    found = replace(plan, costs=costs, work=tuple(longer * work for work in plan.work), least_seconds=least)
    return replace(found, seconds=found.simulation.timeline.seconds)


@contextmanager
def _unheard() -> Iterator[None]:
    """Inside, pipes do not tell what they find: whoever trains is told by the pipe that does."""
    logger = logging.getLogger("gpipe")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _devices_here(count: int) -> list[Device]:
    """So many devices of this machine, of which several ranks may share one."""
    there = accelerators()
    if not there:
        return [Device(memory_of(CPU) / count, CPU_FLOPS_PER_SECOND, name="cpu")] * count
    found = []
    for index in (rank % len(there) for rank in range(count)):
        device, ranks = there[index], len(range(index, count, len(there)))
        found.append(Device(memory_of(device) / ranks, GPU_FLOPS_PER_SECOND / ranks, name=name_of(device)))
    return found
