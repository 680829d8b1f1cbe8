"""Checks and restores the state of a Trainer during an optimizer step, in which code of `training_step` runs twice.

Attributes that a training step changes before it calls the model are restored before its second run. Until the last
batch, `.grad` has different values than without a pipe, so it is withheld. Code that reads or writes `.grad`, or that
changes weights, raises an error.
"""

from collections import deque
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

MISSING = object()
MANY = 100  # larger containers are data, not counters
GRADIENTS = (
    "Gradients were read or changed between batches of one optimizer step, but a pipe sums them all at once. Use the "
    "callback on_pre_optimizer_step instead. [gradients-used-in-step]"
)
WEIGHTS = (
    "Weights were changed between batches of one optimizer step, but a pipe runs all batches at once. Change them in "
    "on_step_end of a callback. [weights-changed-in-step]"
)


class Attributes:
    """The attributes of an object, and the contents of attributes that are small containers."""

    def __init__(self, owner: object, ignored: Collection[str]) -> None:
        self._owner, self._ignored = owner, ignored
        self._before = self._current()

    def _current(self) -> dict[str, Any]:
        attributes = vars(self._owner).items()
        return {name: (value, _content(value)) for name, value in attributes if name not in self._ignored}

    def changed(self) -> dict[str, Any]:
        """Returns the earlier values of attributes that now refer to a different object, for `set_attributes`.

        Raises:
            ValueError: If an earlier value was changed in place.
        """
        for name, (value, content) in self._before.items():
            if _content(value) != content:
                raise ValueError(
                    f"compute_loss runs twice per batch, and changes self.{name} in place. Assign a new object to "
                    f"self.{name}, or count in a callback. [compute-loss-changes-state]"
                )
        current, missing = self._current(), (MISSING, None)
        earlier = {name: self._before.get(name, missing)[0] for name in {**self._before, **current}}
        return {name: old for name, old in earlier.items() if current.get(name, missing)[0] is not old}


def _content(value: Any, depth: int = 3) -> Any:
    """Returns a fingerprint that changes if a small container or tensor changes in place. None for other objects."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, str | int | float) and depth < 3:
        return value
    if type(value) in (list, dict, set, deque) and len(value) <= MANY and depth:
        return [_content(item, depth - 1) for item in (chain(*value.items()) if type(value) is dict else value)]
    return None


def set_attributes(owner: object, values: Mapping[str, Any]) -> None:
    """Sets attributes of an object. Deletes attributes whose value is `MISSING`."""
    for name, value in values.items():
        if value is MISSING:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = value


class _Withheld(Tensor):
    """Replaces `.grad` while gradients are withheld. Every operation on it raises an error."""

    stands_for: Tensor | None  # the real gradient, which stages use: ranks may run at the same time

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(GRADIENTS)


class WithheldGradients:
    """Withholds the gradients of a model. Code that uses or changes gradients or weights raises an error."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(parameter, parameter.grad, _withheld(parameter)) for parameter in _trained(model)]
        self._versions = versions_of(model)
        self._model = model
        for parameter, _, withheld in self._held:
            parameter.grad = withheld

    def check(self) -> None:
        if any(parameter.grad is not withheld for parameter, _, withheld in self._held):
            raise ValueError(GRADIENTS)
        if versions_of(self._model) != self._versions:
            raise ValueError(WEIGHTS)

    def restore(self) -> None:
        for parameter, gradient, _ in self._held:
            parameter.grad = gradient


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that require gradients, except Tensor subclasses."""
    return [
        parameter for parameter in model.parameters() if parameter.requires_grad and type(parameter) is nn.Parameter
    ]


def _withheld(parameter: nn.Parameter) -> Tensor:
    placeholder = parameter.detach().new_empty(()).expand(parameter.shape).as_subclass(_Withheld)
    placeholder.stands_for = parameter.grad
    return placeholder


def versions_of(model: nn.Module) -> list[tuple[int, int]]:
    """Returns the address and version of each trained parameter, which change when the parameter changes."""
    return [(parameter.data_ptr(), parameter._version) for parameter in _trained(model)]
