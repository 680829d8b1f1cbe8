"""Stands in for a parameter that another process holds: no values, and what needs them or a gradient is refused."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gpipe._torch.trees import tree_leaves

READERS = (nn.Module._apply.__code__,)  # moves gradients along with their parameters, if there are any
TRAIN = "use pipe.parameters(), pipe.zero_grad(), pipe.clip_grad_norm_"
COMPUTE = (
    "compute by pipe(inputs) or pipe.step(...), which all processes call, or have the whole model in one process: "
    "gpipe.save_weights(folder, pipe), and load it there"
)
WITHOUT_VALUES = frozenset({
    "data", "detach", "detach_", "clone", "contiguous", "copy_", "requires_grad_", "share_memory_", "pin_memory",
    "to", "type", "type_as", "cpu", "cuda", "double", "float", "half", "bfloat16",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor",
})  # fmt: skip
"""What gives a tensor and needs no values: copies and moves, which have none either, and what is shaped alike."""
HANDED_ON = frozenset({"detach", "contiguous"})
"""What gives the same values, as a state_dict does: who saves these is told as well."""


class RemoteTensor(Tensor):
    """What a state_dict has of a parameter of another process: who writes its values to a file is told so.

    >>> import torch
    >>> weight = stand_in(nn.Parameter(torch.empty(2, device="meta")), 3).detach()
    >>> weight.cpu()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    RuntimeError: this parameter is held by another process (layer 3); compute by pipe(inputs) or pipe.step(...), ...
    """

    layer: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuses what needs values."""
        return without_values(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach())  # type: ignore[no-any-return]  # one of these

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)


class RemoteParameter(nn.Parameter):
    """Stands for a parameter of another process in a module of the user's; whoever computes with it is told so.

    So is whoever asks for its gradient. A copy of it is one too. In another process, where a pickle may come to, it
    is a plain parameter without values.

    >>> import torch
    >>> weight = stand_in(nn.Parameter(torch.empty(2, device="meta")), 3)
    >>> weight.shape, weight.requires_grad
    (torch.Size([2]), True)
    >>> weight.grad  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    RuntimeError: this parameter is held by another process (layer 3); use pipe.parameters(), pipe.zero_grad(), ...
    >>> torch.ones(1, 2) @ weight  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    RuntimeError: this parameter is held by another process (layer 3); compute by pipe(inputs) or pipe.step(...), ...
    """

    layer: int

    @property
    def grad(self) -> Tensor | None:
        """Refused; to let go of it is fine, since there is none."""
        if sys._getframe(1).f_code in READERS:
            return None
        raise refusal(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            raise refusal(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuses what needs values; attributes, sizes, copies and moves are as of any tensor on the meta device."""
        return without_values(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = stand_in(self, self.layer)
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def stand_in(empty: Tensor, layer: int) -> Tensor:
    """What stands for a tensor of another process's layer; `empty` is without values; buffers stay just that."""
    if not isinstance(empty, nn.Parameter):
        return empty
    made = RemoteParameter(empty.data, empty.requires_grad)
    made.layer = layer
    return made


def without_values(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Calls a function of torch with what has no values; who needs some is told where they are."""
    named = getattr(func, "__name__", "")
    name = getattr(getattr(func, "__self__", None), "__name__", "") if named == "__get__" else named
    try:
        # of another class, since torch has it handle a function as if there were no subclass
        result = nn.Parameter.__torch_function__(func, types, args, kwargs or {})
    except RuntimeError as error:
        if name in WITHOUT_VALUES and not isinstance(error, NotImplementedError):
            raise
        raise refusal(_among(args, kwargs), COMPUTE) from error  # "no data", or not of the meta device
    if name not in WITHOUT_VALUES and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        raise refusal(_among(args, kwargs), COMPUTE)
    if name in HANDED_ON:
        layer = _among(args, kwargs).layer
        result = result.as_subclass(RemoteTensor)
        result.layer = layer
    return result


def refusal(remote: "RemoteParameter | RemoteTensor", instead: str = TRAIN) -> RuntimeError:
    """What is said to whoever needs what another process holds."""
    return RuntimeError(f"this parameter is held by another process (layer {remote.layer}); {instead}")


def _among(args: object, kwargs: object) -> RemoteParameter | RemoteTensor:
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (RemoteParameter, RemoteTensor)))
