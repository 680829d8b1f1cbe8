"""Where a rank's work is queued: on a CPU nowhere, on a CUDA device a stream to compute on and one to copy on.

A tensor that crosses from rank to rank carries a mark of when its maker's stream has it ready; the taker's stream
waits for the mark, not the thread. Memory that another stream uses is recorded on it, so that it is not reused early.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe.stages.boundary import BoundaryValue, Gradients
from gpipe.stages.messages import ReadyEvent
from gpipe.stages.tree import moved, replace_tensors, tensors_in

Stamp: TypeAlias = torch.cuda.Event | float
"""When something happened on a stream."""


_DEVICE = attrgetter("device")


class RankStream:
    """A rank's queue of work on a device whose operations are done when they return."""

    def __init__(self, device: torch.device, *, alone: bool = False) -> None:
        self.device = device
        self.alone = alone  # no rank is on another device: whatever arrives is here

    def begin(self) -> None:
        """Orders what follows behind what the calling thread has queued."""

    def end(self) -> None:
        """Orders what the calling thread queues from now on behind what was queued here."""

    enter: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Queues here what is done inside."""
    mark: Callable[[], ReadyEvent] = staticmethod(time.perf_counter)
    """Marks what was queued so far."""
    stamp: Callable[[], Stamp] = staticmethod(time.perf_counter)
    """Now, on this stream."""

    def seconds(self, since: Stamp, until: Stamp) -> float:
        """The time between two stamps of this stream."""
        assert isinstance(since, float)
        assert isinstance(until, float)
        return until - since

    def take(self, message: BoundaryValue | Gradients, mark: ReadyEvent) -> BoundaryValue | Gradients:
        """Brings what another rank made to this device."""
        if isinstance(message, BoundaryValue):
            return self.take_value(message, mark)
        return self.take_gradients(message, mark)

    def take_value(self, crossing: BoundaryValue, mark: ReadyEvent) -> BoundaryValue:
        """Brings what another rank made to this device; its leaves stay leaves."""
        there = map(_DEVICE, tensors_in(crossing.value))
        if not isinstance(mark, torch.cuda.Event) and {self.device}.issuperset(there):
            return crossing
        brought: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            leaf = self.bring(tensor.detach(), mark)
            brought[id(tensor)] = leaf.requires_grad_() if tensor.requires_grad else leaf
            return brought[id(tensor)]

        value = replace_tensors(crossing.value, move)
        return replace(crossing, value=value, leaves=[brought[id(leaf)] for leaf in crossing.leaves], versions=None)

    def take_gradients(self, gradients: Gradients, mark: ReadyEvent) -> Gradients:
        """Brings gradients that another rank made to this device."""
        return [self.bring(found, mark) if isinstance(found, Tensor) else found for found in gradients]

    def bring(self, tensor: Tensor, mark: ReadyEvent) -> Tensor:
        """One tensor on this device, whole by the time it is used here."""
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()
        return moved(tensor, self.device)


class CudaStream(RankStream):
    """A rank's queue of work on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute = torch.cuda.Stream(device)
        self.copy = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Orders what follows behind what the calling thread has queued."""
        caller = torch.cuda.current_stream(self.device)
        self.compute.wait_stream(caller)
        self.copy.wait_stream(caller)

    def end(self) -> None:
        """Orders what the calling thread queues from now on behind what was queued here."""
        torch.cuda.current_stream(self.device).wait_stream(self.compute)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Queues here what is done inside."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.compute):
            yield

    def mark(self) -> ReadyEvent:
        """Marks what was queued so far."""
        event = torch.cuda.Event()
        event.record(self.compute)
        return event

    def stamp(self) -> Stamp:
        """Now, on this stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute)
        return event

    def seconds(self, since: Stamp, until: Stamp) -> float:
        """The time between two stamps of this stream."""
        assert isinstance(since, torch.cuda.Event)
        assert isinstance(until, torch.cuda.Event)
        until.synchronize()
        return float(since.elapsed_time(until)) / 1e3

    def bring(self, tensor: Tensor, mark: ReadyEvent) -> Tensor:
        """One tensor on this device: copied on a stream of its own, so that computing goes on meanwhile."""
        if tensor.device == self.device:
            if isinstance(mark, torch.cuda.Event):
                self.compute.wait_event(mark)
            tensor.record_stream(self.compute)
            return tensor
        if isinstance(mark, torch.cuda.Event):
            self.copy.wait_event(mark)
        with torch.cuda.stream(self.copy):
            copied = moved(tensor, self.device, non_blocking=True)
        if tensor.is_cuda:
            tensor.record_stream(self.copy)
        self.compute.wait_stream(self.copy)
        copied.record_stream(self.compute)
        return copied
