"""The floor of processes: K of them, a place in shared memory for each micro-batch, and a pipe that wakes.

Nothing else, as in `floor`. The receiver works on the shared memory itself, so each tensor is copied once.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.floor import Stage, Value, tensors
from bench.setup import Setup

ALIGNMENT = 64  # bytes: a cache line


class Bell:
    """One process rings it, another waits."""

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):  # made by the other
            os.mkfifo(path)
        self.pipe = os.open(path, os.O_RDWR)
        self.heard = 0

    def ring(self) -> None:
        """Wakes who waits, or will wait."""
        os.write(self.pipe, b"!")

    def wait(self) -> None:
        """Waits for the next ring."""
        if not self.heard:
            self.heard = len(os.read(self.pipe, 64))  # those that came meanwhile with it
        self.heard -= 1


class Slots:
    """A line through shared memory, with a place for each micro-batch.

    A place is filled again one step later. By then nobody looks at it: the first stage begins when it has all
    gradients of the step before, the last of them made of what lay in the place that it fills first.
    """

    def __init__(self, path: Path, like: Sequence[Tensor], micro_batches: int) -> None:
        """Opens the line at `path`, made by whoever comes first, for tensors of these shapes and dtypes."""
        shared = [_places(path.with_suffix(f".{at}"), one, micro_batches) for at, one in enumerate(like)]
        self.places = list(zip(*shared, strict=True))
        self.bell = Bell(path)
        self.at = -1

    def put(self, item: Sequence[Tensor | None]) -> None:
        """Copies it to the next place; no gradient is one of zeros."""
        self.at = (self.at + 1) % len(self.places)
        for place, tensor in zip(self.places[self.at], item, strict=True):
            if tensor is None:
                place.zero_()
            else:
                place.copy_(tensor.detach())
        self.bell.ring()

    def get(self) -> tuple[Tensor, ...]:
        """Waits for the next place to be filled."""
        self.at = (self.at + 1) % len(self.places)
        self.bell.wait()
        return self.places[self.at]


class Values:
    """Slots for what flows forward: one tensor, or several."""

    def __init__(self, path: Path, like: Value, micro_batches: int) -> None:
        self.slots = Slots(path, tensors(like), micro_batches)
        self.several = isinstance(like, tuple)

    def put(self, item: Value) -> None:
        """Copies it to the next place."""
        self.slots.put(tensors(item))

    def get(self) -> Value:
        """Waits for the next."""
        found = self.slots.get()
        return found if self.several else found[0]


def _places(path: Path, like: Tensor, many: int) -> list[Tensor]:
    size = like.numel() * like.element_size()
    room = -(-size // ALIGNMENT) * ALIGNMENT
    memory = torch.from_file(str(path), shared=True, size=room * many, dtype=torch.uint8)
    return [memory[at * room : at * room + size].view(like.dtype).view(like.shape) for at in range(many)]


class BareProcesses:
    """The floor, of processes."""

    def prepare(self, setup: Setup) -> None:
        """Builds the own stage and the lines to its neighbours."""
        torch.set_num_threads(1)
        self.setup = setup
        inputs, targets = setup.work.data()
        if len(inputs) % setup.micro_batches:
            raise ValueError(f"{len(inputs)} rows in {setup.micro_batches} micro-batches: the floor needs equal ones")
        self.inputs = inputs.tensor_split(setup.micro_batches)
        self.targets = targets.tensor_split(setup.micro_batches)
        layers, own = setup.work.layers(), range(sum(setup.cuts[: setup.rank]), sum(setup.cuts[: setup.rank + 1]))
        self.parts = [nn.Sequential(OrderedDict((str(at), layers[at]) for at in own))]
        self.stage = self._stage(boundaries(setup, self.inputs[0]))
        self.here = Bell(self._at("here"))
        self.go = [Bell(self._at(f"go-{rank}")) for rank in range(setup.world)]

    def _stage(self, flows: Sequence[Value]) -> Stage:
        rank, many = self.setup.rank, self.setup.micro_batches
        values = [Values(self._at(f"values-{at}"), like, many) for at, like in enumerate(flows)]
        gradients = [Slots(self._at(f"gradients-{at}"), tensors(like), many) for at, like in enumerate(flows)]
        first, last = rank == 0, rank == len(flows)
        return Stage(
            self.parts[0],
            self.setup.work.loss_fn,
            None if first else values[rank - 1],
            None if last else values[rank],
            None if first else gradients[rank - 1],
            None if last else gradients[rank],
        )

    def _at(self, name: str) -> Path:
        return Path(self.setup.meeting).with_name(name)

    def step(self) -> None:
        """Runs this process's part of one mini-batch."""
        run = self.stage.run_with_remat if self.setup.remat else self.stage.run
        run(self.inputs, self.targets)

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients of the own stage by name."""
        return {name: p.grad for name, p in self.parts[0].named_parameters() if p.grad is not None}

    def barrier(self) -> None:
        """Waits for the other processes."""
        if self.setup.rank:
            self.here.ring()
            self.go[self.setup.rank].wait()
            return
        for _ in self.go[1:]:
            self.here.wait()
        for bell in self.go[1:]:
            bell.ring()


def boundaries(setup: Setup, inputs: Tensor) -> list[Value]:
    """What flows from each stage but the last to the next; found by a run of layers that are dropped."""
    flows: list[Value] = []
    value: Value = inputs
    with torch.no_grad():
        for stage in setup.cut(setup.work.layers())[:-1]:
            value = stage(value)
            flows.append(value)
    return flows
