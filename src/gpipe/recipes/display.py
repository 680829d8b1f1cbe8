"""What the terminal shows of a training: how far it is, each epoch's line, and where the time went."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import gpipe
from gpipe.plan.timeline import Timeline, merge
from gpipe.report import breakdown_table


@dataclass(frozen=True)
class Times:
    """The recorded steps, with the seconds of a step of the plain loop beside them."""

    timelines: Sequence[Timeline]
    plain_seconds: float
    bubble: float  # if stages were equal


class Display:
    """Writes to a console; a progress bar with the time left shows only on a terminal, never in a log."""

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
        self._task = self._progress.add_task("", total=epochs * steps, start=False)

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

    def epoch_ended(self, epoch: int, loss: float, accuracy: float) -> None:
        """Writes the epoch's line; nothing in it depends on the number of partitions."""
        width = len(str(self._epochs))
        self.say(f"epoch {epoch:{width}}/{self._epochs}  loss {loss!r:<22}  held-out accuracy {accuracy:.2%}")

    def report(self, times: Times, out: Path) -> None:
        """Says where the time of the recorded steps went, and how the plain loop compares."""
        whole = fmean(timeline.seconds + sum(timeline.other.values()) for timeline in times.timelines)
        own = median(timeline.seconds for timeline in times.timelines)
        ranks, steps = times.timelines[0].ranks, len(times.timelines)
        self.say(f"\nWhere a step's time went, on {ranks} ranks, mean of the {steps} steps of the last epoch:")
        self._console.print(breakdown_table(merge(times.timelines), whole))
        self.say(f"bubble in theory, equal stages     {times.bubble:.1%}")
        self.say(f"forward and backward, pipelined    {own * 1000:.1f} ms")
        plain = f"{times.plain_seconds * 1000:.1f} ms: {times.plain_seconds / own:.2f} x"
        self.say(f"forward and backward, plain loop   {plain} (the same layers, one thread, no remat)")
        self.say(f"\n{out}: metrics.jsonl, model.safetensors, timeline.svg, trace.json (for ui.perfetto.dev)")

    def say(self, text: str) -> None:
        """Writes a line as it is, neither wrapped nor colored."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
