"""What a search times by its own means is what the simulator says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.planner.search.rehearsal import Rehearsal
from gpipe.planner.search.shapes import Shape
from gpipe.schedule.cost import StageCost
from gpipe.schedule.figures import UNIT_COST
from gpipe.schedule.lower import place_recompute, place_transfers
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.simulate import simulate
from gpipe.schedule.timeline import bubble
from tests.support.programs import LAW, REMATS

numbers = st.integers(0, 9).map(float)
remats = st.sampled_from(REMATS)
costs = st.builds(
    StageCost,
    forward=numbers,
    backward=numbers,
    send=numbers,
    send_gradient=st.none() | numbers,
    boundary=st.integers(0, 9),
    inside=st.integers(0, 9),
    working=st.integers(0, 9),
    state=st.integers(0, 9),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    each = SCHEDULES[name].stages_per_rank
    program = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 7)), name, each).program()
    return program or Program.of([[]], 0)


@LAW
@given(data=st.data(), program=programs())
def test_seconds_and_bytes_are_those_of_the_simulator(data: st.DataObject, program: Program) -> None:
    stages = program.stages
    if not program.micro_batches:
        return
    each = data.draw(st.lists(costs, min_size=stages, max_size=stages))
    remat = data.draw(st.lists(remats, min_size=stages, max_size=stages))
    simulation = simulate(place_transfers(place_recompute(program, remat)), each)
    rehearsal = Rehearsal(program)
    again = {cell for stage in range(stages) for cell in rehearsal.recomputed(stage, remat[stage])}
    assert rehearsal.seconds(each, again) == simulation.timeline.seconds
    assert rehearsal.busy(each, again) == sum(map(simulation.timeline.busy, range(program.ranks)))
    peaks = (
        rehearsal.peak(rank, rehearsal.of_rank(rank, each), rehearsal.of_rank(rank, remat))
        for rank in range(program.ranks)
    )
    assert tuple(peaks) == simulation.peak_bytes


@LAW
@given(program=programs(), kept=st.integers(0, 7))
def test_no_more_insides_are_kept_than_was_said(program: Program, kept: int) -> None:
    if not program.micro_batches:
        return
    rehearsal = Rehearsal(program)
    for stage in range(program.stages):
        top = rehearsal.in_flight(stage)
        assert rehearsal.recomputed(stage, top) == rehearsal.recomputed(stage, "never") == frozenset()
        assert rehearsal.recomputed(stage, 0) == rehearsal.recomputed(stage, "always")
        fewer, more = rehearsal.recomputed(stage, kept), rehearsal.recomputed(stage, kept + 1)
        assert len(more) < len(fewer) or not fewer


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 9))
def test_unit_costs_give_the_closed_forms(stages: int, micro_batches: int) -> None:
    seconds = {}
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        program = Shape(stages, max(micro_batches, 2 * stages), name).program()
        assert program is not None
        seconds[name] = Rehearsal(program).seconds([UNIT_COST] * stages, ()) - 3 * program.micro_batches
    fill = stages - 1
    assert seconds == {"gpipe": 3 * fill, "1f1b": 3 * fill, "zb_h1": fill, "zb_h2": fill}
    program = Shape(stages, micro_batches, "gpipe").program()
    assert program is not None
    rehearsal = Rehearsal(program)
    idle = 1 - rehearsal.busy([UNIT_COST] * stages, ()) / (stages * rehearsal.seconds([UNIT_COST] * stages, ()))
    assert idle == pytest.approx(bubble(stages, micro_batches))
