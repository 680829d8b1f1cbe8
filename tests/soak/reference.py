"""The plain loop that everybody writes, from the contract alone, and the face that it shares with the library."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import gpipe
from tests.support.kinds.case import Case, Observed, Setting


class Trainer(ABC):
    """Who trains a case: the loop, or the library."""

    case: Case
    setting: Setting
    model: nn.Module  # names the parameters and buffers

    @abstractmethod
    def step(self, inputs: Any, targets: Any) -> Any:
        """Forward and backward of one mini-batch; the loss."""

    @abstractmethod
    def forward(self, inputs: Any) -> Any:
        """The output of one mini-batch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, *outputs: Any) -> None:
        """The backward of a loss of `outputs` that `forward` gave."""

    def close(self) -> None:  # noqa: B027
        """Ends what was begun."""

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def run(self, inputs: Any, targets: Any) -> Any:
        """One mini-batch in the setting's way."""
        if self.setting.way == "step":
            return self.step(inputs, targets)
        output = self.forward(inputs)
        loss = self.case.loss(output, targets)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            self.backward(loss, output)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, loss)


class Loop(Trainer):
    """For each micro-batch in turn: forward, loss, backward; `gpipe.rng_scope` around each layer and the loss."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.case, self.setting = case, setting
        self.model = nn.Sequential(*(case.layers if case.plain is None else case.plain))
        self.layers = list(self.model)
        self.step_number = 0
        self._graphs: list[tuple[list[torch.Tensor], list[list[torch.Tensor]]]] = []

    def step(self, inputs: Any, targets: Any) -> Any:
        number, parts = self._begin(inputs)
        rows = [_rows(part) for part in parts]
        aims = split(targets, sum(rows), len(parts))
        total: torch.Tensor | float = 0.0
        for m, (part, aim) in enumerate(zip(parts, aims, strict=True)):
            output, stashed = self._forward(part, number, m)
            popped = {name: stashed[name] for name in _names(self.case.loss, "pop")}
            with gpipe.rng_scope(self.setting.seed, number, len(self.layers), m):
                loss = self.case.loss(output, aim, **popped)
            share = rows[m] / sum(rows)
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, share))
            total = total + loss.detach() * share if m else loss.detach() * share
        return total

    def forward(self, inputs: Any) -> Any:
        number, parts = self._begin(inputs)
        outputs = [self._forward(part, number, m)[0] for m, part in enumerate(parts)]
        flat = [pytree.tree_flatten(output)[0] for output in outputs]
        made = [join([leaves[i] for leaves in flat]) for i in range(len(flat[0]))]
        if torch.is_grad_enabled():
            self._graphs.append((made, flat))
        return pytree.tree_unflatten(made, pytree.tree_flatten(outputs[0])[1])

    def backward(self, loss: torch.Tensor, *outputs: Any) -> None:
        for output in outputs:
            held = pytree.tree_flatten(output)[0]
            made, flat = self._graphs.pop(next(i for i, (o, _) in enumerate(self._graphs) if o[0] is held[0]))
            wanted = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
            found = torch.autograd.grad(loss, wanted, retain_graph=output is not outputs[-1], allow_unused=True)
            gradients = {id(t): g for t, g in zip(wanted, found, strict=True) if g is not None}
            for m, leaves in enumerate(flat):
                _backward(made, leaves, gradients, m, len(flat))

    def _begin(self, inputs: Any) -> tuple[int, list[Any]]:
        number = self.step_number
        self.step_number += self.model.training
        rows = _rows(inputs)
        return number, split(inputs, rows, min(self.setting.micro_batches, rows))

    def _forward(self, x: Any, step: int, micro_batch: int) -> tuple[Any, dict[str, Any]]:
        stashed: dict[str, Any] = {}
        for index, layer in enumerate(self.layers):
            popped = {name: stashed[name] for name in _names(layer, "pop")}
            with gpipe.rng_scope(self.setting.seed, step, index, micro_batch):
                x = layer(x, **popped)
            if _names(layer, "stash"):
                x, made = x
                stashed.update(made)
        return x, stashed


def split(value: Any, rows: int, parts: int) -> list[Any]:
    """Views of `rows` rows in `parts` micro-batches, first ones larger; what has no rows goes to each."""

    def cut(leaf: Any) -> list[Any]:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return [leaf] * parts
        if leaf.shape[0] != rows:
            raise ValueError(f"{leaf.shape[0]} rows where there should be {rows}")
        return list(leaf.tensor_split(parts))

    leaves, spec = pytree.tree_flatten(value)
    cuts = [cut(leaf) for leaf in leaves]
    return [pytree.tree_unflatten([c[m] for c in cuts], spec) for m in range(parts)]


def join(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    whole = torch.cat([part.detach() for part in parts])
    wants = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return whole.requires_grad_() if wants else whole


def observe(trainer: Trainer, into: Observed, at: str, gradients: bool = True) -> None:
    """Adds what must be equal: gradients, parameters, buffers and what the case names."""
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


def _backward(
    made: Sequence[Any], leaves: Sequence[Any], gradients: dict[int, torch.Tensor], micro_batch: int, parts: int
) -> None:
    """The backward of one micro-batch, from its rows of the gradients of the whole outputs."""
    used = [(i, leaf) for i, leaf in enumerate(leaves) if id(made[i]) in gradients and leaf.requires_grad]
    if not used:
        return
    rows = [gradients[id(made[i])].tensor_split(parts)[micro_batch] for i, _ in used]
    torch.autograd.backward([leaf for _, leaf in used], rows)


def _rows(value: Any) -> int:
    leaves = pytree.tree_leaves(value)
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())


def _names(owner: object, attribute: str) -> tuple[str, ...]:
    """The names that a layer or loss stashes or pops; containers have a method `pop`."""
    names = getattr(owner, attribute, ())
    return names if isinstance(names, tuple) else ()
