"""Has a recompute of `torch.utils.checkpoint`, in a backward, draw what its forward drew under a key.

torch's checkpoint notes the state of the default generator before the forward, and sets it before the recompute. What
draws under a key has nothing to do with that generator. So at the first draw inside of a checkpoint the state of the
generator that is drawn from is written where torch noted the other: the recompute then begins there, whoever runs it.
Frames of Python tell which checkpoints a draw is inside of.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch

from gpipe._torch.checkpoint import CheckpointFrame, read_checkpoint, reruns_by_default_generator

MARK = "_gpipe_drew_here"  # on a state that was noted: what stands there now is a key's
GENERATORS = "_gpipe_generators"  # beside the variables of a recompute: what it draws from

FORGETS = (
    "something random is drawn inside of torch.utils.checkpoint, which does not keep what a recompute needs to draw "
    "the same again ({}); {}, or let the pipeline recompute instead, with remat='always'"
)
UNSEEN = (
    "a recompute of torch.utils.checkpoint draws random numbers, and its forward was not seen to draw any: a layer "
    "must draw as often in a recompute as in its forward, on the same devices, and call "
    "torch.utils.checkpoint.checkpoint"
)


COMPILED = (
    "something random is drawn inside of torch.utils.checkpoint within compiled code, by a backend that runs it "
    "again by the state of torch's generator; compile by 'inductor', or what is inside of the checkpoint"
)


class Generators(dict[torch.device, torch.Generator]):
    """The generators that a scope or a recompute draws from: one for each device, made when first drawn from."""

    def __init__(self, start: Callable[[torch.device], torch.Generator]) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = generator = self._start(device)
        return generator


def note(
    forward: CheckpointFrame, device: torch.device, generator: torch.Generator, *, needed: bool, releases: bool
) -> None:
    """Has a checkpoint's recompute begin where a generator stands now, at the first draw of its forward.

    Raises:
        RuntimeError: The checkpoint keeps no state for it, and that is needed.
    """
    state = forward.state(device)
    if state is None:
        if needed:
            raise RuntimeError(_forgets(device, preserves=forward.preserves))
    elif not hasattr(state, MARK):
        state.copy_(generator.get_state())
        setattr(state, MARK, True)
        if releases:
            forward.release()


def _forgets(device: torch.device, *, preserves: bool) -> str:
    if preserves:
        return FORGETS.format(
            f"the numbers are drawn on {device}, and none of its inputs is there", f"give it one on {device}"
        )
    return FORGETS.format("preserve_rng_state=False", "leave that out")


@dataclass
class Recompute:
    """A recompute that is under way, as its frame shows it."""

    frame: FrameType
    seen: CheckpointFrame

    def generators(self, *, sure: bool) -> Generators:
        """The generators that the recompute draws from, from its first draw to its last.

        Raises:
            RuntimeError: It must be `sure` that its forward drew under a key, and that did not.
        """

        def start(device: torch.device) -> torch.Generator:
            state = self.seen.state(device)
            if state is None or (sure and not hasattr(state, MARK)):
                raise RuntimeError(UNSEEN)
            generator = torch.Generator("cpu" if device.type == "meta" else device)
            generator.set_state(state)
            return generator

        names = self.frame.f_locals
        if GENERATORS not in names:
            names[GENERATORS] = Generators(start)
        found: Generators = names[GENERATORS]
        return found


class Checkpoints(NamedTuple):
    """The checkpoints that a draw is inside of: forwards, and the recompute, if it is in one, that they are in."""

    forwards: list[CheckpointFrame]
    recompute: Recompute | None


def find_checkpoints(until: FrameType | None) -> Checkpoints:
    """Looks up the stack, to the innermost recompute or to a frame.

    Raises:
        RuntimeError: There is a checkpoint that nobody can look into.
    """
    forwards: list[CheckpointFrame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not until:
        seen = read_checkpoint(frame)
        if seen is not None and seen.recomputes:
            return Checkpoints(forwards, Recompute(frame, seen))
        if seen is not None:
            forwards.append(seen)
        elif reruns_by_default_generator(frame.f_code):
            raise RuntimeError(COMPILED)
        frame = frame.f_back
    return Checkpoints(forwards, None)
