"""What is recorded of an epoch, and what the terminal shows of a training."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

import gpipe
from gpipe.recipes.prepare import Epoch
from gpipe.schedule.action import Kind

T = TypeVar("T")
KEPT = 100  # steps
NOTICEABLE = 1.1  # times as long as alone
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Recorded:
    """Recordings of an epoch of so many steps.

    Attributes:
        steps: When what was done; in all steps but the first, if there are others.
    """

    def __init__(self, pipe: gpipe.GPipe, steps: int) -> None:
        self.steps = gpipe.record(pipe, keep=min(steps, KEPT))
        self._first = gpipe.record(pipe, memory=True) if steps > 1 else self.steps

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterates over the mini-batches; memory is watched until the second is asked for."""
        try:
            for batch in self.steps.loading(batches):
                yield batch
                self._first.stop()
        finally:
            self._first.stop()
            self.steps.stop()

    @property
    def held(self) -> tuple[Mapping[str, int], ...]:
        """The bytes of each rank at its peak, by what they were for; nothing where other processes have ranks."""
        return self._first.report("").memory


def watched(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterates over items, `total` or as many as they have; a terminal shows how far it is, and the time left.

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
        measured = ", ".join(
            f"{name} {f'{value:.2%}' if name == 'accuracy' else f'{value:.4f}'}"
            for name, value in epoch.measured.items()
        )
        number = f"{epoch.epoch:{len(str(self._epochs))}}/{self._epochs}"
        self.say(f"epoch {number}  loss {epoch.loss:<10.6g}  held-out {measured}")

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
        if plain_seconds is not None:
            self._say_price_of_company(recording, plain_seconds)
        if totals := [sum(parts.values()) / 2**20 for parts in recorded.held]:
            share = f"{max(totals):.1f} of {sum(totals):.1f} MiB, {max(totals) / sum(totals):.0%}"
            self.say(f"weights, gradients, optimizer, activations: {share} in the largest partition")
        self.say(
            f"\n{out}: metrics.jsonl, model.safetensors, timeline.svg, trace.json (for ui.perfetto.dev), report.json"
        )
        self.say(f"a page of all this, for a browser: gpipe report {shlex.quote(str(out))}")
        self.say(f"\n{recording.explain()}")

    def _say_price_of_company(self, recording: gpipe.Recording, plain_seconds: float) -> None:
        """How much longer layers take beside other ranks than alone, where that is why a pipeline gives less."""
        together = median(
            sum(span.seconds for span in step.spans if span.action.kind in COMPUTES) for step in recording.timelines
        )
        times, ranks = together / plain_seconds, recording.timelines[0].ranks
        if ranks > 1 and times >= NOTICEABLE:
            self.say(
                f"the same layers take {times:.2f} x as long with {ranks} ranks at work as in the plain loop: they "
                "share cores, caches and memory, and whatever else runs on this machine has its part"
            )

    def say(self, text: str) -> None:
        """Writes a line as it is, neither wrapped nor colored."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
