"""What is recorded of an epoch, and what the terminal shows of a training."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

import gpipe
from gpipe.recipes.job import Epoch
from gpipe.schedule.action import Kind

T = TypeVar("T")
KEPT = 100
"""Steps."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """Recordings of an epoch.

    Attributes:
        steps: When what was done; in all steps but the first, if there are others.
        memory: What was held in the first step; None where it is the only one.
    """

    steps: gpipe.Recording
    memory: gpipe.Recording | None

    @classmethod
    def of(cls, pipe: gpipe.GPipe, steps: int) -> Self:
        """Begins to record the last of so many steps."""
        time = gpipe.record(pipe, keep=min(steps, KEPT))
        return cls(time, gpipe.record(pipe, memory=True) if steps > 1 else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_watching()
        self.steps.stop()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterates over the mini-batches; memory is watched until the second is asked for."""
        for batch in self.steps.loading(batches):
            yield batch
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self.memory is not None:
            self.memory.stop()

    @property
    def held(self) -> tuple[Mapping[str, int], ...]:
        """The bytes of each rank at its peak, by what they were for; nothing where other processes have ranks."""
        return (self.memory or self.steps).report("").memory


NOTICEABLE = 1.1
"""Times as long as alone."""


def watched(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterates over items; meanwhile a terminal shows how far it is, and the time left.

    Args:
        items: Of any kind.
        what: Is being done.
        total: How many items there are; by default as many as their length says.

    >>> list(watched([1, 2], "counting"))
    [1, 2]
    """
    console = Console(stderr=True)
    silent = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    return iter(track(items, what, total, console=console, transient=True, disable=silent))


class Display:
    """Writes to a console; a progress bar with the time left shows only on a terminal, never in a log.

    Args:
        console: Where.
        epochs: How many there are in all.
        steps: How many there are in all.
    """

    def __init__(self, console: Console, epochs: int, steps: int) -> None:
        self._console = console
        self._epochs = epochs
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._progress.add_task("", total=steps, start=False)

    @contextmanager
    def training(self, name: str, pipe: gpipe.GPipe, done: int = 0) -> Iterator[None]:
        """Says what is trained, then shows the progress bar, so many steps on, until the end."""
        self.say(name)
        self.say(pipe.summary())
        with self._progress:
            self._progress.start_task(self._task)
            self._progress.advance(self._task, done)
            yield

    def step_ended(self) -> None:
        """Moves the bar on by a step."""
        self._progress.advance(self._task)

    def epoch_ended(self, epoch: Epoch) -> None:
        """Writes the epoch's line; nothing in it depends on the number of partitions."""
        width = len(str(self._epochs))
        measured = ", ".join(f"{name} {_amount(name, value)}" for name, value in epoch.measured.items())
        self.say(f"epoch {epoch.epoch:{width}}/{self._epochs}  loss {epoch.loss:<10.6g}  held-out {measured}")

    def report(self, recorded: Recorded, plain_seconds: float | None, out: Path) -> None:
        """Says where the time of the recorded steps went, how the plain loop compares, and what to change."""
        recording = recorded.steps
        own = median(timeline.seconds for timeline in recording.timelines)
        in_turn = median(sum(map(step.busy, range(step.ranks))) for step in recording.timelines)
        self.say(f"\nWhere a step's time went, in the last epoch:\n{recording}\n")
        self.say(f"forward and backward, pipelined       {own * 1000:8.1f} ms")
        if plain_seconds is not None:
            plain = f"{plain_seconds / own:.2f} x (the same layers, one thread, no remat)"
            self.say(f"forward and backward, plain loop      {plain_seconds * 1000:8.1f} ms: {plain}")
        self.say(f"one partition after another (naive)   {in_turn * 1000:8.1f} ms: {in_turn / own:.2f} x")
        if plain_seconds is not None and (shared := _price_of_company(recording, plain_seconds)):
            self.say(shared)
        if share := _largest_share(recorded.held):
            self.say(share)
        self.say(
            f"\n{out}: metrics.jsonl, model.safetensors, timeline.svg, trace.json (for ui.perfetto.dev), report.json"
        )
        self.say(f"a page of all this, for a browser: gpipe report {shlex.quote(str(out))}")
        self.say(f"\n{recording.explain()}")

    def say(self, text: str) -> None:
        """Writes a line as it is, neither wrapped nor colored."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _amount(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"


def _price_of_company(recording: gpipe.Recording, plain_seconds: float) -> str:
    """How much longer layers take while other ranks compute than alone, where that says why a pipeline gives less."""
    bare = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    together = median(
        sum(span.seconds for span in step.spans if span.action.kind in bare) for step in recording.timelines
    )
    times, ranks = together / plain_seconds, recording.timelines[0].ranks
    if ranks == 1 or times < NOTICEABLE:
        return ""
    return (
        f"the same layers take {times:.2f} x as long with {ranks} ranks at work as in the plain loop: they share "
        f"cores, caches and memory, and whatever else runs on this machine has its part"
    )


def _largest_share(held: Sequence[Mapping[str, int]]) -> str:
    """How much of all memory the rank with most of it holds."""
    totals = [sum(parts.values()) / 2**20 for parts in held]
    if not totals:
        return ""
    share = f"{max(totals):.1f} of {sum(totals):.1f} MiB, {max(totals) / sum(totals):.0%}"
    return f"weights, gradients, optimizer, activations: {share} in the largest partition"
