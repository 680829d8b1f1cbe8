"""`gpipe.record`: what each rank did when, where the time went, and what to change."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpipe.errors import is_count
from gpipe.features.recorder import Interval, Recorder
from gpipe.planner.watch import Watch
from gpipe.profiling import Report, report_html, trace_json, typical_svg, write_picture
from gpipe.profiling.advice import SOME_CORES, Advice, RecordedSteps, advise, compare, explain, shared_lock
from gpipe.profiling.breakdown import MEANING, NOTHING, Breakdown, breakdown, windows
from gpipe.profiling.memory import Held, Meter, OtherProcesses, Watches, held
from gpipe.profiling.messages import Message, messages_of, write_messages
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Work
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import COMPUTE
from gpipe.schedule.program import notebook_html
from gpipe.schedule.timeline import Timeline, steps_among

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe


T = TypeVar("T")
KEPT = 100  # steps
NOT_A_PIPE = "gpipe.record was given a {kind}; give the gpipe.GPipe whose steps it records"
SUFFIXES = ".svg or .png (a picture), .json (a trace for ui.perfetto.dev), .html (a page), .jsonl (messages)"


class Recording(Recorder):
    """What `record` gives: the last steps of a pipe. Prints as the table of where their time went.

    What sums up steps raises a ValueError where none was recorded.

    >>> import torch, gpipe
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
    >>> with gpipe.record(pipe) as recording:
    ...     _ = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
    >>> len(recording.timelines), round(sum(recording.breakdown().shares.values()), 6)
    (1, 1.0)
    """

    def __init__(self, pipe: "GPipe", keep: int, *, memory: bool = False) -> None:
        super().__init__(keep)
        self._watches = Watches() if memory else None
        if self._watches is not None:
            with Watch():  # the first costs seconds, which are no layer's
                torch.zeros(1).add(1)
        self._states: dict[int, Mapping[Tensor, Any]] = {}
        self._pipe, self._before = pipe, pipe.recorder
        self._updates: deque[Interval] = deque(maxlen=keep)
        self._loads: deque[Interval] = deque(maxlen=keep)
        self._thread = threading.get_ident()
        self._begun: list[float] = []  # updates: one optimizer may step another inside
        self._meter = Meter()
        own = weakref.proxy(self)  # the hooks are torch's, of all optimizers: they are not to keep the pipe alive
        self._hooks = ExitStack()
        self._hooks.enter_context(register_optimizer_step_pre_hook(lambda *_: own._begun.append(time.perf_counter())))
        self._hooks.enter_context(register_optimizer_step_post_hook(lambda updated, *_: own._end_update(updated)))
        weakref.finalize(self, self._hooks.close)
        self._is_on = True
        pipe.recorder = self

    def stop(self) -> None:
        """Ends recording; what was recorded stays."""
        self._is_on = False
        self._hooks.close()
        if self._pipe.recorder is self:
            self._pipe.recorder = self._before
        self._meter.stop()
        self._pipe._findings.report(self._shared_lock())

    def __enter__(self) -> Self:
        if not self._is_on:
            raise ValueError("this recording has been stopped; gpipe.record(pipe) makes another")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterates over mini-batches, and notes how long each takes to come: the part `data`."""
        rest, start = iter(batches), time.perf_counter()
        for batch in rest:
            if threading.get_ident() == self._thread:  # else it is ahead of time, and nobody waits
                self._loads.append((start, time.perf_counter()))
            yield batch
            start = time.perf_counter()

    @property
    def timelines(self) -> list[Timeline]:
        """What each rank did in each run; a `step` is one run, a call and its backward are two.

        `other` of each has the seconds until the next began, by part of the breakdown.
        """
        return windows(list(self.runs), list(self.inside), list(self._updates), list(self._loads))

    def breakdown(self) -> Breakdown:
        """Where the wall time went, from the first recorded step to the end of the last; prints as a table."""
        return breakdown(self.timelines)

    def advice(self) -> list[Advice]:
        """All changes that would make steps at least 2 % faster, the best first, each with its gain."""
        return advise(self._recorded_steps())

    def explain(self) -> str:
        """One sentence on what holds the steps back most, and what to change."""
        return explain(self._recorded_steps())

    def report(self, title: str) -> Report:
        """All that is known of the steps, as `gpipe.profiling` draws it and keeps it."""
        steps, memory = self._steps(title), [asdict(held) for held in self.memory().values()]
        known = len(memory) == steps.timelines[0].ranks  # of other processes it is not
        sizes = ({name: size for name, size in held.items() if size is not None} for held in memory if known)
        return replace(
            steps,
            shares=self.breakdown().shares,
            sentence=self.explain(),
            memory=tuple(sizes),
            predicted_memory=self._pipe.prediction.peak_bytes or (),
        )

    def _steps(self, title: str) -> Report:
        """The steps alone, and what was predicted."""
        if not (timelines := tuple(self.timelines)):
            raise ValueError(NOTHING)
        prediction = self._pipe.prediction
        is_timed = prediction.unit == "seconds" and any(timeline.is_step for timeline in timelines)
        return Report(title, timelines=timelines, predicted=prediction.timeline if is_timed else None)

    def memory(self) -> dict[int, Held]:
        """What each rank of this process held when it held most; activations if `record(pipe, memory=True)` watched.

        Gradients are counted as of all parameters that want one, as they will be; optimizers that have been stepped.
        """
        states, peaks = list(self._states.values()), {} if self._watches is None else self._watches.peaks()
        return {rank: held(modules, states, peaks.get(rank)) for rank, modules in sorted(self._layers().items())}

    def metrics(self) -> dict[str, float]:
        """What the recorded steps took as plain numbers by name, means over them, for a tracker.

        Times are in seconds, sizes in bytes; docs/reference/data-formats.md has all names. What is not known is left
        out; of memory a process has that of its own ranks.

        >>> import torch, gpipe
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
        >>> with gpipe.record(pipe) as recording:
        ...     loss = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
        >>> numbers = recording.metrics()
        >>> numbers["steps"], numbers["loss"] == loss.item(), 0 < numbers["share/forward"] < 1
        (1.0, True, True)
        """
        losses = [float(loss) for loss in self.losses]
        steps = replace(self._steps(""), predicted_memory=self._pipe.prediction.peak_bytes or ())
        return metrics_of(steps, losses, self.messages(), self.memory())

    def messages(self) -> list[Message]:
        """What crossed between processes, of all ranks: each message at both ends, each reduction on each rank.

        Of a pipe in one process there are none.
        """
        return messages_of(self.runs)

    def end(self) -> None:
        super().end()
        if self._watches is not None:
            self._watches.end(self._layers())

    def receive(self, receive: Work, run: Run, rank: Rank, step: CompiledAction) -> None:
        super().receive(receive, run, rank, step)
        if self._watches is not None:
            self._watches.taken(rank, step)

    def perform(self, perform: Work, run: Run, rank: Rank, step: CompiledAction) -> None:
        if self._watches is None:
            super().perform(perform, run, rank, step)
            return
        self._watches.works(rank, step)
        with self._watches.by_rank[step.rank]:
            super().perform(perform, run, rank, step)
        self._watches.worked(run, rank, step)

    def _layers(self) -> dict[int, list[nn.Module]]:
        engine = self._pipe._processes.engine
        layers: dict[int, list[nn.Module]] = {}
        for stage in engine.local:
            layers.setdefault(engine.placement[stage.index], []).extend(layer.module for layer in stage.layers)
        return layers

    def save(self, path: str | Path) -> Path:
        """Writes the steps as `.svg` or `.png` (the typical one, with what was predicted), `.json` (all), or `.html`.

        `.jsonl` has `messages()`, a JSON object a line behind one that names the schema, of all ranks.

        Raises:
            ImportError: A PNG is wanted, and resvg-py is missing: the extra `plots` brings it.
            ValueError: No step was recorded, or the suffix is another.
        """
        path = Path(path)
        report = self._steps(path.stem)
        match path.suffix:
            case ".svg" | ".png":
                write_picture(path, typical_svg(report))
            case ".json":
                path.write_text(trace_json(report.timelines))
            case ".html":
                path.write_text(report_html(self.report(path.stem)), encoding="utf-8")
            case ".jsonl":
                write_messages(path, self.messages())
            case _:
                raise ValueError(f"{path} has the suffix {path.suffix!r}; give one of {SUFFIXES}")
        return path

    def __str__(self) -> str:
        if not self.runs:
            return "no steps recorded"
        return "\n".join(filter(None, (str(self.breakdown()), self.beside_prediction())))

    def _repr_html_(self) -> str | None:
        return notebook_html("recording", self)

    def beside_prediction(self) -> str:
        """What was predicted of a step beside what it took, and why, if that is another; empty without prediction."""
        prediction, steps = self._pipe.prediction, [timeline for timeline in self.timelines if timeline.is_step]
        if prediction.unit != "seconds" or not steps:
            return ""
        why, others = "", self._others()
        if self._driver == "lockstep" and prediction.program.ranks > 1:
            why = "all ranks run in one thread (driver='lockstep')"
        elif self._watches is not None:
            why = "memory was watched, which takes time"
        elif others is not None and others.cores > SOME_CORES:
            why = str(others)
        return compare(steps, prediction.timeline, why_longer=why)

    @property
    def _driver(self) -> str:
        processes = self._pipe._processes
        return "process" if processes.position is not None else "threads" if processes.engine.threaded else "lockstep"

    def _shared_lock(self) -> list[str]:
        """The finding that ranks wait for each other's Python; on accelerators actions are no time of the host's."""
        others, stages = self._others(), self._pipe._processes.engine.local
        on_host = self._driver == "threads" and all(stage.device.type == "cpu" for stage in stages)
        if others is None or not self.runs or not on_host:
            return []
        spans = [span for run in self.runs for span in run.timeline.spans if span.action.kind in COMPUTE]
        wall = sum(run.timeline.seconds for run in self.runs)
        busy, used = sum(span.seconds for span in spans) / wall, sum(run.cpu for run in self.runs) / wall
        return shared_lock(self.runs[0].timeline.ranks, busy, used, others)

    def _recorded_steps(self, steps: Sequence[Timeline] = ()) -> RecordedSteps:
        """Some of the steps, or all training steps, if there are any: evaluations between have other tables."""
        steps, plan = steps or steps_among(self.timelines), self._pipe.plan
        return RecordedSteps(
            steps,
            breakdown(steps),
            plan.partition,
            self._driver,
            self._others(),
            micro_batches=plan.micro_batches * plan.slices,
            recomputes=plan.recomputes,
            measured=plan.measured,
        )

    def _others(self) -> OtherProcesses | None:
        """What other processes used; of several processes of a pipe that is not known."""
        return self._meter.others() if self._pipe._processes.position is None else None

    def _end_update(self, optimizer: Optimizer) -> None:
        start = self._begun.pop() if self._begun else time.perf_counter()
        self._states[id(optimizer)] = optimizer.state
        if not self._begun:
            self._updates.append((start, time.perf_counter()))


