"""The real timeline: what each rank did when. Costs nothing when absent."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from gpipe.plan.action import Action, Kind
from gpipe.plan.timeline import Span, Timeline
from gpipe.runtime.steps import Step
from gpipe.runtime.streams import RankStream, Stamp
from gpipe.runtime.worker import Worker


class Recorder:
    """Collects timelines.

    Attributes:
        timelines: One for each run since recording began; a `step` is one run, a call and its backward are two.
    """

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        self._stamps: list[tuple[int, Action, Stamp, Stamp]] = []
        self._streams: Mapping[int, RankStream] = {}
        self._origins: dict[int, Stamp] = {}
        self.began = 0.0  # by the clock that all processes of a host share

    def begin(self, streams: Mapping[int, RankStream]) -> None:
        """Begins a run on the stream of each rank that runs here."""
        self._streams = streams
        self._stamps = []
        self.began = time.perf_counter()
        self._origins = {rank: stream.stamp() for rank, stream in streams.items()}

    def do(self, worker: Worker, step: Step) -> None:
        """Does one step of a worker, and records it from when its rank has what it needs until it is done."""
        if step.takes:
            self.take(worker, step)
        self.work(worker, step)

    def take(self, worker: Worker, step: Step) -> None:
        """Waits for what a step takes; what of it was already on its way counts as a RECEIVE."""
        asked = worker.stream.stamp()
        sent = worker.take(step)
        if isinstance(sent, float) and isinstance(asked, float):
            received = replace(step.action, kind=Kind.RECEIVE)
            self._stamps.append((step.rank, received, max(asked, sent), worker.stream.stamp()))

    def work(self, worker: Worker, step: Step) -> None:
        """Does what a step does once it has what it takes."""
        start = worker.stream.stamp()
        worker.do(step)
        self._stamps.append((step.rank, step.action, start, worker.stream.stamp()))

    def join(self, others: Sequence[tuple[float, Timeline]]) -> None:
        """Makes one of the last timeline and those of all other processes, each with the time when it began.

        They are laid side by side by the clock that the processes of one host share.
        """
        first = min(began for began, _ in others)
        spans = [
            replace(span, start=span.start + began - first, end=span.end + began - first)
            for began, timeline in others
            for span in timeline.spans
        ]
        spans.sort(key=lambda span: (span.start, span.rank))
        seconds = max(began - first + timeline.seconds for began, timeline in others)
        self.timelines[-1] = Timeline(len(others), tuple(spans), seconds)

    def end(self) -> None:
        """Ends a run, and adds its timeline."""
        ends = [stream.seconds(self._origins[rank], stream.stamp()) for rank, stream in self._streams.items()]
        spans = [
            Span(
                rank,
                action,
                self._streams[rank].seconds(self._origins[rank], start),
                self._streams[rank].seconds(self._origins[rank], end),
            )
            for rank, action, start, end in self._stamps
        ]
        spans.sort(key=lambda span: (span.start, span.rank))
        self.timelines.append(Timeline(len(self._streams), tuple(spans), max(ends)))


class Recordable(Protocol):
    """A pipe, as far as recording it goes."""

    recorder: Recorder | None


@contextmanager
def record(pipe: Recordable) -> Iterator[Recorder]:
    """Records the timeline of every step or call made inside.

    >>> import torch, gpipe
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
    >>> with gpipe.record(pipe) as recording:
    ...     _ = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
    >>> len(recording.timelines), recording.timelines[0].ranks
    (1, 2)
    """
    if not hasattr(pipe, "recorder"):
        raise TypeError(
            f"gpipe.record was given a {type(pipe).__name__}; give the gpipe.GPipe whose steps it records"
        )
    before, pipe.recorder = pipe.recorder, Recorder()
    try:
        yield pipe.recorder
    finally:
        pipe.recorder = before
