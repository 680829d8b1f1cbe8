"""Collects and compares the results of a run: losses, gradients, parameters, buffers and outputs."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from tests.support.plain_loop import Tree, same_bits, tensors_in

Outcome: TypeAlias = dict[str, Tensor | None]
"""All that a run leaves, by name."""


def gradients(root: nn.Module, when: object) -> Outcome:
    return {f"{when} grad {name}": None if p.grad is None else p.grad.clone() for name, p in root.named_parameters()}


def state(root: nn.Module, when: object) -> Outcome:
    """Returns the parameters and buffers of a model, or of this process's part of it."""
    found: Outcome = {f"{when} parameter {name}": p.detach().clone() for name, p in root.named_parameters()}
    return found | {f"{when} buffer {name}": b.clone() for name, b in root.named_buffers()}


def noted(root: nn.Module, when: object) -> Outcome:
    return gradients(root, when) | state(root, when)


def optimizer_of(root: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer, also for a stage without trainable parameters."""
    parameters: list[Tensor] = [*root.parameters()] or [torch.zeros(1)]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def train_twice(
    root: nn.Module,
    inputs_of: Callable[[int], Tree],
    train: Callable[[Tree, int], Tensor],
    evaluate: Callable[[Tree], Tree],
    *,
    adds: bool,
) -> Outcome:
    found: Outcome = {}
    optimizer = optimizer_of(root)
    for step in (0, 1):
        inputs = inputs_of(step)
        found[f"{step} loss"] = train(inputs, step).detach()
        found |= {f"{step} input {at}": tensor.grad for at, tensor in enumerate(tensors_in(inputs))}
        found |= gradients(root, step)
        optimizer.step()
        if not adds:
            optimizer.zero_grad()
        found |= state(root, step)
    root.eval()
    with torch.no_grad():
        outputs = tensors_in(evaluate(inputs_of(0)))
    return found | {f"evaluation {at}" if at else "evaluation": output for at, output in enumerate(outputs)}


def differences(one: Outcome, other: Outcome, *, leave_out: Callable[[str], bool] = lambda name: False) -> list[str]:
    assert list(one) == list(other), "not the same names"
    return [name for name in one if not leave_out(name) and not same_bits(one[name], other[name])]
