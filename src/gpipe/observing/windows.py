"""Whose time it was between runs, by marks of when a caller was inside of the pipe, updated weights, loaded data.

inside   |--------------|                    |--------------|
run         |--------|                          |--------|
update                    |---|                               |---|
data                           |--------|
window   |----------------------------------|---------------------|     a run, and all until the next begins
"""

from collections.abc import Iterable, Iterator, Sequence
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
    entries = [_entry(run, inside) for run in runs]
    apart = _apart(inside, updates, loads)
    known = [end for _, end in (*inside, *updates, *(run.when for run in runs))]
    found = []
    for run, start, end in zip(runs, entries, [*entries[1:], max(known)], strict=True):
        began, ended = run.when
        rest = (start, began), (ended, end)
        host, update, data = (sum(_shared(marks, part) for part in rest) for marks in apart)
        between = sum(until - since for since, until in rest) - data - update - host
        host += max(0.0, ended - began - run.timeline.seconds)
        other = {"data": data, "weight update": update, "host": host, "between steps": max(0.0, between)}
        found.append(replace(run.timeline, other=other))
    return found


def _entry(run: Run, inside: Iterable[Interval]) -> float:
    """When the call began that a run is of, or another process began it; a backward by autograd is of no call."""
    began = run.when[0]
    return min(began, next((start for start, end in inside if start <= run.when[1] <= end), began))


def _apart(*each: Iterable[Interval]) -> list[list[Interval]]:
    """Marks of several kinds, each without what those before it cover: an optimizer may call the pipe, a loader both.

    >>> _apart([(1.0, 2.0)], [(0.0, 3.0)], [(2.5, 4.0)])
    [[(1.0, 2.0)], [(0.0, 1.0), (2.0, 3.0)], [(3.0, 4.0)]]
    """
    covered: list[Interval] = []
    found = []
    for marks in each:
        free = [piece for mark in marks for piece in _without(mark, covered)]
        found.append(free)
        covered = sorted((*covered, *free))
    return found


def _without(mark: Interval, covered: Iterable[Interval]) -> Iterator[Interval]:
    start, end = mark
    for since, until in covered:
        if until <= start or since >= end:
            continue
        if start < since:
            yield start, since
        start = max(start, until)
    if start < end:
        yield start, end


def _shared(marks: Iterable[Interval], part: Interval) -> float:
    return sum(max(0.0, min(mark[1], part[1]) - max(mark[0], part[0])) for mark in marks)
