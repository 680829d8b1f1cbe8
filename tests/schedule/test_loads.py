"""LOAD and FREE: what is placed is lawful, few stages are loaded at once, and few LOADs are needed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.action import COMPUTE, STREAMS, Action, Kind, parse_action
from gpipe.schedule.cost import StageCost
from gpipe.schedule.laws import check
from gpipe.schedule.lower import place_loads, place_recompute, place_reduces, place_transfers
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import needs
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import simulate
from tests.support.programs import LAW, parsed


def lowered(ranks: int, stages: int, micro_batches: int) -> Program:
    bare = program_of("breadth_first", ranks, micro_batches, stages)
    return place_transfers(place_recompute(bare, ["always"] * bare.stages))


@LAW
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_loads_are_lawful_and_at_most_resident_stages_are_loaded(k: int, v: int, m: int, resident: int) -> None:
    program = lowered(k, v, m)
    loaded = place_loads(program, range(program.stages), resident)
    check(loaded)
    assert loaded.only(set(Kind) - STREAMS) == program
    for row in loaded.table:
        held = set[int]()
        for action in row:
            if action.kind is Kind.LOAD:
                held.add(action.stage)
            elif action.kind is Kind.FREE:
                held.remove(action.stage)
            assert len(held) <= resident
            assert action.kind not in COMPUTE or action.stage in held
        assert not held


@pytest.mark.parametrize("stages", [2, 3, 8, 16, 32])
def test_one_rank_loads_all_stages_twice_except_two(stages: int) -> None:
    loaded = place_loads(lowered(1, stages, 4), range(stages))
    assert sum(action.kind is Kind.LOAD for action in loaded.actions) == 2 * stages - 2


@pytest.mark.parametrize(("load", "expected"), [(0, 504), (8, 520), (16, 656)])
def test_loads_are_hidden_by_the_computation_of_the_preceding_stage(load: int, expected: int) -> None:
    loaded = place_loads(lowered(1, 16, 8), range(16))
    assert simulate(loaded, [StageCost(1.0, 2.0, load=load, unload=load)] * 16).timeline.seconds == expected


def test_gradients_are_reduced_after_they_are_freed() -> None:
    loaded = place_loads(place_reduces(lowered(1, 3, 2), range(3)), range(3))
    for stage in range(3):
        last = max((a for a in loaded.actions if a.kind is Kind.FREE and a.stage == stage), key=lambda a: a[2] or 0)
        assert last in needs(Action(Kind.REDUCE, stage), loaded)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0LOAD0 0F0 0FREE0 0LOAD1 0B0 0FREE1", "0B0 needs a recompute"),
        ("0LOAD0 0F0 0B0", "Stage 0 is loaded, but not freed."),
        ("0F0 0LOAD0 0B0 0FREE0", "0F0 needs the weights of stage 0, which are not loaded."),
        ("0LOAD1 0F0 0B0 0FREE1", "0LOAD1 must follow"),
        ("0LOAD0 0F0 0B0 0FREE1", "0FREE1 does not follow its LOAD."),
    ],
)
def test_weights_that_are_away_are_refused(row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(Program.of([parsed(row)], 1))


def test_a_number_of_a_load_is_read_as_it_is_printed() -> None:
    assert str(parse_action("2LOAD1")) == "2LOAD1"


SIZES = st.builds(
    StageCost,
    forward=st.just(1.0),
    backward=st.just(2.0),
    boundary=st.integers(0, 9),
    activations=st.integers(0, 99),
    working=st.integers(0, 99),
    loaded=st.integers(0, 99),
    gradients=st.integers(0, 99),
)


@LAW
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_rank_holds_the_weights_and_gradients_of_few_stages(
    k: int, v: int, m: int, resident: int, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(SIZES, min_size=k * v, max_size=k * v))
    loaded = place_loads(lowered(k, v, m), range(k * v), resident)
    for rank, peak in enumerate(simulate(loaded, costs).peak_bytes):
        held = [cost for cost, other in zip(costs, loaded.rank_of, strict=True) if other == rank]
        state = (resident + 1) * max(cost.loaded + cost.gradients for cost in held)
        assert peak <= state + m * sum(cost.boundary for cost in held) + max(c.activations + c.working for c in held)
    weights = simulate(loaded, [StageCost(1.0, 2.0, loaded=1)] * k * v).peak_bytes
    assert weights == (min(resident, v),) * k
    gradients = simulate(loaded, [StageCost(1.0, 2.0, gradients=1)] * k * v).peak_bytes
    assert gradients == (min(2, v),) * k  # of one stage, and of one more in the copy of a FREE


def test_gradients_exist_from_the_first_backward_until_the_next_free() -> None:
    loaded = place_loads(lowered(1, 3, 1), range(3))
    costs = [StageCost(1.0, 2.0, gradients=10**stage) for stage in range(3)]
    assert simulate(loaded, costs).peak_bytes == (110,)  # in 1B0, while 2FREE0 copies
    costs[2] = replace(costs[2], loaded=50, boundary=7)
    assert simulate(loaded, costs).peak_bytes == (157,)  # in 2B0


def test_a_free_copies_gradients_only_after_backwards() -> None:
    loaded = place_loads(lowered(1, 3, 1), range(3))
    spans = simulate(loaded, [StageCost(1.0, 2.0, load=5.0, unload=7.0)] * 3).timeline.spans
    seconds = {str(span.action): span.end - span.start for span in spans}
    assert (seconds["0FREE0"], seconds["0FREE1"], seconds["0LOAD0"]) == (0.0, 7.0, 5.0)


def test_a_free_waits_for_the_preceding_one() -> None:
    loaded = place_loads(lowered(1, 4, 1), range(4))
    spans = {str(s.action): s for s in simulate(loaded, [StageCost(1.0, 2.0, unload=50.0)] * 4).timeline.spans}
    assert spans["0R0"].start >= spans["2FREE0"].end > spans["1B0"].end
