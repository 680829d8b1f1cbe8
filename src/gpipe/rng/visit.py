"""Keys random operations: what a visit draws is a function of (seed, step, layer, micro-batch) alone.

torch keeps one generator for each device of a process, and rank threads would draw from it in any order. So a visit
has generators of its own, which the random operations inside of it are given.
"""

import hashlib
import struct
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import torch

from gpipe.rng.random_ops import Keyed
from gpipe.rng.torch_checkpoint import Generators, find_checkpoints, note
from gpipe.torch_private.autograd import node_number, running_node

IN_BACKWARD = (
    "{} draws random numbers in its backward, where no key reaches them: they would depend on which rank comes "
    "first. Draw them in the forward and keep them for the backward (ctx.save_for_backward). A layer that runs again "
    "in its backward what drew in its forward (RevNet, Reformer) can do that by torch.utils.checkpoint, whose draws "
    "are keyed, or leave it to the pipeline, by remat='always'"
)


def visit_key(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """The number, of 63 bits, from which a visit's generators are seeded."""
    packed = struct.pack("<4q", seed, step, layer, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class visit(Keyed):  # noqa: N801  # it reads as a function at every use, like torch.no_grad
    """A context in which every random operation of this thread draws from the key (seed, step, layer, micro-batch).

    The plain loop that a pipeline equals bit for bit enters it around each layer; its backward may be outside.

    >>> import gpipe, torch
    >>> with gpipe.visit(seed=0, step=3, layer=1, micro_batch=2):
    ...     first = torch.rand(2)
    >>> with gpipe.visit(seed=0, step=3, layer=1, micro_batch=2):
    ...     again = torch.rand(2)
    >>> torch.equal(first, again)
    True
    """

    piped = False  # whether its backward will be run `InBackward`

    def __init__(self, seed: int, step: int, layer: int, micro_batch: int) -> None:
        super().__init__()
        self._generators = Generators(partial(_start, (seed, step, layer, micro_batch)))

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator to draw from next on a device."""
        found = find_checkpoints(self.entered_by)
        generators = self._generators if found.recompute is None else found.recompute.generators(sure=False)
        generator = generators[device]
        needed = self.grad or torch.is_grad_enabled()  # else no backward follows
        for forward in found.forwards:
            note(forward, device, generator, needed=needed, releases=self.piped)
        return generator


def _start(place: tuple[int, int, int, int], device: torch.device) -> torch.Generator:
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(visit_key(*place))


class PipeVisit(visit):
    """A visit in a pipe, which runs the backward too."""

    piped = True


class InBackward(Keyed):
    """A context for a backward of a pipe: recomputes of checkpoints draw what their forwards drew, nothing else may.

    Args:
        maker: Says in words which layer made an autograd node, given the node's sequence number.
    """

    def __init__(self, maker: Callable[[int | None], str | None]) -> None:
        super().__init__()
        self._maker = maker

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator to draw from next on a device.

        Raises:
            RuntimeError: This is no recompute.
        """
        found = find_checkpoints(self.entered_by)
        if found.recompute is None:
            raise RuntimeError(IN_BACKWARD.format(self._maker(_node(self.entered_by)) or "a layer"))
        generator = found.recompute.generators(sure=True)[device]
        for forward in found.forwards:
            note(forward, device, generator, needed=True, releases=True)
        return generator


def _node(until: FrameType | None) -> int | None:
    """The sequence number of the autograd node that runs: the outermost one, since others are made in a backward."""
    found = running_node()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not until:
        node = frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found = node
        frame = frame.f_back
    return None if found is None else node_number(found)
