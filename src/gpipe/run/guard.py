"""Watches torch's own generators: a layer that draws from them unkeyed would depend on which thread comes first."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe.run.lane import Lane
from gpipe.run.stage import Layer
from gpipe.run.visit import borrowing, default_generator


class RandomGuard:
    """Remembers the state of the default generators while a run is under way."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        devices = {torch.device("cpu"), *(lane.device for lane in lanes)}
        self._generators = [default_generator(device) for device in devices]
        self._states = self._look()

    def check(self, layers: Sequence[Layer]) -> None:
        """Checks that nothing was drawn from them.

        Raises:
            RuntimeError: Something was; the layers that may have done it are named, and watched from now on.
        """
        if all(map(torch.equal, self._look(), self._states)):
            return
        suspects = [layer for layer in layers if not layer.may_draw()] or list(layers)
        for layer in suspects:
            layer.draws.clear()
            layer.lends.clear()
        raise RuntimeError(
            f"something random was drawn from torch's own generator, so the result depends on chance: in one of "
            f"{', '.join(map(str, suspects))}, which drew nothing before, or which is compiled and hides its draws. "
            f"If it only began to draw, run the step again: it is watched now"
        )

    def _look(self) -> list[Tensor]:
        with borrowing:  # not while another thread has one of them lent
            return [generator.get_state() for generator in self._generators]
