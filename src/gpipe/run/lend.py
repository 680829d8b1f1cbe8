"""Lends the default generator of the CPU to a layer that draws, where only one thread can draw.

The mode of a visit takes some microseconds for every operation of a layer, random or not. The default generator,
seeded with the visit's key, gives the same numbers in the same order for nothing. But a layer that itself looks at
that generator, or sets it, would notice, so it is lent only after a `Trial`. Other threads would draw from it too.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gpipe.run.lane import Lane
from gpipe.run.visit import CPU, Known, borrowing, visit

Result = TypeVar("Result")


def nobody_else_draws(lanes: Sequence[Lane]) -> bool:
    """Whether what the calling thread runs is all that can draw: there is no thread but our own, and no GPU."""
    ours = (threading.current_thread(), *(t for t in threading.enumerate() if t.name.startswith("gpipe")))
    on_cpu = all(lane.device.type == "cpu" for lane in lanes) and not torch.cuda.is_initialized()
    return on_cpu and all(thread in ours for thread in threading.enumerate())


def is_lent() -> bool:
    """Whether the default generator is lent to a layer that this thread runs."""
    return borrowing._is_owned()  # type: ignore[attr-defined,no-any-return]  # there for threading.Condition


def lend(key: int, layer: Callable[[], Result]) -> Result:
    """Runs a layer with the default generator seeded with a key, and puts that back.

    A layer that seeds it anew does not draw from the key: then it is left like that, for the guard to see.
    """
    default = torch.default_generator
    with borrowing:
        own = default.get_state()
        try:
            default.manual_seed(key)
            result = layer()
            found = None if default.initial_seed() == key else default.get_state()
        finally:
            default.set_state(own)
        if found is not None:
            default.set_state(found)
        return result


class Trial(visit):
    """A visit that finds out whether its layer could as well be lent the default generator.

    Not if it draws on other devices too, or looks at the default generator or sets it. So that one goes along with
    the visit's own here, and whoever puts it back, or draws from it past the mode, is found out at the next draw.

    Attributes:
        lends: Whether it could; known once it was run.
    """

    def __init__(self, seed: int, step: int, layer: int, micro_batch: int) -> None:
        super().__init__(seed, step, layer, micro_batch)
        self.lends = True
        self._shown: list[Tensor] = []

    def run(self, layer: Callable[[], Result]) -> Result:
        """Runs a layer inside of the visit."""
        default = torch.default_generator
        with borrowing:
            own = default.get_state()
            try:
                self._show()
                with self:
                    result = layer()
                found = default.get_state()
                self._look(found)
            finally:
                default.set_state(own)
            if not any(torch.equal(found, state) for state in self._shown):
                default.set_state(found)  # for the guard to see
            return result

    def draw(self, known: Known, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[bool, object]:
        """Does a random operation with the visit's generator, and has the default one follow."""
        self._look(torch.default_generator.get_state())
        drawn = super().draw(known, args, kwargs)
        self.lends &= self.generators.keys() == {CPU}
        if self.lends:
            self._show()
        return drawn

    def _show(self) -> None:
        self._shown.append(self.generator(CPU).get_state())
        torch.default_generator.set_state(self._shown[-1])

    def _look(self, found: Tensor) -> None:
        self.lends &= torch.equal(found, self._shown[-1])
