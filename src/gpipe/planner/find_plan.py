"""`find_plan`: the fastest way to train a network on given devices, found without them.

What is wrong with the arguments of `find_plan`, all of it at once.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gpipe._torch.modules import AnyBatchNorm
from gpipe.errors import int_remedy, is_count
from gpipe.planner.measure import as_in_training, measure_seconds, memory_of
from gpipe.planner.profile import ADAM, profile_layers
from gpipe.planner.search.device import Device
from gpipe.planner.search.found import Plan
from gpipe.planner.search.search import search
from gpipe.planner.search.shapes import Choices
from gpipe.schedule.action import Kind
from gpipe.schedule.schedules.by_name import program_of
from gpipe.stages.microbatch import TWO_ROWS, count_rows, first_micro_batch
from gpipe.stages.sequence import Maker, build, build_layers, name_layers
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.layers_of import read_model, why_not_layers
from gpipe.tracing.runs import plain

DEVICES = "give gpipe.Device objects, or how many of this machine, at least 1"


def check_arguments(choices: Choices, devices: object, batch: object, **others: Any) -> None:
    """Refuses arguments that cannot be, before anything is counted.

    Args:
        choices: What is settled.
        devices: As the user gave them.
        batch: The rows of a mini-batch.
        **others: `measure`, `intra_op_threads` and `optimizer_numbers`.

    Raises:
        ValueError: Lists every mistake.
    """
    wrong = [*_wrong_devices(devices), *_wrong_choices(choices)]
    if not is_count(batch):
        wrong.append(f"global_batch={batch!r}; give the rows of a mini-batch, at least 1{int_remedy(batch)}")
    if not wrong:
        count = len(devices) if isinstance(devices, Sequence) else devices
        try:
            choices.check(count, batch)  # type: ignore[arg-type]  # checked above
        except ValueError as error:
            wrong += str(error).splitlines()
    wrong += _wrong_others(**others)
    if wrong:
        raise ValueError("\n".join(wrong))


def _wrong_devices(devices: object) -> Iterator[str]:
    if isinstance(devices, Device):
        yield f"devices={devices!r}; give a list: [gpipe.Device(...)] * 4"
    elif isinstance(devices, Sequence) and not isinstance(devices, str):
        if not devices:
            yield f"devices={devices!r}; {DEVICES}"
        for other in dict.fromkeys(repr(device) for device in devices if not isinstance(device, Device)):
            yield f"devices has {other}; give gpipe.Device objects: memory, flops and link are what is planned for"
    elif not is_count(devices):
        yield f"devices={devices!r}; {DEVICES}{int_remedy(devices)}"


def _wrong_choices(choices: Choices) -> Iterator[str]:
    for k in choices.partitions or ():
        if not is_count(k):
            yield f"partitions={k!r}; give K, a whole number of at least 1{int_remedy(k)}; find_plan finds the cuts"
    for m in choices.micro_batches or ():
        if not is_count(m):
            yield f"micro_batches={m!r}; give M, a whole number of at least 1{int_remedy(m)}"
    for name in choices.schedules or ():
        if not isinstance(name, str):
            yield f"schedule={name!r}; give the name of one, or leave it out to have the fastest"


def _wrong_others(measure: object, intra_op_threads: object, optimizer_numbers: object) -> Iterator[str]:
    if not isinstance(measure, bool):
        yield f"measure={measure!r}; give True or False"
    if not is_count(intra_op_threads):
        remedy = int_remedy(intra_op_threads)
        yield f"intra_op_threads={intra_op_threads!r}; give a whole number of at least 1{remedy}"
    number = not isinstance(optimizer_numbers, bool) and isinstance(optimizer_numbers, (int, float))
    if not number or not 0 <= optimizer_numbers < math.inf:  # type: ignore[operator]  # a number
        yield (
            f"optimizer_numbers={optimizer_numbers!r}; give how many numbers the optimizer keeps of each that it "
            "trains: Adam 2, SGD with momentum 1, without 0"
        )


def check_measurable(model: Any, sample: Tree) -> None:
    """Refuses to measure what is on the meta device.

    Raises:
        ValueError: The sample is, or layers or parts of the model are; says what to do.
    """
    wrong = []
    if any(tensor.is_meta for tensor in tensors_in(sample)):
        wrong.append("measure=True runs the sample, which is on the meta device; give one with numbers")
    modules = [model] if isinstance(model, nn.Module) else model if isinstance(model, Sequence) else ()
    held: list[Tensor] = [
        tensor
        for module in modules
        if isinstance(module, nn.Module)
        for tensor in (*module.parameters(), *module.buffers())
    ]
    if any(tensor.is_meta for tensor in held):
        wrong.append(
            "measure=True runs the layers, of which some are on the meta device; give layers with numbers, callables "
            "that build them, or leave measure out, to have operations counted"
        )
    if wrong:
        raise ValueError("\n".join(wrong))


T = TypeVar("T")
COUNTED_ROWS, MEASURED_SHARES = (2, 4), (16, 4)
"""Rows of the micro-batches that are counted, if the sample has so many, and from which all others are told. Where
seconds are measured and M is not settled, they are these shares of the sample, if those have more rows."""
CPU_FLOPS_PER_SECOND, GPU_FLOPS_PER_SECOND = 5e10, 5e13
"""What a CPU core and an accelerator here are taken to do in a second; whoever knows better gives `Device`s."""


def find_plan(
    model: Any,
    sample: Tree,
    devices: int | Sequence[Device],
    global_batch: int | None = None,
    *,
    partitions: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    blocks: Sequence[str] | None = None,
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
        sample: An example mini-batch of inputs; 4 rows or more tell fixed costs from those of each row.
        devices: In the order in which they are linked; or how many of this machine: its accelerators, else CPU cores
            that share its memory.
        global_batch: The rows of a mini-batch; by default those of the sample.
        partitions: K, if it is settled.
        micro_batches: M, if it is settled; else a micro-batch has at least 2 rows where there is a BatchNorm.
        schedule: By name, if it is settled.
        blocks: The modules between which a model is cut, as `gpipe.GPipe` takes them.
        measure: Take the seconds of each layer on this machine for those on the first device, and on others by
            `flops` in proportion. Where `devices` is a number of CPU cores, so many threads are measured at once, or
            K, if it is settled.
        intra_op_threads: CPU threads that one operation may use, where seconds are measured.
        optimizer_numbers: How many numbers the optimizer keeps of each that it trains: Adam keeps 2.

    Returns:
        The plan: `gpipe.GPipe(model, plan=plan)` trains by it, `plan.explain()` says what it is and why.

    Raises:
        ValueError: Nothing fits, and how near the nearest comes; or an argument cannot be.

    >>> from torch import nn
    >>> layers = [nn.Linear(64, 64) for _ in range(4)]
    >>> devices = [Device(memory=2**20, flops=1e9)] * 2
    >>> plan = find_plan(layers, torch.zeros(8, 64), devices, schedule="1f1b")
    >>> plan.partitions, plan.micro_batches, plan.layers_per_partition, plan.remat
    (2, 8, (2, 2), ('never', 'never'))
    """
    rows = count_rows(sample)
    batch = rows if global_batch is None else global_batch
    choices = Choices(_only(partitions), _only(micro_batches), _only(schedule))
    others = {"measure": measure, "intra_op_threads": intra_op_threads, "optimizer_numbers": optimizer_numbers}
    check_arguments(choices, devices, batch, **others)
    if measure:
        check_measurable(model, sample)
    here = devices if isinstance(devices, Sequence) else _devices_here(devices)
    sizes = _sizes(rows, batch, micro_batches, measure)
    on_cores = measure and isinstance(devices, int) and not torch.cuda.is_available()
    layers, names, samples = _read(model, plain(sample), {*sizes, rows} if on_cores else sizes, blocks, measure)
    every_row = samples[rows] if on_cores else None
    if on_cores and rows not in sizes and len(samples) > 1:
        del samples[rows]
    profiled = partial(profile_layers, layers, samples, names, optimizer_numbers=optimizer_numbers)
    choices = replace(choices, least_rows=_least_rows([*layers, model]))
    if not measure:
        return search(profiled(), here, batch, choices)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    at_once = (partitions or len(here)) if isinstance(devices, int) else 1
    with as_in_training(device, intra_op_threads):
        profile = profiled(measured_on=device, at_once=at_once, parts=_splits(schedule))
    plan = search(profile, here, batch, choices)
    if not on_cores:
        return plan
    with as_in_training(device, at_once * intra_op_threads):
        took = measure_seconds(layers, every_row, device)
    return replace(plan, plain_seconds=batch / rows * sum(layer.forward + layer.backward for layer in took))


