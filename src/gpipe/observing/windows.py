"""Whose time it was between runs, by marks of when a caller was inside of the pipe, updated weights, loaded data.

inside   |--------------|                    |--------------|
run         |--------|                          |--------|
update                    |---|                               |---|
data                           |--------|
window   |----------------------------------|---------------------|     a run, and all until the next begins
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpipe.plan.timeline import Timeline
from gpipe.runtime.recorder import Interval, Run


def windows(
    runs: Sequence[Run], inside: Sequence[Interval], updates: Sequence[Interval], loads: Sequence[Interval]
) -> list[Timeline]:
    """The timelines of runs, each with the seconds that went by outside of it until the next began, by part.

    >>> runs = [Run(Timeline(1, (), 3.0), (1.0, 4.0)), Run(Timeline(1, (), 3.0), (11.0, 14.0))]
    >>> first, second = windows(runs, [(0.0, 5.0), (10.0, 15.0)], updates=[(5.0, 6.0)], loads=[(6.0, 9.5)])
    >>> first.other
    {'data': 3.5, 'weight update': 1.0, 'host': 2.0, 'between steps': 0.5}
    """
    if not runs:
        return []
    found = []
    entries = [_entry(run, inside) for run in runs]
    known = [end for _, end in (*inside, *updates, *(run.when for run in runs))]
    ends = [*entries[1:], max(known)]
    for run, start, end in zip(runs, entries, ends, strict=True):
        update, data = _within(updates, start, end), _within(loads, start, end)
        own = max(_within(inside, start, end), run.when[1] - run.when[0])
        host = max(0.0, own - run.timeline.seconds)
        between = max(0.0, end - start - run.timeline.seconds - host - update - data)
        other = {"data": data, "weight update": update, "host": host, "between steps": between}
        found.append(replace(run.timeline, other=other))
    return found


def _entry(run: Run, inside: Iterable[Interval]) -> float:
    """When the call began that a run is of; a backward by autograd is of none."""
    return next((start for start, end in inside if start <= run.when[0] <= end), run.when[0])


def _within(marks: Iterable[Interval], start: float, end: float) -> float:
    return sum(until - since for since, until in marks if start <= since < end)
