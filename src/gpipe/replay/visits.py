"""Has a model draw random numbers as a pipe of it does: the reference, entered by forward hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gpipe.layers.stage import RngKey
from gpipe.replay.path import Path
from gpipe.replay.skeleton import Parts
from gpipe.rng.visit import visit


@contextmanager
def visiting(parts: Parts, path: Path, key: RngKey) -> Iterator[None]:
    """Around one forward of the model itself, enters the visit of each layer in turn.

    A layer ends where a block returns; the first also where the first block is called.
    """
    layers = Layers(key)
    first_is_block = path.events[0].name in parts.blocks
    calls = 0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 and not first_is_block:
            layers.next()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        layers.next()

    blocks = [parts.model.get_submodule(name) for name in parts.blocks]
    hooks = [hook for b in blocks for hook in (b.register_forward_pre_hook(before), b.register_forward_hook(after))]
    layers.enter()
    try:
        yield
    finally:
        layers.leave()
        for hook in hooks:
            hook.remove()


class Layers:
    """The visits of the layers, one after another."""

    def __init__(self, key: RngKey) -> None:
        self._key, self._index = key, 0

    def enter(self) -> None:
        """Enters the visit of the layer."""
        self._visit = visit(self._key.seed, self._key.step, self._index, self._key.micro_batch)
        self._visit.__enter__()

    def leave(self) -> None:
        """Leaves it."""
        self._visit.__exit__(None, None, None)

    def next(self) -> None:
        """Goes on to the next layer."""
        self.leave()
        self._index += 1
        self.enter()
