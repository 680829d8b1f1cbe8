"""One call that a model's forward makes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe.torch_private.trees import tree_map_only

PLAIN = frozenset({int, float, bool, str, type(None)})
"""What most arguments are that hold no tensor."""


class Call(NamedTuple):
    """A call of a unit, or of a function of torch between units.

    Attributes:
        name: The unit's, or the function's.
        func: The unit, or the function.
        args: What it is given.
        kwargs: And by name.
        tensors: The tensors among these, also in containers.
    """

    name: str
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Call":
        """The call, with its tensors found."""
        tensors: list[Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        return cls(name, func, args, kwargs, tensors)

    @property
    def unit(self) -> nn.Module | None:
        """The unit that is called; None for a function."""
        return self.func if isinstance(self.func, nn.Module) else None

    def do(self) -> Any:
        """What it returns."""
        return self.func(*self.args, **self.kwargs)

    def given(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same with other tensors."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call.of(self.name, self.func, args, kwargs)


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if type(value) in PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif is_dataclass(value) and not isinstance(value, type):
            _collect((getattr(value, field.name) for field in fields(value)), found)
