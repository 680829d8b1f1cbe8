"""What is wrong with the arguments of `find_plan`, all of it at once."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from gpipe.build.arguments import int_remedy, is_count
from gpipe.plan.search.device import Device
from gpipe.plan.search.shapes import Choices
from gpipe.values.tree import Tree, tensors_in

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
