"""Where things are on the simulated accelerator: models, inputs, targets, and the streams of a caller."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gpipe
from gpipe._torch.accelerator import put_data
from tests.accelerator import load
from tests.support.mixed_tasks import Task
from tests.support.outcomes import Outcome
from tests.support.plain_loop import Tree, copied, tensors_in
from tests.support.random_models import Model

SIMULATOR = load()
torch.set_num_threads(1)
FIRST = torch.device("sim", 0)
DEVICES = [torch.device("sim", at) for at in range(4)]
CPU = torch.device("cpu")


class NoSuch(Exception):  # noqa: N818  # a draw that gives nothing to try
    """There is no such cut of the model drawn."""


def onto(tree: Tree, device: torch.device) -> Any:
    def there(leaf: Any) -> Any:
        if isinstance(leaf, gpipe.MicroBatches):
            return gpipe.MicroBatches([onto(part, device) for part in leaf])
        if isinstance(leaf, gpipe.Whole):
            return gpipe.Whole(leaf.tensor.to(device))
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return tree_map(there, tree)


def moved(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Moves layers, which torch cannot do where they share weights on such a device."""
    found: dict[int, Tensor] = {}

    def there(tensor: Tensor) -> Tensor:
        if tensor.device == device:  # a module that is several layers
            return tensor
        if id(tensor) not in found:
            found[id(tensor)] = copied(tensor.detach().to(device))
            if isinstance(tensor, nn.Parameter):
                put_data(tensor, found[id(tensor)])
                found[id(tensor)] = tensor
        return found[id(tensor)]

    held: list[dict[str, Any]] = [
        part for layer in layers for module in layer.modules() for part in (module._parameters, module._buffers)
    ]
    before = [tensor for part in held for tensor in part.values()]  # kept: an id stays with its tensor
    for part in held:
        part.update({name: there(tensor) for name, tensor in part.items() if tensor is not None})
    del before


@dataclass(frozen=True)
class Placed(Task):
    """A task whose inputs and targets lie on devices."""

    inputs_on: torch.device
    targets_on: torch.device

    def inputs(self, step: int) -> Tree:
        there = onto(super().inputs(step), self.inputs_on)
        return there.detach().requires_grad_(self.given == "wanting") if isinstance(there, Tensor) else there

    def targets(self, step: int) -> dict[str, Tensor]:
        return {name: tensor.to(self.targets_on) for name, tensor in super().targets(step).items()}

    def loss(self, output: Tree, target: Tree) -> Tensor:
        return super().loss(output, onto(target, tensors_in(output)[0].device))


def placed(task: Task, inputs_on: torch.device, targets_on: torch.device, model: Model | None = None) -> Placed:
    own = {name: getattr(task, name) for name in Task.__dataclass_fields__}
    return Placed(**own | {"model": model or task.model}, inputs_on=inputs_on, targets_on=targets_on)


@contextmanager
def on_streams(draw: Random) -> Iterator[None]:
    """What a caller does may be queued on streams of its own, one on each device."""
    if draw.random() < 0.5:
        yield
        return
    before = [torch.accelerator.current_stream(device) for device in DEVICES]
    own = [torch.Stream(device) for device in DEVICES]
    for stream in own:
        for other in before:
            stream.wait_stream(other)
        torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
            for other in own:
                stream.wait_stream(other)
        torch.accelerator.set_device_index(0)


def on_cpu(outcome: Outcome) -> Outcome:
    return {name: None if tensor is None else tensor.cpu() for name, tensor in outcome.items()}


def some_devices(draw: Random, ranks: int) -> list[torch.device]:
    """A device for each rank, of one to four: several ranks may have one."""
    there = DEVICES[: draw.randint(1, len(DEVICES))]
    return [draw.choice(there) for _ in range(ranks)]
