"""Gradients and weights between the batches of an optimizer step, which are not yet what Trainer's would be.

All batches of a step run through the pipe at its first, so until its last `.grad` is withheld: whoever reads or
writes it is told, and so is who changes weights.
"""

from typing import Any

from torch import Tensor, nn

GRADIENTS = (
    "gradients were read or changed between the batches of an optimizer step, and a pipe sums those of all batches "
    "at once: do it in on_pre_optimizer_step of a callback; max_grad_norm clips there"
)
WEIGHTS = (
    "weights were changed between the batches of an optimizer step, which go through the pipe at once: do it in "
    "on_step_end of a callback"
)


class _Nothing(Tensor):
    """What `.grad` holds where the gradient is not yet what Trainer's would be: nothing can be done with it."""

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
        """Raises a ValueError if somebody has changed a gradient or a weight."""
        if any(parameter.grad is not withheld for parameter, _, withheld in self._held):
            raise ValueError(GRADIENTS)
        if versions_of(self._model) != self._versions:
            raise ValueError(WEIGHTS)

    def give_back(self) -> None:
        """Puts the gradients back."""
        for parameter, gradient, _ in self._held:
            parameter.grad = gradient


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Those with gradients, but for parameters in a format of their own."""
    return [one for one in model.parameters() if one.requires_grad and type(one) is nn.Parameter]


def _withheld(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().new_empty(()).expand(parameter.shape).as_subclass(_Nothing)


def versions_of(model: nn.Module) -> list[tuple[int, int]]:
    """What tells whether the weights of a model were changed."""
    return [(parameter.data_ptr(), parameter._version) for parameter in _trained(model)]
