"""What is said of pages of many ranks and micro-batches is what the simulator says of few, of all that is listed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.schedule.cost import StageCost
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.lower import Remat, join_backwards, place_recompute, place_transfers
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import table_of
from gpipe.schedule.schedules.writing import Rows
from gpipe.schedule.simulate import UNIT_COST, figures, simulate

few = st.integers(0, 6)
half = st.none() | few.map(float)
stages = st.builds(
    StageCost,
    forward=few.map(float),
    backward=few.map(float),
    backward_input=half,
    backward_weight=half,
    send=few.map(float),
    send_gradient=half,
    boundary=few,
    activations=few,
    working=few,
    state=few,
)


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
@settings(deadline=None)
def test_seconds_and_peaks_are_those_of_the_listed_table(name: str, data: st.DataObject) -> None:
    ranks, micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    micro_batches = max(micro_batches, 2 * ranks) if name == "dualpipe_v" else micro_batches
    each = data.draw(st.sampled_from([2, 3])) if name.startswith("interleaved") else None
    slices = 1 if SCHEDULES[name].sliced is None else data.draw(st.integers(1, 3))
    rows, placement = table_of(name, ranks, micro_batches, each, slices)
    assert isinstance(rows, Rows)
    program = Program.of(rows, micro_batches * slices, rank_of=placement, slices=slices)
    count, joined = len(placement), data.draw(st.booleans())
    many = LargeTable(rows, placement, joined=joined)
    assert (rows[-1], rows[:2]) == (program.table[-1], program.table[:2])
    program = join_backwards(program) if joined else program
    costs = data.draw(st.lists(stages, min_size=count, max_size=count))
    again = data.draw(st.sets(st.integers(0, count - 1)))
    remat: list[Remat] = ["always" if stage in again else "never" for stage in range(count)]
    simulation = simulate(place_transfers(place_recompute(program, remat)), costs)
    assert many.seconds(costs, again) == simulation.timeline.seconds
    assert tuple(many.peak_bytes(rank, costs, again) for rank in range(ranks)) == simulation.peak_bytes
    assert many.busy(costs, again) == sum(map(simulation.timeline.busy, range(ranks)))
    bare, listed = many.figures([UNIT_COST] * count), figures(program)
    assert (bare.seconds, bare.work, bare.peaks, bare.split) == (
        listed.seconds,
        listed.work,
        listed.peaks,
        listed.split,
    )
    assert bare.bubble == pytest.approx(listed.bubble)


@pytest.mark.parametrize(("name", "beside"), [("zb_h1", 255), ("zb_v", 255), ("interleaved_zb", 255)])
def test_hundreds_of_ranks_take_what_the_page_says(name: str, beside: int) -> None:
    rows, placement = table_of(name, ranks=256, micro_batches=512)
    assert isinstance(rows, Rows)
    each = len(placement) // 256
    found = LargeTable(rows, placement).figures([UNIT_COST] * len(placement))
    assert found.seconds == 3 * each * 512 + beside
    assert set(found.peaks) == {256}
    assert len(set(rows[100])) == 3 * each * 512
