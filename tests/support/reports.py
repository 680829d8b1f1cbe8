"""A report in which nothing is missing."""

from gpipe.profiling import Report
from tests.support.timelines import pipelined


def full(ranks: int = 3, micro_batches: int = 4, steps: int = 3) -> Report:
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
