"""Stands for what an earlier layer made and nobody here needs.

What is raised where a model cannot be replayed in parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from gpipe._torch.dispatcher import empty_on_meta
from gpipe._torch.modes import as_plain_tensors


class CannotSplitError(ValueError):
    """A model's forward does what cannot be computed in parts to the same bits; says what, where, and what to do."""


LAYOUT = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
        "is_signed", "__len__", "stride", "is_contiguous", "storage_offset", "get_device", "__hash__", "__repr__",
        "__str__", "__format__", "requires_grad_",
    }
)  # fmt: skip
"""What is asked of a tensor without a look at its values, beside its attributes."""
TENSORS_OF = frozenset(
    {
        "T", "mT", "H", "mH", "real", "imag", "data", "grad",
    }
)  # fmt: skip
"""The attributes of a tensor that are tensors themselves."""


def asks_for_layout(function: Callable[..., Any]) -> bool:
    """Whether a function of tensors, or the getter of an attribute, looks at no values.

    >>> asks_for_layout(Tensor.size), asks_for_layout(Tensor.shape.__get__), asks_for_layout(Tensor.mT.__get__)
    (True, True, False)
    """
    name = getattr(function, "__name__", "")
    return name in LAYOUT or (name == "__get__" and attribute_of(function) not in TENSORS_OF)


def attribute_of(getter: Callable[..., Any]) -> str:
    """The attribute that a getter, as `Tensor.shape.__get__`, is for."""
    return getattr(getattr(getter, "__self__", None), "__name__", "")


class Absent(Tensor):
    """A tensor without values: whoever asks for its layout gets it, whoever computes with it is refused.

    It lies on the meta device, so that nothing can compute with it unseen, and says where its values would be.
    """

    home: torch.device
    wants_gradient: bool

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype, home: torch.device, *, wants_gradient: bool) -> "Absent":
        """Stands for a tensor of this layout.

        >>> there = Absent.like((2, 3), torch.float32, torch.device("cpu"), wants_gradient=True)
        >>> there.shape, there.dtype, there.device, there.requires_grad
        (torch.Size([2, 3]), torch.float32, device(type='cpu'), True)
        """
        made = empty_on_meta(shape, dtype).as_subclass(cls)
        made.home = home
        made.wants_gradient = wants_gradient
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers questions about the layout."""
        if not asks_for_layout(func):
            _refuse(func)
        with as_plain_tensors():
            name = attribute_of(func)
            asked = next((item for item in args if isinstance(item, cls)), None)
            if asked is None or "home" not in vars(asked):
                return func(*args, **(kwargs or {}))
            match name:
                case "device":
                    return asked.home
                case "requires_grad":
                    return asked.wants_gradient
                case "is_meta" | "is_cpu" | "is_cuda":
                    return asked.home.type == name.removeprefix("is_")
            return func(*args, **(kwargs or {}))


def _refuse(func: Callable[..., Any]) -> Never:
    name = getattr(func, "__name__", str(func))
    raise CannotSplitError(
        f"{name} needs a value that an earlier layer made, and that did not cross the cuts: on the sample it was not "
        f"needed here. The model's forward takes another path now; give a sample that takes it"
    )
