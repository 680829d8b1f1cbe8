"""What a search times and counts without lowering a program is what the simulator says of the lowered one."""

from math import inf

from hypothesis import assume, given
from hypothesis import strategies as st

from gpipe.planner.search.candidates import Shape
from gpipe.planner.search.fitting import Fitting, choose_offload
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, place_recompute, place_remat, place_transfers
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.simulate import UNIT_COST, Simulator, simulate
from tests.support.programs import LAW

numbers = st.integers(0, 9).map(float)
costs = st.builds(
    StageCost,
    forward=numbers,
    backward=numbers,
    send=numbers,
    move=numbers,
    send_gradient=st.none() | numbers,
    boundary=st.integers(0, 9),
    activations=st.integers(0, 9),
    working=st.integers(0, 9),
    state=st.integers(0, 9),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    each = SCHEDULES[name].stages_per_rank
    program = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 7)), name, each).program()
    assume(program is not None)  # The schedule can run this number of stages and micro-batches.
    assert program is not None
    return program


def draw_costs(data: st.DataObject, program: Program) -> tuple[StageCost, ...]:
    """Draws a cost for each stage."""
    return tuple(data.draw(st.lists(costs, min_size=program.stages, max_size=program.stages)))


@LAW
@given(data=st.data(), program=programs())
def test_seconds_and_bytes_are_those_of_the_lowered_program(data: st.DataObject, program: Program) -> None:
    stages = program.stages
    each = draw_costs(data, program)
    levels = tuple(data.draw(st.lists(st.integers(0, 7), min_size=stages, max_size=stages)))
    simulation = simulate(place_transfers(place_recompute(program, levels)), each)
    simulator = Simulator(program, messages=True)
    fitting = Fitting(simulator, [inf] * program.ranks)
    again = fitting.recomputed(levels)
    assert simulator.seconds(each, again) == simulation.timeline.seconds
    assert simulator.busy(each, again) == sum(map(simulation.timeline.busy, range(program.ranks)))
    assert fitting.peaks(each, levels) == simulation.peak_bytes


@LAW
@given(program=programs(), kept=st.integers(0, 7))
def test_no_more_insides_are_kept_than_was_said(program: Program, kept: int) -> None:
    fitting = Fitting(Simulator(program), [inf] * program.ranks)
    for stage in range(program.stages):
        top = fitting.simulator.in_flight(stage)
        levels = [0] * program.stages
        again = [
            fitting.recomputed((*levels[:stage], level, *levels[stage + 1 :]))[stage]
            for level in (top, kept, kept + 1)
        ]
        assert not again[0]
        assert len(again[2]) < len(again[1]) or not again[1]


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 9))
def test_unit_costs_give_the_closed_forms(stages: int, micro_batches: int) -> None:
    seconds = {}
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        program = Shape(stages, max(micro_batches, 2 * stages), name).program()
        assert program is not None
        seconds[name] = Simulator(program).seconds([UNIT_COST] * stages) - 3 * program.micro_batches
    fill = stages - 1
    assert seconds == {"gpipe": 3 * fill, "1f1b": 3 * fill, "zb_h1": fill, "zb_h2": fill}


@LAW
@given(data=st.data(), program=programs())
def test_what_offloads_instead_fits_and_takes_no_longer_and_what_cannot_be_moved_recomputes(
    data: st.DataObject, program: Program
) -> None:
    stages = program.stages
    each = draw_costs(data, program)
    remat: tuple[Remat, ...] = tuple(
        data.draw(st.lists(st.sampled_from(["always", "never", 1]), min_size=stages, max_size=stages))
    )
    before = simulate(place_transfers(place_remat(program, remat)), each)
    limits = data.draw(st.sampled_from([before.peak_bytes, [inf] * program.ranks]))
    found = choose_offload(program, each, limits, remat)
    after = simulate(place_transfers(place_remat(program, found)), each)
    assert after.timeline.seconds <= before.timeline.seconds
    assert all(held <= limit for held, limit in zip(after.peak_bytes, limits, strict=True))
    for own, one, cost in zip(remat, found, each, strict=True):
        assert one == own or (one == "offload" and own != "never" and cost.move)


@LAW
@given(data=st.data(), program=programs())
def test_offloaded_inputs_never_make_a_step_faster_so_a_plan_that_fits_does_not_need_them(
    data: st.DataObject, program: Program
) -> None:
    stages = program.stages
    each = draw_costs(data, program)
    remat: list[Remat] = data.draw(st.lists(st.sampled_from(["always", 1]), min_size=stages, max_size=stages))
    moved = list(remat)
    moved[data.draw(st.integers(0, stages - 1))] = "offload_inputs"
    plain, offloaded = (simulate(place_transfers(place_remat(program, modes)), each) for modes in (remat, moved))
    assert offloaded.timeline.seconds >= plain.timeline.seconds
