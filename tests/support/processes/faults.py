"""Faults on purpose: what goes wrong, in which phase, at which step and micro-batch; and layers in which it does.

A model holds faulty layers wherever one may be wanted; the one that a `Fault` names does the deed, once.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.processes.marks import mark

EXCEPTIONS = ("FaultError", "MemoryError", "KeyboardInterrupt", "SystemExit")
DEATHS = ("SIGKILL", "SIGSEGV", "SIGTERM", "os._exit")
STALLS = ("sleep", "SIGSTOP", "hold the GIL")
VALUES = ("nan", "shape")
KINDS = (*EXCEPTIONS, "SIGINT", *DEATHS, *STALLS, *VALUES)

LAYER_PHASES = ("forward", "recompute", "backward")
PHASES = (*LAYER_PHASES, "loss", "optimizer", "between")


class FaultError(Exception):
    """What a user's layer might raise: it cannot be built from its text alone."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"tired {code}")


TEXTS = {"FaultError": "tired 7", "MemoryError": "full", "KeyboardInterrupt": "", "SystemExit": "0", "SIGINT": ""}
"""What the exceptions of each kind say."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where."""

    kind: str  # of KINDS: exceptions and deaths by name, "SIGINT" is Ctrl-C, "nan" and "shape" change what is given
    phase: str  # of PHASES; "between" is in the user's loop, before a step
    layer: int = -1  # that does it, if the phase is a layer's
    rank: int = -1  # that does it, if the phase is "optimizer" or "between"
    step: int = 1
    micro_batch: int = 1


def strike(kind: str) -> None:
    """Does the deed, unless it is one that changes values.

    Raises:
        BaseException: If that is the deed.
    """
    mark()
    match kind:
        case "FaultError":
            raise FaultError(code=7)
        case "MemoryError":
            raise MemoryError(TEXTS[kind])
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "SystemExit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "sleep":
            time.sleep(3600)
        case "hold the GIL":
            ctypes.PyDLL(None).sleep(3600)  # a PyDLL keeps the interpreter's lock
        case _ if kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind))
            time.sleep(1e-3)  # where Python may be interrupted


class Visit(NamedTuple):
    """A run through a layer: in which phase, at which step, of which micro-batch."""

    phase: str
    step: int
    micro_batch: int


class Faulty(nn.Linear):
    """A layer of so many features in which a fault may strike.

    When it is run it tells by its inputs, and by whether it saw the very same before their backward: they must differ
    from micro-batch to micro-batch, and forwards come in the order of micro-batches.

    Attributes:
        fault: What is to happen here; None for a sound layer.
    """

    def __init__(self, features: int, micro_batches: int, fault: Fault | None = None) -> None:
        super().__init__(features, features)
        self.fault, self.micro_batches = fault, micro_batches
        self._forwards = 0
        self._open: dict[bytes, tuple[int, int]] = {}  # step and micro-batch of inputs whose backward is to come

    def forward(self, x: Tensor) -> Tensor:
        visit = self._enter(x)
        out = self.pass_by(visit, super().forward(x))
        return _Watched.apply(out, self, visit)

    def _enter(self, x: Tensor) -> Visit:
        seen = x.detach().double().numpy().tobytes()
        if (known := self._open.pop(seen, None)) is not None:
            return Visit("recompute", *known)
        at = divmod(self._forwards, self.micro_batches)
        self._forwards += 1
        if torch.is_grad_enabled():
            self._open[seen] = at
        return Visit("forward", *at)

    def leave(self, visit: Visit) -> Visit:
        """The backward of a run begins; there is nothing to recompute any more."""
        at = (visit.step, visit.micro_batch)
        self._open = {seen: where for seen, where in self._open.items() if where != at}
        return Visit("backward", *at)

    def pass_by(self, visit: Visit, value: Tensor) -> Tensor:
        """A phase is under way; gives what it shall give."""
        fault = self.fault
        if fault is None or (fault.phase, fault.step, fault.micro_batch) != visit:
            return value
        strike(fault.kind)
        if fault.kind == "nan":
            return value * float("nan")
        return value[:, :-1] if fault.kind == "shape" else value


class _Watched(torch.autograd.Function):
    """Tells a layer when the backward of one of its runs begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Faulty, visit: Visit) -> Tensor:
        ctx.layer, ctx.visit = layer, visit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layer.pass_by(ctx.layer.leave(ctx.visit), gradient), None, None


def faulty_loss(
    loss_fn: Callable[[Tensor, Tensor], Tensor], fault: Fault, target: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss function in which a fault strikes when it is given this very target."""

    def loss(output: Tensor, given: Tensor) -> Tensor:
        found = loss_fn(output, given)
        if fault.phase != "loss" or not torch.equal(given, target):
            return found
        strike(fault.kind)
        return found * float("nan") if fault.kind == "nan" else found

    return loss
