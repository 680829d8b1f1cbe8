"""The job in which faults are injected: a few training steps of a small model, one stage a rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import plain_loop, squares, weights_of
from tests.support.processes.faults import Fault, Faulty, faulty_loss, strike

FEATURES, LAYERS, MICRO_BATCHES, STEPS = 6, 8, 4, 3
ROWS = {"gpipe": 10, "torch": 8}  # torch wants micro-batches of one size
DROPOUT = {"gpipe": 0.3, "torch": 0.0}  # and draws as it comes

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Json: TypeAlias = Any


class Runtime(Protocol):
    """What runs the steps, called alike on every rank."""

    step_number: int

    def step(self, inputs: Tensor, targets: Tensor, loss_fn: LossFunction) -> Tensor | None:
        """Forward and backward of a mini-batch; the loss, where it is known."""


def faulty_layer(stage: int, partitions: int) -> int:
    """The layer of a stage in which a fault may strike: its last."""
    return (stage + 1) * (LAYERS // partitions) - 1


def build(fault: Fault, runtime: str) -> list[nn.Module]:
    """The layers, of the same weights every time."""
    with weights_of(3):
        layers: list[nn.Module] = []
        for _ in range(LAYERS // 2):
            layers += [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(DROPOUT[runtime]), nn.Tanh())]
            layers += [Faulty(FEATURES, MICRO_BATCHES)]
    if fault.layer >= 0:
        layer = layers[fault.layer]
        assert isinstance(layer, Faulty)
        layer.fault = fault
    return layers


def batch(step: int, runtime: str, length: int = 0) -> tuple[Tensor, Tensor]:
    """The mini-batch of a step: inputs and targets, each row a sequence if it has a length."""
    generator = torch.Generator().manual_seed(step)
    sizes = [2, ROWS[runtime], *([length] if length else []), FEATURES]
    made = torch.randn(*sizes, generator=generator)
    return made[0], made[1]


def loss_at(step: int, fault: Fault, runtime: str, length: int = 0) -> LossFunction:
    """The loss function of a step, in which the fault may be."""
    if fault.phase != "loss" or step != fault.step:
        return squares
    return faulty_loss(squares, fault, batch(step, runtime, length)[1].tensor_split(MICRO_BATCHES)[fault.micro_batch])


class TorchGPipe:
    """torch's own pipeline, to compare with. It is told all shapes: else it would run the layers once more."""

    def __init__(self, layers: Sequence[nn.Module], rank: int, world: int) -> None:
        size = len(layers) // world
        self.stage = nn.Sequential(*layers[rank * size : (rank + 1) * size])
        example = torch.zeros(ROWS["torch"] // MICRO_BATCHES, FEATURES, requires_grad=rank > 0)
        made = example.detach().requires_grad_()
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # takes as long to import as torch

        place = PipelineStage(self.stage, rank, world, torch.device("cpu"), input_args=example, output_args=made)
        self.loss_fn: LossFunction = squares
        self.schedule = ScheduleGPipe(place, MICRO_BATCHES, loss_fn=lambda *given: self.loss_fn(*given))
        self.is_first, self.is_last = rank == 0, rank == world - 1
        self.step_number = 0

    def step(self, inputs: Tensor, targets: Tensor, loss_fn: LossFunction) -> Tensor | None:
        self.loss_fn = loss_fn
        losses: list[Tensor] = []
        if self.is_last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step(*([inputs] if self.is_first else []))
        return torch.stack(losses).mean().detach() if losses else None


def train(rank: int, world: int, fault: Mapping[str, Any], runtime: str, retry: bool, length: int = 0) -> Json:
    """Trains; gives the losses, the rank's parameters in the end, and what went wrong if it was tried again.

    Args:
        rank: This rank.
        world: How many stages.
        fault: The fields of a `Fault`.
        runtime: `"gpipe"` or `"torch"`.
        retry: Whether to catch what a step raises, and to do the step once more without the fault.
        length: Of the sequence that each row is; 0 for none. Messages of 800 or more go through shared memory.
    """
    due = Fault(**fault)
    layers = build(due, runtime)
    parameters, pipe = make(layers, rank, world, runtime)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    if due.phase == "optimizer" and due.rank == rank:
        optimizer.register_step_pre_hook(_StrikeAt(due))
    losses: list[float | None] = []
    failure: Json = None
    for step in range(STEPS):
        if (due.phase, due.rank, due.step) == ("between", rank, step):
            strike(due.kind)
        try:
            loss = pipe.step(*batch(step, runtime, length), loss_at(step, due, runtime, length))
        except BaseException as error:
            if not retry or failure is not None:
                raise
            failure = _describe(error)
            due = _sound(due, layers)
            optimizer.zero_grad()
            pipe.step_number = step
            loss = pipe.step(*batch(step, runtime, length), squares)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss))
    return {"losses": losses, "parameters": {n: p.tolist() for n, p in parameters.items()}, "failure": failure}


def make(layers: Sequence[nn.Module], rank: int, world: int, runtime: str) -> tuple[dict[str, nn.Parameter], Runtime]:
    """What runs the steps, and the parameters of this rank under their names in the whole model."""
    if runtime == "torch":
        names = {parameter: name for name, parameter in nn.Sequential(*layers).named_parameters()}
        other = TorchGPipe(layers, rank, world)
        return {names[parameter]: parameter for parameter in other.stage.parameters()}, other
    sizes = [len(layers) // world] * world
    pipe = gpipe.GPipe(layers, sizes, MICRO_BATCHES, seed=0, driver="process")
    return dict(pipe.named_parameters()), pipe


class _StrikeAt:
    """A hook of an optimizer."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.steps = 0

    def __call__(self, *_: object) -> None:
        if self.steps == self.fault.step:
            strike(self.fault.kind)
        self.steps += 1


def _describe(error: BaseException) -> dict[str, object]:
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {"raised": time.monotonic(), "error": type(error).__name__, "told": told}


def _sound(fault: Fault, layers: Sequence[nn.Module]) -> Fault:
    for layer in layers:
        if isinstance(layer, Faulty):
            layer.fault = None
    return replace(fault, kind="", phase="")


def reference(fault: Fault, runtime: str = "gpipe", length: int = 0) -> Json:
    """What training gives without a pipeline; of faults, only one that is no failure is in it."""
    is_quiet = fault.kind == "nan" and fault.phase not in {"forward", "recompute"}
    heard = fault if is_quiet else replace(fault, layer=-1, phase="")
    layers = build(heard, runtime)
    whole = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, runtime, length)
        loss_fn = loss_at(step, heard, runtime, length)
        losses.append(
            float(plain_loop(layers, inputs, targets, loss_fn, micro_batches=MICRO_BATCHES, seed=0, step=step))
        )
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "parameters": {name: p.tolist() for name, p in whole.named_parameters()}}
