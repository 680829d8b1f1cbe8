"""The streams of a rank. On a GPU, a rank has a stream for computation, and streams for copies. A CPU has none.

With each tensor, a rank sends an event that its stream has recorded after computing the tensor. The stream of the
receiver waits for the event, but the thread of the receiver does not wait. `record_stream` keeps memory from being
reused while a different stream still uses it.
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

Stamp: TypeAlias = torch.Event | float  # a point in time on a stream: on a CPU, seconds
MOST_QUEUED = 4  # The most actions of a rank that are queued on its device.

_DEVICE, _NOWHERE = attrgetter("device"), nullcontext()


class RankStream:
    """The stream of a rank on a device without streams, such as a CPU. Operations are complete when they return."""

    def __init__(self, device: torch.device, *, single_device: bool = False) -> None:
        self.device = device
        self.single_device = single_device  # whether all ranks are on this device, so that no message is copied
        self.caller_events: dict[torch.device, torch.Event] = {}  # events on the streams of the calling thread

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Makes this stream wait for the caller's streams on these devices and on the device of this stream."""
        self.caller_events = {
            device: event_on(current_stream(device)) for device in {self.device, *devices} if queues(device)
        }

    def end(self, *, in_backward: bool = False) -> None:
        """Makes the stream of the calling thread wait for this stream.

        In a backward pass, the calling thread belongs to autograd, and its current stream may be on any device.
        """

    def enter(self) -> AbstractContextManager[object]:
        """Returns a context in which operations are queued on this stream."""
        return _NOWHERE

    mark: Callable[[], ReadyEvent] = staticmethod(time.perf_counter)  # returns an event after all queued operations
    stamp: Callable[[], Stamp] = staticmethod(time.perf_counter)  # returns the current time on this stream

    def limit_queue(self) -> None:
        """Waits until at most `MOST_QUEUED` actions are queued, because queued actions hold memory."""

    def seconds(self, since: Stamp, until: Stamp) -> float:
        """Returns the seconds between two timestamps."""
        return until - since  # type: ignore[operator]  # Both are floats.

    def receive(self, message: BoundaryValue | Gradients, mark: ReadyEvent) -> BoundaryValue | Gradients:
        """Copies a message to this device if necessary. `mark` is the event that the sender recorded."""
        if isinstance(message, BoundaryValue):
            return self.receive_value(message, mark)
        return self.receive_gradients(message, mark)

    def receive_value(self, crossing: BoundaryValue, mark: ReadyEvent) -> BoundaryValue:
        """Copies the tensors of a boundary value to this device if necessary. Leaf tensors remain leaves."""
        sources = set(map(_DEVICE, tensors_in(crossing.value)))
        if not isinstance(mark, torch.Event) and {self.device}.issuperset(sources):
            return crossing
        moved_tensors: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            leaf = carry_attributes(tensor, self.to_device(tensor.detach(), mark))
            moved_tensors[id(tensor)] = leaf.requires_grad_() if tensor.requires_grad else leaf
            return moved_tensors[id(tensor)]

        value = replace_tensors(crossing.value, move)
        versions = (
            crossing.versions if {self.device}.issuperset(sources) else None
        )  # Copies have new version counters.
        leaves = [moved_tensors[id(leaf)] for leaf in crossing.leaves]
        return replace(crossing, value=value, leaves=leaves, versions=versions)

    def receive_gradients(self, gradients: Gradients, mark: ReadyEvent) -> Gradients:
        """Copies gradients to this device if necessary."""
        return [self.to_device(g, mark) if isinstance(g, Tensor) else g for g in gradients]

    def tree_to_device(self, value: Tree) -> Tree:
        """Copies the tensors of a value of the caller to this device if necessary."""
        return value if self.single_device else replace_tensors(value, lambda tensor: self.to_device(tensor, None))

    def to_device(self, tensor: Tensor, mark: ReadyEvent) -> Tensor:
        """Copies a tensor to this device if necessary. Waits for `mark` first, or, if it is None, for the caller."""
        mark = self.caller_events.get(tensor.device) if mark is None else mark
        if isinstance(mark, torch.Event):
            mark.synchronize()
        return moved(tensor, self.device)


class DeviceStream(RankStream):
    """The streams of a rank on a device that has them, such as a GPU.

    A copy between devices uses a stream of the source device and a stream of the target device. Both streams are only
    for copies, so that a device waits only for the copies that it needs. The target allocates the copy on its stream
    for arrivals. If the copy were allocated on the compute stream, it would wait for all computation that is queued
    on this stream. For example::

        source  compute   ==F0==+==F1==
                out             +-copy-+
        target  arrivals               +
                compute   ======B2======+==F0==
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute, self.arrivals = torch.Stream(device), torch.Stream(device)
        self._out: dict[torch.device, torch.Stream] = {}  # streams for copies, by source device
        self._queued: deque[torch.Event] = deque()  # events after actions that may not be done
        self._host_copy: torch.Event | None = None  # the event after the last copy from the CPU

    def begin(self, devices: Iterable[torch.device]) -> None:
        super().begin(devices)
        self.compute.wait_event(self.caller_events[self.device])
        self.arrivals.wait_event(self.caller_events[self.device])

    def end(self, *, in_backward: bool = False) -> None:
        if self._host_copy is not None:  # The caller may overwrite its pinned memory after the step.
            self._host_copy.synchronize()
            self._host_copy = None
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
        until.synchronize()  # type: ignore[union-attr]  # Both are events.
        return float(since.elapsed_time(until)) / 1e3  # type: ignore[union-attr, arg-type]

    def limit_queue(self) -> None:
        self._queued.append(event_on(self.compute))
        if len(self._queued) > MOST_QUEUED:
            self._queued.popleft().synchronize()

    def to_device(self, tensor: Tensor, mark: ReadyEvent) -> Tensor:
        mark = self.caller_events.get(tensor.device) if mark is None else mark
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
            self._host_copy = event_on(self.arrivals)
        self.compute.wait_stream(self.arrivals)
        copied.record_stream(self.compute)
        return copied


def event_on(stream: torch.Stream, *, enable_timing: bool = False) -> torch.Event:
    """Records and returns an event on a stream, after all operations queued so far."""
    event = torch.Event(stream.device, enable_timing=enable_timing)
    event.record(stream)
    return event
