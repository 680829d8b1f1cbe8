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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims import rng_prims
from torch.utils import checkpoint

FILE = checkpoint.__file__
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
    """The generators that a visit or a recompute draws from: one for each device, made when first drawn from."""

    def __init__(self, start: Callable[[torch.device], torch.Generator]) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = generator = self._start(device)
        return generator


class RngStates(NamedTuple):
    """The states of torch's generators that a checkpoint saved: of the CPU, and of each device of its inputs."""

    cpu: Tensor | None
    devices: dict[int, Tensor]

    @classmethod
    def of(cls, names: Any) -> "RngStates":
        """Reads the states from the variables of a checkpoint."""
        states = zip(names.get("fwd_devices", ()), names.get("fwd_device_states", ()), strict=True)
        return cls(names.get("fwd_cpu_state"), dict(states))

    def state(self, device: torch.device) -> Tensor | None:
        """The state of a device's generator, if it was saved."""
        return self.cpu if device.type in ("cpu", "meta") else self.devices.get(device.index)


@dataclass
class Forward:
    """The forward of a checkpoint, as its frame shows it."""

    states: RngStates
    preserves: bool
    release: Callable[[], None]  # tells it to leave the default generator alone in its recompute

    def note(self, device: torch.device, generator: torch.Generator, *, needed: bool, releases: bool) -> None:
        """Has the recompute begin where a generator stands now, at the first draw.

        Raises:
            RuntimeError: The checkpoint keeps no state for it, and that is needed.
        """
        state = self.states.state(device)
        if state is None:
            if needed:
                raise RuntimeError(_forgets(device, preserves=self.preserves))
        elif not hasattr(state, MARK):
            state.copy_(generator.get_state())
            setattr(state, MARK, True)
            if releases:
                self.release()


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
    states: RngStates

    def generators(self, *, sure: bool) -> Generators:
        """The generators that the recompute draws from, from its first draw to its last.

        Raises:
            RuntimeError: It must be `sure` that its forward drew under a key, and that did not.
        """

        def start(device: torch.device) -> torch.Generator:
            state = self.states.state(device)
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

    forwards: list[Forward]
    recompute: Recompute | None


def find_checkpoints(until: FrameType | None) -> Checkpoints:
    """Looks up the stack, to the innermost recompute or to a frame.

    Raises:
        RuntimeError: There is a checkpoint that nobody can look into.
    """
    forwards: list[Forward] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not until:
        code = frame.f_code
        if code.co_filename == FILE:
            match code.co_name:
                case "forward" if "ctx" in frame.f_locals:
                    forwards.append(_reentrant(frame.f_locals["ctx"]))
                case "checkpoint" if "gen" in frame.f_locals:
                    forwards.append(_non_reentrant(frame.f_locals["gen"].gi_frame.f_locals))
                case "backward" if "outputs" not in frame.f_locals:
                    return Checkpoints(forwards, Recompute(frame, RngStates.of(vars(frame.f_locals["ctx"]))))
                case "recompute_fn":
                    return Checkpoints(forwards, Recompute(frame, RngStates.of(frame.f_locals)))
        elif "run_and_save_rng_state" in code.co_qualname and code.co_filename == rng_prims.__file__:
            raise RuntimeError(COMPILED)
        frame = frame.f_back
    return Checkpoints(forwards, None)


def _reentrant(ctx: Any) -> Forward:
    def release() -> None:
        ctx.preserve_rng_state = False

    return Forward(RngStates.of(vars(ctx)), ctx.preserve_rng_state, release)


def _non_reentrant(names: Any) -> Forward:
    recompute = names["recompute_fn"]
    cells = dict(zip(recompute.__code__.co_freevars, recompute.__closure__, strict=True))

    def release() -> None:
        cells["preserve_rng_state"].cell_contents = False

    return Forward(RngStates.of(names), names["preserve_rng_state"], release)
