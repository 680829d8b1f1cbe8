"""Trains a case with the reference loop or with gpipe, behind the same interface."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

import gpipe
from tests.support.kinds.case import Case, Observed, Setting
from tests.support.plain_loop import Loop


class Trainer:
    """A model that trains a case."""

    def __init__(self, case: Case, setting: Setting, model: Loop | gpipe.GPipe) -> None:
        self.case, self.setting, self.model = case, setting, model
        self.train, self.forward = model.train, model

    def step(self, inputs: Any, targets: Any) -> Any:
        return self.model.step(inputs, targets, self.case.loss)

    def run(self, inputs: Any, targets: Any) -> Any:
        """Runs one mini-batch in the way of the setting."""
        if self.setting.way == "step":
            return self.step(inputs, targets)
        loss = self.case.loss(self.forward(inputs), targets)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, loss)


def by_loop(case: Case, setting: Setting, loop: type[Loop] = Loop) -> Trainer:
    layers = case.layers if case.plain is None else case.plain
    return Trainer(case, setting, loop(layers, setting.micro_batches, setting.seed))


def by_library(case: Case, setting: Setting, **further: Any) -> Trainer:
    given: dict[str, Any] = {
        "micro_batches": setting.micro_batches,
        "remat": setting.remat,
        "driver": setting.driver,
        "seed": setting.seed,
    }
    return Trainer(case, setting, gpipe.GPipe(case.layers, setting.cut, **(given | case.options | further)))


def observe(trainer: Trainer, into: Observed, at: str, gradients: bool = True) -> None:
    """Adds everything that must be equal: gradients, parameters, buffers and the values that the case names."""
    for name, parameter in trainer.model.named_parameters():
        if gradients:
            into[f"{at} gradient {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
        else:
            into[f"{at} parameter {name}"] = parameter.detach().clone()
    for name, buffer in trainer.model.named_buffers():
        into[f"{at} buffer {name}"] = None if buffer is None else buffer.detach().clone()
    for name, value in trainer.case.extra().items():
        into[f"{at} {name}"] = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


def train(trainer: Trainer, into: Observed) -> None:
    case = trainer.case
    case.begin(trainer)
    optimizer = case.optimizer(trainer.model.parameters())
    for number, (inputs, targets) in enumerate(case.batches):
        with case.context():
            into[f"{number} loss"] = trainer.run(inputs, targets)
        observe(trainer, into, f"{number}")
        if optimizer is not None and case.optimize(number):
            optimizer.step()
            observe(trainer, into, f"{number} after", gradients=False)
            optimizer.zero_grad()
        case.between(trainer, number)