def metrics_of(
    steps: Report, losses: Sequence[float], messages: Sequence[Message], held: Mapping[int, Held]
) -> dict[str, float]:
    """The numbers of some steps, and what was predicted; docs/reference/data-formats.md has all names."""
    found, runs = breakdown(steps.timelines), len(steps.timelines)
    numbers: dict[str, float] = {"steps": found.steps, "step_seconds": found.seconds, "table_bubble": found.theory}
    if losses:
        numbers["loss"] = fmean(losses)
    if (typical := steps.timelines[steps.typical]).is_step:
        numbers["pipeline_seconds"] = typical.seconds
    if steps.predicted is not None:
        numbers["predicted_seconds"] = steps.predicted.seconds
    for name, kind in (("sent_bytes", "send"), ("reduced_bytes", "reduce")):
        numbers[name] = sum(message.bytes for message in messages if message.kind == kind) / runs
    parts: dict[str, Mapping[str, float]] = {
        "share": {name.replace(" ", "_"): found.shares.get(name, 0.0) for name in MEANING},
        "bubble": found.bubble,
        "busy": _by("rank", found.busy),
        "stage_seconds": _by("stage", found.stage_seconds),
        "memory_bytes": {f"rank_{rank}": one.total for rank, one in held.items() if one.activations is not None},
        "predicted_memory_bytes": _by("rank", steps.predicted_memory),
    }
    numbers |= {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
    return {name: float(value) for name, value in numbers.items()}


def _by(what: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{what}_{at}": value for at, value in enumerate(values)}


def record(pipe: "GPipe", *, keep: int = KEPT, memory: bool = False) -> Recording:
    """Records what each rank does when, from now on; inside of a `with`, or until `stop()`.

    It costs two readings of a clock for each action, and nothing once it has stopped. In several processes all
    record at once, and each has the timelines of all. A recording that begins while another is on has the steps from
    then on, until it stops; the other goes on behind it.

    Args:
        pipe: Whose steps and calls.
        keep: How many of the last are kept.
        memory: Whether activations are watched too, for `recording.memory()`; steps are slower by it.

    Raises:
        TypeError: It is no pipe.
        ValueError: `keep` is no number of steps.

    Example:
        >>> import torch, gpipe
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
        >>> recording = gpipe.record(pipe)
        >>> for _ in range(3):
        ...     _ = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
        >>> print(recording)  # doctest: +ELLIPSIS
        time went to       share        ms  which is
        forward ...
    """
    if not hasattr(pipe, "recorder"):
        raise TypeError(NOT_A_PIPE.format(kind=type(pipe).__name__))
    if not is_count(keep):
        raise ValueError(f"keep={keep!r}: how many of the last steps are kept, 1 or more")
    return Recording(pipe, keep, memory=memory)
