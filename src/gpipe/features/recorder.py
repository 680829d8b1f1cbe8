"""Records the timeline of runs: the start and end of each action on each rank."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpipe.features.host_copies import CopyingFeature, HostCopy
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.streams import RankStream, Stamp
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.timeline import Span, Timeline, offsets
from gpipe.stages.traffic import Traffic
from gpipe.stages.tree import Tree, tensors_in

Interval: TypeAlias = tuple[float, float]  # start and end in seconds, by the clock that processes of a host share


class RecordedRun(NamedTuple):
    """A recorded run. A `step` is one run. A call and its backward pass are two runs.

    Attributes:
        timeline: The actions of all ranks.
        when: The times at which the run started and ended.
        traffic: The messages of each rank, by the same clock as `when`.
        cpu: The processor time of this process, in seconds.
        rows: The number of rows of the mini-batch, of all replicas.
        tokens: The number of its tokens, of all replicas: see `count_tokens`.
    """

    timeline: Timeline
    when: Interval
    traffic: tuple[Traffic, ...] = ()
    cpu: float = 0.0
    rows: int = 0
    tokens: int = 0


class RemoteRecord(NamedTuple):
    """The record of one process: its host, the start of the run by the host's clock, the timeline and messages.

    `rows` and `tokens` are 0 except in the first process of a replica, so that the sums count each row once.
    """

    host: str
    began: float
    timeline: Timeline
    traffic: Traffic
    rows: int = 0
    tokens: int = 0


class Recorder(Feature):
    """Records the last runs.

    Attributes:
        runs: The last runs that succeeded.
        inside: The intervals in which the caller was inside a step or call that succeeded.
        losses: The losses of training steps that succeeded.
        ended: The run whose actions are done, but which may still fail in a different process.
    """

    def __init__(self, keep: int) -> None:
        self.runs: deque[RecordedRun] = deque(maxlen=keep)
        self.inside: deque[Interval] = deque(maxlen=keep)
        self.losses: deque[Tensor] = deque(maxlen=keep)
        self.ended: RecordedRun | None = None
        self._copies: list[tuple[int, HostCopy]] = []  # copies, which overlap with actions
        self._stamps: list[tuple[int, Action, Stamp, Stamp]] = []
        self._streams: Mapping[int, RankStream] = {}
        self._origins: dict[int, Stamp] = {}
        self.began = self._cpu = 0.0

    def begin(self, streams: Mapping[int, RankStream]) -> None:
        """Starts to record a run."""
        self._streams, self._stamps, self._copies, self.ended = streams, [], [], None
        self.began, self._cpu = time.perf_counter(), time.process_time()
        self._origins = {rank: stream.stamp() for rank, stream in streams.items()}

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        for kind, perform in work.items():
            if kind is Kind.RECEIVE:
                work[kind] = partial(self.receive, perform)
            elif kind is not Kind.SEND:
                work[kind] = partial(self.perform, perform)

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        tokens = sum(count_tokens(value.value) for value in run.inputs)
        self.begin(run.stages.streams)
        yield
        self.end()
        assert self.ended is not None
        self.ended = self.ended._replace(rows=sum(run.micro_batch_sizes) // run.slices, tokens=tokens)

    def complete(self, run: Run) -> None:
        """Keeps the recorded run, unless other processes have not recorded it."""
        if self.ended is not None:
            self.runs.append(self.ended)

    def receive(self, receive: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """Receives the messages of an action. Records a RECEIVE that starts when both ends are ready."""
        called = rank.stream.stamp()
        sent = receive(run, rank, task)
        received = [transfer.action for transfer in task.receives if transfer.action is not None]
        if received and isinstance(sent, float) and isinstance(called, float):
            self._stamps.append((task.rank, received[-1], max(called, sent), rank.stream.stamp()))

    def perform(self, perform: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """Performs an action and records it, without the time that it waits for copies."""
        copying = [feature for feature in run.features if isinstance(feature, CopyingFeature)]
        for feature in copying:
            feature.await_copies(rank, task)
        start = rank.stream.stamp()
        perform(run, rank, task)
        for feature in copying:
            if task.action.kind in feature.starts:
                copy = feature.last_copy(rank.rank)
                assert copy is not None
                self._copies.append((task.rank, copy))
                return
        self._stamps.append((task.rank, task.action, start, rank.stream.stamp()))

    def join(self, rank: int, records: Sequence[RemoteRecord]) -> None:
        """Joins the records of all processes. Converts all times to the clock of this process.

        Args:
            rank: The rank of this process.
            records: The record of each process, by rank.
        """
        local = [_moved(record.timeline, record.began) for record in records]
        ahead = offsets([record.host for record in records], local)
        starts = [record.began + more - ahead[rank] for record, more in zip(records, ahead, strict=True)]
        first = min(starts)
        moved = [_moved(record.timeline, start - first) for record, start in zip(records, starts, strict=True)]
        spans = sorted(chain(*(timeline.spans for timeline in moved)), key=attrgetter("start", "rank"))
        seconds = max(start - first + timeline.seconds for start, timeline in zip(starts, moved, strict=True))
        traffic = tuple(record.traffic.moved(start) for record, start in zip(records, starts, strict=True))
        assert self.ended is not None
        when = first, max(self.ended.when[1], first + seconds)
        joined = Timeline(len(records), tuple(spans), seconds)
        rows, tokens = (sum(counts) for counts in zip(*((one.rows, one.tokens) for one in records), strict=True))
        self.ended = RecordedRun(joined, when, traffic, self.ended.cpu, rows, tokens)

    def end(self) -> None:
        """Creates the record of the run from its stamps."""
        since = {rank: partial(stream.seconds, self._origins[rank]) for rank, stream in self._streams.items()}
        seconds = max(since[rank](stream.stamp()) for rank, stream in self._streams.items())
        copies = [
            (rank, copy.action, copy.began, copy.ended) for rank, copy in self._copies if copy.ended is not None
        ]
        stamps = [*self._stamps, *copies]
        spans = [Span(rank, action, since[rank](a), since[rank](b)) for rank, action, a, b in stamps]
        spans.sort(key=attrgetter("start", "rank"))
        timeline = Timeline(len(self._streams), tuple(spans), seconds)
        cpu = time.process_time() - self._cpu
        self.ended = RecordedRun(timeline, (self.began, time.perf_counter()), cpu=cpu)


def count_tokens(inputs: Tree) -> int:
    """Returns the number of elements of the first tensor of token IDs: integers of shape [rows, tokens].

    Padding counts. Returns 0 without such a tensor.

    >>> count_tokens({"pixels": torch.ones(2, 3), "input_ids": torch.ones(2, 5, dtype=torch.int64)})
    10
    """
    ids = (one for one in tensors_in(inputs) if one.dim() == 2 and one.dtype in (torch.int32, torch.int64))
    return next((one.numel() for one in ids), 0)


def _moved(timeline: Timeline, by: float) -> Timeline:
    spans = (span._replace(start=span.start + by, end=span.end + by) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans))
