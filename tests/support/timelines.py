"""Timelines to draw: a simulated pipeline, with transfers that the simulator does not show; a report of them."""

from gpipe.profiling import Report
from gpipe.schedule.action import Action, Kind, Route
from gpipe.schedule.timeline import Span, Timeline


def pipelined(ranks: int, micro_batches: int, t: float = 0.01) -> Timeline:
    """Fill-drain with recompute; forwards and recomputes take t, backwards 2t, sends t/10."""
    spans: list[Span] = []
    for rank in range(ranks):
        late = (ranks - 1 - rank) * 3 + (ranks - 1 + micro_batches)
        for m in range(micro_batches):
            start = (rank + m) * t
            spans.append(Span(rank, Action(Kind.FORWARD, rank, m), start, start + t))
            if rank + 1 < ranks:
                spans.append(
                    Span(rank, Action(Kind.SEND, rank, m, Route(rank, rank + 1)), start + t, start + 1.1 * t)
                )
            start = (late + 3 * (micro_batches - 1 - m)) * t
            spans.append(Span(rank, Action(Kind.RECOMPUTE, rank, m), start, start + t))
            spans.append(Span(rank, Action(Kind.BACKWARD, rank, m), start + t, start + 3 * t))
    end = max(span.end for span in spans)
    return Timeline(ranks, tuple(spans), end, other={"data": t, "weight update": t / 2})


def full(ranks: int = 3, micro_batches: int = 4, steps: int = 3) -> Report:
    """A report in which nothing is missing."""
    timelines = tuple(pipelined(ranks, micro_batches, t=0.01 * (1 + step)) for step in range(steps))
    return Report(
        "three ranks",
        {"partitions": ranks, "remat": "always"},
        timelines,
        pipelined(ranks, micro_batches, t=0.015),
        {"forward": 0.3, "backward": 0.5, "bubble": 0.2},
        tuple({"weights": 2**20 * (1 + rank), "inside": 2**21} for rank in range(ranks)),
        (2.5, 1.25, float("nan"), 0.5),
        "epoch",
        "Rank 1 is slow.",
        tuple(3 * 2**20 for _ in range(ranks)),
    )
