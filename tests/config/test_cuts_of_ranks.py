"""Where ranks have several stages, cuts and findings go by rank, and by the step that is predicted."""

from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
from torch import nn

import gpipe
from tests.support.planned import pipe_by_costs

SCHEDULES = ["zb_v", "interleaved", "v_half"]
KNOWN = [
    [20, 20, 20, 20, 5, 5],
    [30, 10, 5, 5, 15, 15],
    [8, 1, 1, 1, 1, 8, 4, 4],
    [4, 4, 4, 4, 4, 4, 10],
]


def cut(costs: list[float], partitions: Any, schedule: str, remat: str = "never") -> gpipe.GPipe:
    layers = [nn.Linear(2, 2) for _ in costs]
    return pipe_by_costs(layers, partitions, 8, costs=costs, schedule=schedule, remat=remat)


def seconds(costs: list[float], partitions: Any, schedule: str, remat: str = "never") -> float:
    return cut(costs, partitions, schedule, remat).prediction.timeline.seconds


def every_split(layers: int, stages: int) -> list[list[int]]:
    return [
        [end - first for first, end in pairwise((0, *inner, layers))]
        for inner in combinations(range(1, layers), stages - 1)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("costs", [*KNOWN, None], ids=str)
def test_no_cuts_of_eight_layers_are_faster(costs: list[float] | None, schedule: str) -> None:
    draw = Random(schedule)
    costs = costs or [draw.choice([0.1, 1, 2, 5, 20]) for _ in range(8)]
    remat = draw.choice(["never", "always"])
    found = seconds(costs, 2, schedule, remat)
    assert found <= min(seconds(costs, cuts, schedule, remat) for cuts in every_split(len(costs), 4)) * (1 + 1e-9)


def test_balanced_ranks_are_not_criticized() -> None:
    pipe = cut([20, 20, 20, 20, 5, 5], [2, 2, 1, 1], "zb_v")  # ranks of 45 and 45, stages of 40, 40, 5 and 5
    assert pipe.findings == []
    assert "the slowest rank costs 0.0% more than the mean" in pipe.summary()
    (finding,) = cut([1, 1, 1, 1, 1, 20], [2, 2, 1, 1], "interleaved").findings
    assert finding.startswith("Rank 1 costs 1.8 times the mean")
    assert "Its largest layer is 5, with 91% of its cost" in finding
