"""Writes results: JSON with all measurements, and Markdown to read."""

import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

RESULTS = Path(__file__).parent / "results"

Item = TypeVar("Item")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table with the first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 4) -> str:
    """Returns the median with the minimum and maximum: `12.3 (11.9-13)`."""
    low, middle, high = (f"{scale * v:.{digits}g}" for v in (min(values), median(values), max(values)))
    return f"{middle} ({low}-{high})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the median, by bootstrap.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def describe(facts: Mapping[str, str]) -> str:
    """Returns two lines about the machine and the software of a result."""
    raised = "" if facts["priority"] == "0" else f", its session at nice {facts['priority']}"
    return (
        f"{facts['machine']}. Python {facts['python']}, torch {facts['torch']}, torchgpipe {facts['torchgpipe']}, "
        f"DeepSpeed {facts['deepspeed']}.\n"
        f"`{facts['command']}`{raised}, at commit {facts['commit']}, {facts['date']}."
    )


def of(count: int, total: int) -> str:
    """Formats a count out of a total: `0 of 30`."""
    return f"{count} of {total}" if total else "-"


def with_time_left(items: Sequence[Item], title: str) -> Iterator[Item]:
    """Iterates over items, and prints after each how many are done and the estimated remaining time."""
    start = time.monotonic()
    for done, item in enumerate(items, 1):
        before = time.monotonic()
        yield item
        now = time.monotonic()
        left = (now - start) / done * (len(items) - done)
        print(
            f"{title}: {done} of {len(items)}, {left / 60:.1f} minutes left; {now - before:.1f} s: {item}", flush=True
        )


def write(name: str, markdown: str, data: object, *, aloud: bool = True) -> None:
    """Writes a result. A shortened run replaces the previous result, too."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("md", markdown.rstrip()), ("json", json.dumps(data, indent=1))):
        part = RESULTS / f"{name}.{suffix}.part"
        part.write_text(text + "\n")
        part.replace(RESULTS / f"{name}.{suffix}")
    if aloud:
        print(markdown)
