"""The job in which faults are injected: a few training steps of a small model, one stage a rank."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import plain_loop, squares, weights_of
from tests.support.processes.faults import Fault, Faulty, faulty_loss, strike

FEATURES, LAYERS, MICRO_BATCHES, STEPS, ROWS = 6, 8, 4, 3, 10

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Json: TypeAlias = Any


def faulty_layer(stage: int, partitions: int) -> int:
    """The layer of a stage in which a fault may strike: its last."""
    return (stage + 1) * (LAYERS // partitions) - 1


def build(fault: Fault) -> list[nn.Module]:
    with weights_of(3):
        layers: list[nn.Module] = []
        for _ in range(LAYERS // 2):
            layers += [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3), nn.Tanh())]
            layers += [Faulty(FEATURES, MICRO_BATCHES)]
    if fault.layer >= 0:
        layer = layers[fault.layer]
        assert isinstance(layer, Faulty)
        layer.fault = fault
    return layers


def batch(step: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """The mini-batch of a step: inputs and targets, each row a sequence if it has a length."""
    generator = torch.Generator().manual_seed(step)
    sizes = [2, ROWS, *([length] if length else []), FEATURES]
    made = torch.randn(*sizes, generator=generator)
    return made[0], made[1]


def loss_at(step: int, fault: Fault, length: int = 0) -> LossFunction:
    """The loss function of a step, in which the fault may be."""
    if fault.phase != "loss" or step != fault.step:
        return squares
    return faulty_loss(squares, fault, batch(step, length)[1].tensor_split(MICRO_BATCHES)[fault.micro_batch])


def train(rank: int, world: int, fault: Mapping[str, Any], retry: bool, length: int = 0) -> Json:
    """Trains; gives the losses, the rank's parameters in the end, and what went wrong if it was tried again.

    Args:
        rank: This rank.
        world: How many stages.
        fault: The fields of a `Fault`.
        retry: Whether to catch what a step raises, and to do the step once more without the fault.
        length: Of the sequence that each row is; 0 for none. Messages of 800 or more go through shared memory.
    """
    due = Fault(**fault)
    layers = build(due)
    pipe = make(layers, world)
    parameters = dict(pipe.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    if due.phase == "optimizer" and due.rank == rank:
        optimizer.register_step_pre_hook(_StrikeAt(due))
    losses: list[float] = []
    failure: Json = None
    for step in range(STEPS):
        if (due.phase, due.rank, due.step) == ("between", rank, step):
            strike(due.kind)
        try:
            loss = pipe.step(*batch(step, length), loss_at(step, due, length))
        except BaseException as error:
            if not retry or failure is not None:
                raise
            failure = _describe(error)
            due = _sound(due, layers)
            optimizer.zero_grad()
            pipe.step_number = step
            loss = pipe.step(*batch(step, length), squares)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return {"losses": losses, "parameters": {n: p.tolist() for n, p in parameters.items()}, "failure": failure}


def make(layers: Sequence[nn.Module], world: int) -> gpipe.GPipe:
    return gpipe.GPipe(layers, [LAYERS // world] * world, MICRO_BATCHES, seed=0, driver="process")


class _StrikeAt:
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


def reference(fault: Fault, length: int = 0) -> Json:
    """What training gives without a pipeline; of faults, only one that is no failure is in it."""
    is_quiet = fault.kind == "nan" and fault.phase not in {"forward", "recompute"}
    heard = fault if is_quiet else replace(fault, layer=-1, phase="")
    layers = build(heard)
    whole = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, length)
        loss_fn = loss_at(step, heard, length)
        losses.append(
            float(plain_loop(layers, inputs, targets, loss_fn, micro_batches=MICRO_BATCHES, seed=0, step=step))
        )
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "parameters": {name: p.tolist() for name, p in whole.named_parameters()}}
