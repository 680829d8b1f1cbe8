"""Implements `gpipe.record`: timelines of steps, their breakdown, and advice."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpipe.errors import is_count
from gpipe.features.recorder import Interval, Recorder
from gpipe.planner.other_processes import SOME_CORES, Meter, OtherProcesses
from gpipe.planner.search.device import PRESETS, Device
from gpipe.planner.watch import Watch
from gpipe.profiling import Report, report_html, trace_json, typical_svg, write_picture
from gpipe.profiling.advice import Advice, RecordedSteps, advise, compare, explain, shared_lock
from gpipe.profiling.breakdown import (
    MEANING,
    NO_STEPS,
    Breakdown,
    breakdown,
    measure_throughput,
    throughput_texts,
    windows,
)
from gpipe.profiling.memory import Held, Watches, measure_held
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
NOT_A_PIPE = "gpipe.record: pipe is a {kind}. Pass the gpipe.GPipe to record."


class Recording(Recorder):
    """The recorded steps of a pipe, which `gpipe.record` returns. `print` shows a breakdown of their time.

    Methods that summarize steps raise a ValueError if no step was recorded.

    >>> import torch, gpipe
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
    >>> with gpipe.record(pipe) as recording:
    ...     _ = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
    >>> len(recording.timelines), round(sum(recording.breakdown().shares.values()), 6)
    (1, 1.0)
    >>> recording  # doctest: +ELLIPSIS
    Recording(1 step, ... s on average, stopped)
    """

    def __init__(
        self, pipe: "GPipe", keep: int, *, memory: bool = False, flops_per_row: float = 0.0, peak: float = 0.0
    ) -> None:
        super().__init__(keep)
        self._flops_per_row, self._peak = flops_per_row, peak
        self._watches = Watches() if memory else None
        if self._watches is not None:
            with Watch():  # The first use takes seconds, which should not count as time of a layer.
                torch.zeros(1).add(1)
        self._states: dict[int, Mapping[Tensor, Any]] = {}
        self._pipe, self._before = pipe, pipe.recorder
        self._updates: deque[Interval] = deque(maxlen=keep)
        self._loads: deque[Interval] = deque(maxlen=keep)
        self._thread = threading.get_ident()
        self._begun: list[float] = []  # Starts of updates. One optimizer may call another.
        self._meter = Meter()
        own = weakref.proxy(self)  # torch's hooks for all optimizers should not keep the pipe alive.
        self._hooks = ExitStack()
        self._hooks.enter_context(register_optimizer_step_pre_hook(lambda *_: own._begun.append(time.perf_counter())))
        self._hooks.enter_context(register_optimizer_step_post_hook(lambda updated, *_: own._end_update(updated)))
        weakref.finalize(self, self._hooks.close)
        self._is_on = True
        pipe.recorder = self

    def stop(self) -> None:
        """Stops recording. The recorded steps stay available."""
        self._is_on = False
        self._hooks.close()
        if self._pipe.recorder is self:
            self._pipe.recorder = self._before
        self._meter.stop()
        self._pipe._findings.report(self._shared_lock())

    def __enter__(self) -> Self:
        if not self._is_on:
            raise ValueError("This recording has been stopped. Call gpipe.record(pipe) to start a new one.")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterates over mini-batches. Records the time for which the loop waits for data as the part `data`."""
        iterator, start = iter(batches), time.perf_counter()
        for batch in iterator:
            if threading.get_ident() == self._thread:  # A different thread loads ahead, so the loop does not wait.
                self._loads.append((start, time.perf_counter()))
            yield batch
            start = time.perf_counter()

    @property
    def timelines(self) -> list[Timeline]:
        """The timelines of all runs. A `step` is one run; a call and its backward pass are two.

        The attribute `other` of a timeline splits the time between its end and the next run into the parts of the
        breakdown.
        """
        return windows(list(self.runs), list(self.inside), list(self._updates), list(self._loads))

    def breakdown(self) -> Breakdown:
        """Divides the wall time of the recorded steps into parts. `print` shows the result as a table."""
        return breakdown(self.timelines)

    def advice(self) -> list[Advice]:
        """Returns all changes that would make steps at least 2 % faster, with the largest speedup first."""
        return advise(self._recorded_steps())

    def explain(self) -> str:
        """Returns a text about the most useful change and the reason for the change."""
        return explain(self._recorded_steps())

    def report(self, title: str) -> Report:
        """Returns a report of the steps, which `gpipe.profiling` can draw and save."""
        steps, memory = self._steps(title), [asdict(held) for held in self.memory().values()]
        known = len(memory) == steps.timelines[0].ranks  # The memory of other processes is unknown.
        sizes = ({name: size for name, size in held.items() if size is not None} for held in memory if known)
        return replace(
            steps,
            shares=self.breakdown().shares,
            sentence=self.explain(),
            memory=tuple(sizes),
            predicted_memory=self._pipe.prediction.peak_bytes or (),
        )

    def _steps(self, title: str) -> Report:
        """Returns a report that contains only the steps and their prediction."""
        if not (timelines := tuple(self.timelines)):
            raise ValueError(NO_STEPS)
        prediction = self._pipe.prediction
        is_timed = prediction.unit == "seconds" and any(timeline.is_step for timeline in timelines)
        predicted = prediction.timeline if is_timed else None
        return Report(title, timelines=timelines, predicted=predicted, throughput=self._throughput(timelines))

    def _throughput(self, timelines: Sequence[Timeline]) -> dict[str, float]:
        # Ranks of one process may share a device.
        in_process = self._pipe._processes.position is None
        devices = len(set(self._pipe.devices)) if in_process else timelines[0].ranks
        sizes = [(run.rows, run.tokens) for run in self.runs]
        return measure_throughput(timelines, sizes, self._flops_per_row, self._peak * devices)

    def memory(self) -> dict[int, Held]:
        """Returns the peak memory of each rank of this process, with activations if `record(pipe, memory=True)`.

        Gradients of trainable parameters count even before they exist. The state of an optimizer counts after the
        first `step` of the optimizer. With `weights="host"`, weights and gradients count while they are on the
        device, as parts of the activations.
        """
        states, peaks = list(self._states.values()), {} if self._watches is None else self._watches.peaks()
        streaming = [None if self._pipe.plan.resident is None else device for device in self._pipe.devices]
        return {
            rank: measure_held(modules, states, peaks.get(rank), streaming[rank])
            for rank, modules in sorted(self._layers().items())
        }

    def metrics(self) -> dict[str, float]:
        """Returns a dict of means over the recorded steps, for an experiment tracker.

        Times are in seconds and sizes in bytes. docs/reference/data-formats.md lists all names. Unknown values are
        omitted. A process knows only the memory of its own ranks.

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
        """Returns the messages and reductions of all ranks. The list is empty for a pipe in one process.

        The list contains each message twice, once from the sender and once from the receiver. The list contains each
        reduction once per rank.
        """
        return messages_of(self.runs)

    def end(self) -> None:
        super().end()
        if self._watches is not None:
            self._watches.end(self._layers())

    def receive(self, receive: Work, run: Run, rank: Rank, step: CompiledAction) -> None:
        super().receive(receive, run, rank, step)
        if self._watches is not None:
            self._watches.after_receive(rank, step)

    def perform(self, perform: Work, run: Run, rank: Rank, step: CompiledAction) -> None:
        if self._watches is None:
            super().perform(perform, run, rank, step)
            return
        self._watches.before_action(rank, step)
        with self._watches.by_rank[step.rank]:
            super().perform(perform, run, rank, step)
        self._watches.after_action(run, rank, step)

    def _layers(self) -> dict[int, list[nn.Module]]:
        engine = self._pipe._processes.engine
        layers: dict[int, list[nn.Module]] = {}
        for stage in engine.local:
            layers.setdefault(engine.placement[stage.index], []).extend(layer.module for layer in stage.layers)
        return layers

    def save(self, path: str | Path) -> Path:
        """Saves the recording in the format of the suffix, and returns the path.

        Args:
            path: The path of the file. An existing file is replaced. The suffix of the path selects the format:

                - `.svg` or `.png`: a picture of the median step and its prediction.
                - `.json`: a trace of all steps, for ui.perfetto.dev.
                - `.html`: a page with all information.
                - `.jsonl`: the messages of all ranks, one JSON object per line after a line that names the schema.

        Returns:
            The path of the file as a `Path`.

        Raises:
            ImportError: If the file is a PNG, and resvg-py is not installed (the extra `plots`).
            ValueError: If no step was recorded, or if the suffix is unknown.
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
                raise ValueError(f"{path} has the suffix {path.suffix!r}. Use .svg, .png, .json, .html or .jsonl.")
        return path

    def __repr__(self) -> str:
        """Returns the number of recorded steps and their mean time. `print` shows the breakdown."""
        mean = f", {fmean(run.timeline.seconds for run in self.runs):.4g} s on average" if self.runs else ""
        count = f"{len(self.runs)} step{'s' * (len(self.runs) != 1)}"
        return f"Recording({count}{mean}, {'recording' if self._is_on else 'stopped'})"

    def __str__(self) -> str:
        if not self.runs:
            return "No steps were recorded."
        rates = ", ".join(throughput_texts(self._throughput(self.timelines)))
        throughput = f"throughput: {rates}" if rates else ""
        return "\n".join(filter(None, (str(self.breakdown()), throughput, self.compare_with_prediction())))

    def _repr_html_(self) -> str | None:
        return notebook_html("recording", self)

    def compare_with_prediction(self) -> str:
        """Returns a text with the measured and predicted time of a step, and the reason if the times differ.

        Returns an empty text if the prediction is not in seconds, or if no training step was recorded.
        """
        prediction, steps = self._pipe.prediction, [timeline for timeline in self.timelines if timeline.is_step]
        if prediction.unit != "seconds" or not steps:
            return ""
        reason, others = "", self._others()
        if self._driver == "lockstep" and prediction.program.ranks > 1:
            reason = "all ranks run in one thread (driver='lockstep')"
        elif self._watches is not None:
            reason = "recording memory takes time"
        elif others is not None and others.cores > SOME_CORES:
            reason = str(others)
        return compare(steps, prediction.timeline, why_longer=reason)

    @property
    def _driver(self) -> str:
        processes = self._pipe._processes
        return "process" if processes.position is not None else "threads" if processes.engine.threaded else "lockstep"

    def _shared_lock(self) -> list[str]:
        """Returns a finding if rank threads wait for the interpreter lock.

        Returns no finding with accelerators, because the time of an action on the host is then unknown.
        """
        others, stages = self._others(), self._pipe._processes.engine.local
        on_host = self._driver == "threads" and all(stage.device.type == "cpu" for stage in stages)
        if others is None or not self.runs or not on_host:
            return []
        spans = [span for run in self.runs for span in run.timeline.spans if span.action.kind in COMPUTE]
        wall = sum(run.timeline.seconds for run in self.runs)
        busy, used = sum(span.seconds for span in spans) / wall, sum(run.cpu for run in self.runs) / wall
        return shared_lock(self.runs[0].timeline.ranks, busy, used, others)

    def _recorded_steps(self, steps: Sequence[Timeline] = ()) -> RecordedSteps:
        """Returns the input of `advise`.

        By default, only training steps count if any exist, because evaluation steps run different programs.
        """
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
        """Returns the cores that other processes used. Returns None for a pipe in several processes."""
        return self._meter.others() if self._pipe._processes.position is None else None

    def _end_update(self, optimizer: Optimizer) -> None:
        start = self._begun.pop() if self._begun else time.perf_counter()
        self._states[id(optimizer)] = optimizer.state
        if not self._begun:
            self._updates.append((start, time.perf_counter()))


