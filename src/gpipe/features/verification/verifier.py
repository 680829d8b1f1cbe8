"""Decides which steps are verified: the first of each combination of model, modes, inputs and program."""

from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from torch import Tensor, nn

from gpipe._torch.modules import count_forward_hooks
from gpipe.runtime.run import Run
from gpipe.stages.tree import Tree, tensors_in

Combination: TypeAlias = tuple[object, ...]
"""The properties of a step. Steps with the properties of a verified step are not verified again."""
MOST_ATTEMPTS = 3  # The most steps of one combination that are recorded if none of them can be verified.


@dataclass
class Verifier:
    """Decides which steps of a pipe are verified, and keeps the findings of their replays.

    Attributes:
        enabled: Whether any step is verified.
        findings: The findings of all verified steps.
        compared: The number of results that were compared in all verified steps.
        written: Weights that steps have written. The next recorded step copies them.
    """

    enabled: bool = True
    _verified: set[object] = field(default_factory=set)
    _attempts: dict[object, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    compared: int = 0
    written: list[Tensor] = field(default_factory=list)
    _parts: list[nn.Module] = field(default_factory=list)
    _children: list[nn.Module | None] = field(default_factory=list)

    def __reduce__(self) -> tuple[type["Verifier"], tuple[bool]]:
        """Copies and pickles as a new verifier, because the copy of a pipe has different modules."""
        return Verifier, (self.enabled,)

    def is_new(self, combination: Combination | None) -> bool:
        """Returns whether a step of this combination must be verified."""
        if combination is None or combination in self._verified:
            return False
        return self._attempts.get(combination, 0) < MOST_ATTEMPTS

    def count_attempt(self, combination: Combination | None) -> None:
        self._attempts[combination] = self._attempts.get(combination, 0) + 1

    def finish(self, combination: Combination | None) -> None:
        self._verified.add(combination)

    def combination_of(self, run: Run) -> Combination | None:
        """Returns the combination of a step. None if the step is not verified (no gradients, or not enabled)."""
        if not self.enabled or not run.trains:
            return None
        children = [*chain.from_iterable(part._modules.values() for part in self._parts)]
        if not self._parts or self._children != children:
            roots = (layer.module for stage in run.stages.local for layer in stage.layers)
            self._parts = list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))
            self._children = [*chain.from_iterable(part._modules.values() for part in self._parts)]
        model = [
            (
                id(part),
                part.training,
                count_forward_hooks(part),
                [p is not None and p.requires_grad for p in part._parameters.values()],
            )
            for part in self._parts
        ]
        program = len(run.micro_batch_sizes), run.slices, run.path, run.thread_state.autocasts
        loss = getattr(run.loss_fn, "__code__", type(run.loss_fn))
        return repr(model), program, loss, tuple([_kind(crossing.value) for crossing in run.inputs[:2]])


def _kind(value: Tree) -> object:
    """Returns the structure of a value, with the dtype, device and number of dimensions of its tensors."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim(), value.requires_grad
    if kind is dict:
        return tuple((key, _kind(item)) for key, item in value.items())  # type: ignore[attr-defined]  # The value is a dict.
    if kind is list or kind is tuple:
        return kind, *map(_kind, value)  # type: ignore[call-overload]  # The value is a list or tuple.
    return kind, *map(_kind, tensors_in(value))  # Does not run code of other classes.
