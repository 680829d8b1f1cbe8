"""What waves say of ranks and micro-batches of any number is what the page, listed and simulated, says of few."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.schedule.cost import StageCost
from gpipe.schedule.program import Program
from gpipe.schedule.schedules.one_forward_one_backward import zb_h1
from gpipe.schedule.simulate import UNIT_COST, Simulator, simulate
from gpipe.schedule.waves import Waves


@st.composite
def stages(draw: st.DrawFn) -> StageCost:
    forward, inputs, weights = (float(draw(st.integers(1, 6))) for _ in range(3))
    sizes = dict(
        zip(("boundary", "inside", "working", "state"), (draw(st.integers(0, 9)) for _ in range(4)), strict=True)
    )
    send, back = (
        draw(st.integers(0, int(forward))),
        draw(st.integers(0, int(inputs))),
    )  # which never wait for each other
    return StageCost(forward, inputs + weights, inputs, weights, send=float(send), send_gradient=float(back), **sizes)


@given(st.lists(stages(), min_size=1, max_size=7), st.integers(1, 18))
@settings(deadline=None)
def test_rows_seconds_and_peaks_are_those_of_the_full_table(drawn: list[StageCost], micro_batches: int) -> None:
    costs, waves = tuple(drawn), Waves(tuple(drawn), micro_batches)
    program = Program.of(zb_h1(tuple(range(len(costs))), micro_batches), micro_batches)
    assert tuple(map(waves.row, range(len(costs)))) == program.table
    assert waves.seconds == pytest.approx(Simulator(program, messages=True).seconds(costs))
    assert waves.peak_bytes == simulate(program, costs).peak_bytes


def test_a_thousand_ranks_take_what_no_table_goes_below() -> None:
    micro_batches = 4096
    costs = (replace(UNIT_COST, inside=3),) * 1024
    waves = Waves(costs, micro_batches)
    least = 3 * micro_batches + 1023  # the last rank begins when a micro-batch comes to it
    assert waves.seconds == least
    assert set(waves.peak_bytes) == {3 * 1024}
    assert len(set(waves.row(512))) == 3 * micro_batches
