"""What a plan predicts from the costs of layers alone."""

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import place_recompute, place_transfers
from gpipe.schedule.partition import given
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import fill_drain
from gpipe.schedule.simulate import predict
from gpipe.schedule.timeline import bubble


def table(stages: int, micro_batches: int, remat: str | None = None) -> Program:
    program = Program.of(fill_drain(stages, micro_batches), micro_batches)
    return place_transfers(program if remat is None else place_recompute(program, [remat] * stages))  # type: ignore[list-item]


@settings(max_examples=30, deadline=None)
@for_all(stages=st.integers(1, 6), micro_batches=st.integers(1, 9), cost=st.sampled_from([3.0, 0.0, 0.1]))
def test_equal_stages_have_the_bubble_of_the_paper(stages: int, micro_batches: int, cost: float) -> None:
    plan = predict(given([1] * stages, [cost] * stages), table(stages, micro_batches))
    assert plan.bubble == pytest.approx(bubble(stages, micro_batches))
    unit = cost or 1.0  # costs of zero count as equal
    assert plan.timeline.seconds == pytest.approx(unit * (micro_batches + stages - 1))


def test_a_cost_holds_the_recompute_where_every_stage_recomputes() -> None:
    cut = given([1], [8.0])
    assert predict(cut, table(1, 5)).timeline.seconds == pytest.approx(5 * 8)
    assert predict(cut, table(1, 5, "always")).timeline.seconds == pytest.approx(5 * 8)
    assert predict(cut, table(1, 5, "except_last")).timeline.seconds == pytest.approx(5 * 8 - 2)


def test_bytes_are_predicted_where_they_were_counted() -> None:
    held = [StageCost(1.0, 2.0, boundary=2, inside=3, state=10)] * 2
    assert predict(given([2, 1], [1, 1, 1]), table(2, 4), held=held).peak_bytes == (10 + 4 * 5,) * 2
    assert predict(given([2, 1], [1, 1, 1]), table(2, 4)).peak_bytes is None
