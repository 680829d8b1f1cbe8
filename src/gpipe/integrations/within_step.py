"""A step of Trainer's, of which parts run twice, and all batches at its first.

What a training step changes of its object before it calls the model is put back before it is run a second time. And
until the last batch `.grad` is withheld, as it is not yet Trainer's: whoever reads or writes it is told,
and so is who changes weights.
"""

from collections import deque
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

NOTHING = object()
MANY = 100  # a container that has more is data, and no count
COUNTS = "compute_loss, run twice for a batch, changes self.{name} in place: bind it anew, or count in a callback"
GRADIENTS = "gradients were read or changed between batches, and a pipe sums all at once: on_pre_optimizer_step can"
WEIGHTS = "weights were changed between batches of a step, which run at once: do it in on_step_end of a callback"


class Bindings:
    """What the names on an object are bound to, but for some, and its content where that is plain."""

    def __init__(self, home: object, without: Collection[str]) -> None:
        self._home, self._without = home, without
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        every = vars(self._home).items()
        return {name: (value, _content(value)) for name, value in every if name not in self._without}

    def changed(self) -> dict[str, Any]:
        """What the names that are bound to something else by now were bound to; for `rebind`.

        Raises:
            ValueError: What one was bound to was changed in place.
        """
        for name, (value, content) in self._before.items():
            if _content(value) != content:
                raise ValueError(COUNTS.format(name=name))
        now, nothing = self._now(), (NOTHING, None)
        were = {name: self._before.get(name, nothing)[0] for name in {**self._before, **now}}
        return {name: old for name, old in were.items() if now.get(name, nothing)[0] is not old}


def _content(value: Any, depth: int = 3) -> Any:
    """What tells whether a small container or a tensor was changed in place; None for all else."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, str | int | float) and depth < 3:
        return value
    if type(value) in (list, dict, set, deque) and len(value) <= MANY and depth:
        return [_content(one, depth - 1) for one in (chain(*value.items()) if type(value) is dict else value)]
    return None


def rebind(home: object, values: Mapping[str, Any]) -> None:
    """Binds names on an object to values, or to nothing."""
    for name, value in values.items():
        if value is NOTHING:
            vars(home).pop(name, None)
        else:
            vars(home)[name] = value


class _Nothing(Tensor):
    """What `.grad` holds where the gradient is not yet what Trainer's would be: nothing can be done with it."""

    stands_for: Tensor | None  # which stages see: their ranks may be at work meanwhile

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(GRADIENTS)


class WithheldGradients:
    """The gradients of parameters, withheld: nobody may read or change them, nor any weight meanwhile."""

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

    def give_back(self) -> None:
        for parameter, gradient, _ in self._held:
            parameter.grad = gradient


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Those with gradients, but for parameters in a format of their own."""
    return [one for one in model.parameters() if one.requires_grad and type(one) is nn.Parameter]


def _withheld(parameter: nn.Parameter) -> Tensor:
    nothing = parameter.detach().new_empty(()).expand(parameter.shape).as_subclass(_Nothing)
    nothing.stands_for = parameter.grad
    return nothing


def versions_of(model: nn.Module) -> list[tuple[int, int]]:
    """What tells whether the weights of a model were changed."""
    return [(parameter.data_ptr(), parameter._version) for parameter in _trained(model)]
