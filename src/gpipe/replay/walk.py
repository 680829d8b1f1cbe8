"""Walks through a model's forward and sees its events: calls of units, and operations between them."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe.replay.absent import asks_for_layout
from gpipe.replay.call import Call
from gpipe.replay.dry import Dry
from gpipe.replay.path import Tag
from gpipe.replay.skeleton import Skeleton
from gpipe.torch_private.modes import paused

RANDOM = frozenset(
    {
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
        "multinomial", "normal", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
        "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax", "bernoulli_", "cauchy_",
        "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    }
)  # fmt: skip
"""Functions of torch that draw random numbers: they are events, whatever they are given."""


class Walk(TorchFunctionMode):
    """One run of a forward on a skeleton, event by event; `dry` does the events of a model without values."""

    def __init__(self, skeleton: Skeleton, dry: Dry | None = None) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.dry = dry
        self.at = 0  # the number of the next event
        self._in_unit = False
        self._tags: dict[int, tuple[weakref.ref[Tensor], Tag]] = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model."""
        self.skeleton.on_call = self._unit
        try:
            with self:
                return self.skeleton.root(*args, **kwargs)
        finally:
            self.skeleton.on_call = None

    def tag_of(self, tensor: Tensor) -> Tag | None:
        """What a tensor is called that an event made; None of any other."""
        found = self._tags.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def name_as(self, tensor: Tensor, tag: Tag) -> None:
        """Has a tensor be known by a tag."""
        self._tags[id(tensor)] = weakref.ref(tensor), tag

    def depends(self, tensor: Tensor) -> bool:
        """Whether an operation on a tensor is an event."""
        return self.tag_of(tensor) is not None or isinstance(tensor, nn.Parameter) or tensor.requires_grad

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sees a function of torch that the forward calls between units."""
        given = kwargs or {}
        if self._in_unit or asks_for_layout(func):
            return func(*args, **given)
        call = Call.of(getattr(func, "__name__", str(func)), func, args, given)
        if call.name not in RANDOM and not any(map(self.depends, call.tensors)):
            return self.free(call)
        if call.name == "__iter__":
            return iter(self.event(call._replace(name="unbind", func=_parts_of)))
        return self.event(call)

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.skeleton.units[name]
        if self._in_unit:
            return unit(*args, **kwargs)
        self._in_unit = True
        try:
            with paused(self):
                return self.event(Call.of(name, unit, args, kwargs))
        finally:
            self._in_unit = False

    def do(self, call: Call) -> Any:
        """Does what an event is."""
        return call.do() if self.dry is None else self.dry.do(call)

    def free(self, call: Call) -> Any:
        """Does an operation that depends on whole numbers of the inputs alone."""
        return call.do()

    @abstractmethod
    def event(self, call: Call) -> Any:
        """Does the next event, or says what comes of it."""


def _parts_of(tensor: Tensor) -> list[Tensor]:
    return list(torch.unbind(tensor))
