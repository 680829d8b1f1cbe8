"""Where a rank's work is queued: on a CPU nowhere, on other devices a stream to compute on, and some to copy on.

A tensor that crosses from rank to rank carries a mark of when its maker's stream has it ready; the taker's stream
waits for the mark, not the thread. Memory that another stream uses is recorded on it, so that it is not reused early.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe._torch.accelerator import current_stream, queued_on, queues
from gpipe.stages.boundary import BoundaryValue, Gradients, carry_attributes
from gpipe.stages.memory_layout import moved
from gpipe.stages.messages import ReadyEvent
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

Stamp: TypeAlias = torch.Event | float  # when something happened on a stream
MOST_QUEUED = 4  # actions of a rank that the host may be ahead of its device

_DEVICE, _NOWHERE = attrgetter("device"), nullcontext()


class RankStream:
    """A rank's queue of work on a device whose operations are done when they return."""

    def __init__(self, device: torch.device, *, alone: bool = False) -> None:
        self.device = device
        self.alone = alone  # no rank is on another device: whatever arrives is here
        self.called: dict[torch.device, torch.Event] = {}  # what the caller has queued on each device

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Makes this stream wait for the calling thread's streams, on these devices and this one."""
        self.called = {
            device: event_on(current_stream(device)) for device in {self.device, *devices} if queues(device)
        }

    def end(self, *, in_backward: bool = False) -> None:
        """Makes the calling thread's stream wait for this one.

        In a backward of autograd that thread is the engine's, whose own stream is of whichever device it serves.
        """

    def enter(self) -> AbstractContextManager[object]:
        """Queues here what is done inside."""
        return _NOWHERE

    mark: Callable[[], ReadyEvent] = staticmethod(time.perf_counter)  # marks what was queued so far
    stamp: Callable[[], Stamp] = staticmethod(time.perf_counter)  # now, on this stream

    def keep_pace(self) -> None:
        """Waits until no more than `MOST_QUEUED` actions are queued: each holds memory until it is done."""

    def seconds(self, since: Stamp, until: Stamp) -> float:
        return until - since  # type: ignore[operator]  # times

    def take(self, message: BoundaryValue | Gradients, mark: ReadyEvent) -> BoundaryValue | Gradients:
        """Brings what another rank made to this device."""
        if isinstance(message, BoundaryValue):
            return self.take_value(message, mark)
        return self.take_gradients(message, mark)

    def take_value(self, crossing: BoundaryValue, mark: ReadyEvent) -> BoundaryValue:
        """Brings what another rank made to this device; its leaves stay leaves."""
        there = set(map(_DEVICE, tensors_in(crossing.value)))
        if not isinstance(mark, torch.Event) and {self.device}.issuperset(there):
            return crossing
        brought: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            leaf = carry_attributes(tensor, self.bring(tensor.detach(), mark))
            brought[id(tensor)] = leaf.requires_grad_() if tensor.requires_grad else leaf
            return brought[id(tensor)]

        value = replace_tensors(crossing.value, move)
        versions = crossing.versions if {self.device}.issuperset(there) else None  # a copy has versions of its own
        leaves = [brought[id(leaf)] for leaf in crossing.leaves]
        return replace(crossing, value=value, leaves=leaves, versions=versions)

    def take_gradients(self, gradients: Gradients, mark: ReadyEvent) -> Gradients:
        return [self.bring(found, mark) if isinstance(found, Tensor) else found for found in gradients]

    def bring_all(self, value: Tree) -> Tree:
        """Brings a value that the caller has made to this device."""
        return value if self.alone else replace_tensors(value, lambda tensor: self.bring(tensor, None))

    def bring(self, tensor: Tensor, mark: ReadyEvent) -> Tensor:
        """One tensor on this device, whole by the time it is used here; without a mark the caller has made it."""
        mark = self.called.get(tensor.device) if mark is None else mark
        if isinstance(mark, torch.Event):
            mark.synchronize()
        return moved(tensor, self.device)


class DeviceStream(RankStream):
    """A rank's queue of work on a device with streams.

    A copy between devices runs on a stream of its source and arrives on one of its target. Both are only for copies,
    so that a device waits only for the copies it needs. A copy is allocated on the stream of arrivals: on the
    computing stream it would wait for all that is computed before.

        source  compute   ==F0==+==F1==
                out             +-copy-+
        target  arrivals               +
                compute   ======B2======+==F0==
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute, self.arrivals = torch.Stream(device), torch.Stream(device)
        self._out: dict[torch.device, torch.Stream] = {}  # of each source
        self._queued: deque[torch.Event] = deque()  # of actions that may not be done yet
        self._given: torch.Event | None = None  # when the last of what the caller gave on the CPU is copied

    def begin(self, devices: Iterable[torch.device]) -> None:
        super().begin(devices)
        self.compute.wait_event(self.called[self.device])
        self.arrivals.wait_event(self.called[self.device])

    def end(self, *, in_backward: bool = False) -> None:
        if self._given is not None:  # the caller may write again into pinned memory
            self._given.synchronize()
            self._given = None
        current_stream(self.device).wait_stream(self.compute)
        if in_backward:
            torch.accelerator.current_stream().wait_stream(current_stream(self.device))

    def enter(self) -> AbstractContextManager[object]:
        return queued_on(self.compute)

    def mark(self) -> ReadyEvent:
        return event_on(self.compute)

    def stamp(self) -> Stamp:
        return event_on(self.compute, enable_timing=True)

    def seconds(self, since: Stamp, until: Stamp) -> float:
        until.synchronize()  # type: ignore[union-attr]  # events
        return float(since.elapsed_time(until)) / 1e3  # type: ignore[union-attr, arg-type]  # events

    def keep_pace(self) -> None:
        self._queued.append(event_on(self.compute))
        if len(self._queued) > MOST_QUEUED:
            self._queued.popleft().synchronize()

    def bring(self, tensor: Tensor, mark: ReadyEvent) -> Tensor:
        mark = self.called.get(tensor.device) if mark is None else mark
        if tensor.device == self.device:
            if isinstance(mark, torch.Event):
                self.compute.wait_event(mark)
            tensor.record_stream(self.compute)
            return tensor
        with ExitStack() as streams:
            if queues(tensor.device):
                out = self._out.get(tensor.device) or self._out.setdefault(tensor.device, torch.Stream(tensor.device))
                if isinstance(mark, torch.Event):
                    out.wait_event(mark)
                tensor.record_stream(out)
                streams.enter_context(queued_on(out))
            streams.enter_context(queued_on(self.arrivals))
            copied = moved(tensor, self.device, non_blocking=True)
        if not queues(tensor.device):
            self._given = event_on(self.arrivals)
        self.compute.wait_stream(self.arrivals)
        copied.record_stream(self.compute)
        return copied


def event_on(stream: torch.Stream, *, enable_timing: bool = False) -> torch.Event:
    """An event that comes when what was queued on a stream so far is done."""
    event = torch.Event(stream.device, enable_timing=enable_timing)
    event.record(stream)
    return event