def _only(settled: T | None) -> tuple[T, ...] | None:
    """What there is to choose from, if it is settled; else anything."""
    return None if settled is None else (settled,)


def _least_rows(parts: Sequence[object]) -> int:
    """Of a micro-batch: those of one row may have no variance."""
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    return 2 if any(isinstance(module, AnyBatchNorm) and module.training for module in modules) else 1


def _splits(schedule: str | None) -> bool:
    """Whether some backwards may be split in two."""
    if schedule is None:
        return True
    table = program_of(schedule, ranks=2, micro_batches=4)
    return any(action.kind is Kind.BACKWARD_WEIGHT for action in table.actions)


def _sizes(rows: int, batch: int, micro_batches: int | None, measure: bool) -> set[int]:
    """The rows of the micro-batches that are run: where seconds are measured about as many as there will be."""
    if not measure:
        return set(COUNTED_ROWS)
    if micro_batches is not None:
        return {batch // micro_batches}
    return {max(least, rows // share) for least, share in zip(COUNTED_ROWS, MEASURED_SHARES, strict=True)}


def _read(
    model: Any, sample: Tree, sizes: Collection[int], blocks: Sequence[str] | None, measure: bool
) -> tuple[Sequence[nn.Module], list[str], dict[int, Tree]]:
    """The layers, their names, and what the first takes of micro-batches of these sizes."""
    rows = count_rows(sample)
    parts = {count_rows(part): part for part in (_rows_of(sample, rows, wanted) for wanted in sizes)}
    replayed = read_model(model, _rows_of(sample, rows, TWO_ROWS), blocks)
    if replayed is not None:
        states = {count: replayed.begin([part]).states[0] for count, part in parts.items()}
        return replayed.alone(), list(replayed.layers), states
    if wrong := why_not_layers(model, blocks):
        raise ValueError("\n".join(wrong))
    named, wrong = build_layers(model, seed=0) if measure else name_layers(model, _build_on_meta)
    if wrong:
        raise ValueError("\n".join(wrong))
    return list(named.values()), list(named), parts


def _build_on_meta(maker: Maker, index: int) -> object:
    with torch.device("meta"):
        return build(maker, 0, index)


def _rows_of(sample: Tree, rows: int, wanted: int) -> Tree:
    """The first micro-batch of a sample, of about so many rows, or all that it has."""
    return first_micro_batch(sample, max(1, rows // wanted))


def _devices_here(count: int) -> list[Device]:
    """So many devices of this machine."""
    there = torch.cuda.device_count()
    if not there:
        return [Device(memory_of(torch.device("cpu")) / count, CPU_FLOPS_PER_SECOND, name="cpu")] * count
    return [_accelerator(rank % there, len(range(rank % there, count, there))) for rank in range(count)]


def _accelerator(index: int, ranks: int) -> Device:
    """One of this machine's, as far as it is there for each of the ranks that share it."""
    device = torch.device("cuda", index)
    return Device(memory_of(device) / ranks, GPU_FLOPS_PER_SECOND / ranks, name=torch.cuda.get_device_name(device))