def metrics_of(
    steps: Report, losses: Sequence[float], messages: Sequence[Message], held: Mapping[int, Held]
) -> dict[str, float]:
    """Computes the result of `Recording.metrics`. docs/reference/data-formats.md lists all names."""
    parts, runs = breakdown(steps.timelines), len(steps.timelines)
    numbers: dict[str, float] = {"steps": parts.steps, "step_seconds": parts.seconds, "table_bubble": parts.theory}
    if losses:
        numbers["loss"] = fmean(losses)
    if (typical := steps.timelines[steps.typical]).is_step:
        numbers["pipeline_seconds"] = typical.seconds
    numbers |= steps.throughput
    if steps.predicted is not None:
        numbers["predicted_seconds"] = steps.predicted.seconds
    for name, kind in (("sent_bytes", "send"), ("reduced_bytes", "reduce")):
        numbers[name] = sum(message.bytes for message in messages if message.kind == kind) / runs
    groups: dict[str, Mapping[str, float]] = {
        "share": {name.replace(" ", "_"): parts.shares.get(name, 0.0) for name in MEANING},
        "bubble": parts.bubble,
        "busy": _by("rank", parts.busy),
        "stage_seconds": _by("stage", parts.stage_seconds),
        "memory_bytes": {f"rank_{rank}": own.total for rank, own in held.items() if own.activations is not None},
        "predicted_memory_bytes": _by("rank", steps.predicted_memory),
    }
    numbers |= {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
    return {name: float(value) for name, value in numbers.items()}


def _by(what: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{what}_{at}": value for at, value in enumerate(values)}


def record(
    pipe: "GPipe",
    *,
    keep: int = KEPT,
    memory: bool = False,
    flops_per_row: float | None = None,
    device: Device | str | None = None,
) -> Recording:
    """Starts recording a timeline of the pipe's steps and calls. Stops at the end of a `with` block, or at `stop()`.

    Recording reads the clock twice per action. A stopped recording costs no time. With several processes, all
    processes must record. Each process receives the timelines of all ranks.

    Args:
        pipe: The pipe to record.
        keep: Number of most recent steps to keep. Default: 100.
        memory: Whether to also record activation memory for `recording.memory()`. Slows down steps. Default: False.
        flops_per_row: Model FLOPs of one row, forward and backward pass without recomputation, to report model FLOPs
            per second. Default: None, only rows per second are reported.
        device: The device of each rank, to report the MFU: a `gpipe.Device` with a `peak`, or the name of a preset,
            such as "h100". Requires `flops_per_row`. Default: None, the MFU is not reported.

    Returns:
        The recording.

    Raises:
        TypeError: If `pipe` is not a `GPipe`.
        ValueError: If `keep` is not an integer of at least 1, if `flops_per_row` is not a positive number, or if the
            peak of `device` is unknown.

    Note:
        If a second recording starts during a recording, only the second recording receives steps until it stops. Then
        the first recording continues.

    Example:
        >>> import torch, gpipe
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], partitions=2, micro_batches=2)
        >>> recording = gpipe.record(pipe)
        >>> for _ in range(3):
        ...     _ = pipe.step(torch.ones(4, 2), torch.ones(4, 1), torch.nn.functional.mse_loss)
        >>> print(recording)  # doctest: +ELLIPSIS
        part               share        ms  meaning
        forward ...
    """
    if not hasattr(pipe, "recorder"):
        raise TypeError(NOT_A_PIPE.format(kind=type(pipe).__name__))
    mistakes = []
    if not is_count(keep):
        mistakes.append(f"keep={keep!r} is invalid. Pass the number of steps to keep, an integer of at least 1.")
    is_number = type(flops_per_row) in (int, float) and isfinite(flops_per_row or 0.0)
    if flops_per_row is not None and not (is_number and flops_per_row > 0):
        mistakes.append(f"flops_per_row={flops_per_row!r} is invalid. Pass the model FLOPs of one row, a number > 0.")
    known = PRESETS.get(device) if isinstance(device, str) else device
    if device is not None and not (isinstance(known, Device) and known.peak):
        presets = ", ".join(PRESETS)
        mistakes.append(
            f"device={device!r} has no known peak. Pass gpipe.Device(peak=<FLOP/s>), or one of: {presets}."
        )
    if device is not None and flops_per_row is None:
        mistakes.append("device= has no effect without flops_per_row. Pass flops_per_row=<model FLOPs of one row>.")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    peak = known.peak if isinstance(known, Device) else 0.0
    return Recording(pipe, keep, memory=memory, flops_per_row=flops_per_row or 0.0, peak=peak)
