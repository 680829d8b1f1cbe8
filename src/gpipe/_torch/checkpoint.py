"""Reads the state of `torch.utils.checkpoint` from the frames of its functions."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

RERUNS = os.path.join(os.path.dirname(torch.__file__), "_prims", "rng_prims.py")


@dataclass(frozen=True, slots=True)
class CheckpointFrame:
    """A running forward of a checkpoint, or its recomputation in a backward pass.

    Attributes:
        recomputes: Whether this is the recomputation.
        preserves: Whether the checkpoint saves the states of default generators (`preserve_rng_state`).
        cpu: The state of the CPU generator before the forward. None if it was not saved.
        devices: The saved states of the generators of the inputs' devices, by device index.
        release: Prevents the recomputation from changing the default generators.
    """

    recomputes: bool
    preserves: bool
    cpu: Tensor | None
    devices: Mapping[int, Tensor]
    release: Callable[[], None]

    def state(self, device: torch.device) -> Tensor | None:
        """Returns the saved state of a device's generator, or None."""
        return self.cpu if device.type in ("cpu", "meta") else self.devices.get(device.index)


def read_checkpoint(frame: FrameType) -> CheckpointFrame | None:
    """Reads a frame of `torch.utils.checkpoint`. Returns None for other frames."""
    if not is_of_checkpoints(frame.f_code):
        return None
    names = frame.f_locals
    match frame.f_code.co_name:
        case "forward" if "ctx" in names:  # reentrant
            return _read(vars(names["ctx"]), partial(setattr, names["ctx"], "preserve_rng_state", False))
        case "backward" if "outputs" not in names:  # with outputs, the recomputation has ended
            return _read(vars(names["ctx"]), recomputes=True)
        case "checkpoint" | "_checkpoint_impl" if "gen" in names:  # not reentrant, in torch 2.13 and 2.15
            inner = names["gen"].gi_frame.f_locals
            return _read(inner, partial(_release, inner["recompute_fn"]))
        case "recompute_fn":
            return _read(names, recomputes=True)
    return None


def is_of_checkpoints(code: CodeType) -> bool:
    """Whether code belongs to `torch.utils.checkpoint`."""
    return code.co_filename == checkpoint.__file__


def _read(
    names: Mapping[str, Any], release: Callable[[], None] = lambda: None, *, recomputes: bool = False
) -> CheckpointFrame:
    devices = zip(names.get("fwd_devices", ()), names.get("fwd_device_states", ()), strict=True)
    preserves = bool(names.get("preserve_rng_state"))
    return CheckpointFrame(recomputes, preserves, names.get("fwd_cpu_state"), dict(devices), release)


def _release(recompute: Any) -> None:
    cells = dict(zip(recompute.__code__.co_freevars, recompute.__closure__, strict=True))
    cells["preserve_rng_state"].cell_contents = False


def reruns_by_default_generator(code: CodeType) -> bool:
    """Whether code belongs to the torch function that reruns compiled code with the saved default generator state."""
    return "run_and_save_rng_state" in code.co_qualname and code.co_filename == RERUNS
