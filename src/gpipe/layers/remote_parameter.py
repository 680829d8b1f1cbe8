"""Stands in for a parameter that another process holds: no values, and a `.grad` that is refused instead of None."""

import sys
from typing import Any

from torch import Tensor, nn

READERS = (nn.Module._apply.__code__,)  # moves gradients along with their parameters, if there are any


class RemoteParameter(nn.Parameter):
    """Stands for a parameter of another process in a module of the user's; whoever asks for its gradient is told so.

    A copy of it is one too. In another process, where a pickle may come to, it is a plain parameter without values.

    >>> import torch
    >>> weight = stand_in(nn.Parameter(torch.empty(2, device="meta")), 3)
    >>> weight.shape, weight.requires_grad
    (torch.Size([2]), True)
    >>> weight.grad  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    RuntimeError: this parameter is held by another process (layer 3); use pipe.parameters(), pipe.zero_grad(), ...
    """

    layer: int

    @property
    def grad(self) -> Tensor | None:
        """Refused; to let go of it is fine, since there is none."""
        if sys._getframe(1).f_code in READERS:
            return None
        raise self._refused()

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            raise self._refused()

    def _refused(self) -> RuntimeError:
        return RuntimeError(
            f"this parameter is held by another process (layer {self.layer}); use pipe.parameters(), "
            f"pipe.zero_grad(), pipe.clip_grad_norm_"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = stand_in(self, self.layer)
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def stand_in(empty: Tensor, layer: int) -> Tensor:
    """What stands for a tensor of another process's layer; `empty` is without values; buffers stay just that."""
    if not isinstance(empty, nn.Parameter):
        return empty
    made = RemoteParameter(empty.detach(), empty.requires_grad)
    made.layer = layer
    return made
