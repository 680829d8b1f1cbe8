"""The simulator. Costs are whole numbers, so that times are exact."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.action import CLOSING, COMPUTE, MOVES, TRANSFERS, Action, Kind, Route
from gpipe.schedule.cost import StageCost, unit_costs
from gpipe.schedule.lower import Remat, place_offloads, place_recompute, place_reduces, place_shards, place_transfers
from gpipe.schedule.partition import Partition
from gpipe.schedule.program import Program
from gpipe.schedule.rules import needs
from gpipe.schedule.schedules import SCHEDULES, fill_drain, forward_only
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import Simulator, figures, predict, simulate
from gpipe.schedule.timeline import bubble
from tests.support.programs import LAW, REMATS, listed, lowered, lowered_programs, parsed, skips

COUNTS = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 17)]


whole = st.integers(0, 9)
costs_of_stages = st.lists(
    st.builds(
        StageCost,
        forward=st.integers(1, 9),
        backward=st.integers(1, 9),
        recompute=st.none() | whole,
        send=whole,
        move=whole,
        gather=whole,
        tie=whole,
        reduce=whole,
        boundary=whole,
        activations=whole,
        state=whole,
    ),
    min_size=6,
    max_size=6,
)


def under_way(need: Action, action: Action, program: Program, costs: Sequence[StageCost]) -> float:
    """Seconds from the end of what an action needs until its rank has it; a TIE brings what it needs itself."""
    crosses = program.rank_of[need.stage] != program.rank_of[action.stage]
    return costs[need.stage].send if crosses and action.kind is not Kind.TIE else 0.0


def test_unit_costs_give_the_bubble_of_the_paper() -> None:
    for stages, micro_batches in COUNTS:
        timeline = simulate(lowered(stages, micro_batches, "never"), unit_costs(stages)).timeline
        assert timeline.seconds == 2 * (micro_batches + stages - 1)
        assert [timeline.busy(rank) for rank in range(stages)] == [2 * micro_batches] * stages
        assert timeline.idle_share() == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-15)
        assert timeline.idle_share() == pytest.approx(bubble(stages, micro_batches), abs=1e-15)


@LAW
@given(st.sampled_from(COUNTS), st.sampled_from(REMATS), st.data(), whole, whole, whole, whole)
def test_fill_drain_with_equal_stages_hides_recompute_in_the_bubble(
    counts: tuple[int, int], remat: Remat, data: st.DataObject, f: int, r: int, b: int, send: int
) -> None:
    """All but the work of the last stage is filling and draining: no stage before it is later for its recompute.

    The last stage ends its forwards at (M+K-1) f, then takes r + b for each micro-batch; each stage before it ends
    one b later. A message adds `send` at each of the K-1 cuts, both ways, if it is there before the next is sent.
    """
    f, b = f + send, b + send
    k, m = counts
    program = lowered(k, m, remat, [] if send else data.draw(skips(k)))
    costs = [StageCost(forward=f, backward=b, recompute=r, send=send)] * k
    kept = remat if isinstance(remat, int) else {"never": m, "except_last": 1, "always": 0}[remat]
    recomputes = max(0, m - kept) if m > 1 else 0
    assert simulate(program, costs).timeline.seconds == (m + k - 1) * (f + b) + recomputes * r + 2 * (k - 1) * send


@LAW
@given(st.sampled_from(COUNTS), st.sampled_from(REMATS), whole, whole)
def test_reductions_overlap_the_drain_so_that_only_the_first_stage_s_shows(
    counts: tuple[int, int], remat: Remat, b: int, reduce: int
) -> None:
    k, m = counts
    program, costs = lowered(k, m, remat), [StageCost(forward=1, backward=b, reduce=reduce)] * k
    timeline = simulate(place_reduces(program, range(k)), costs).timeline
    without = simulate(program, costs).timeline
    assert timeline.seconds == without.seconds + reduce
    ends = {span.action.stage: span.end for span in timeline.spans if span.action.kind is Kind.REDUCE}
    assert ends == {stage: without.seconds + reduce - stage * b for stage in range(k)}
    assert set(without.spans) <= set(timeline.spans)


@LAW
@given(lowered_programs(), costs_of_stages)
def test_a_rank_does_one_thing_at_a_time_in_row_order_each_after_what_it_needs_and_its_message(
    program: Program, costs: Sequence[StageCost]
) -> None:
    timeline = simulate(program, costs).timeline
    looked_through = program.only({*Kind} - TRANSFERS)
    end_of = {span.action: span.end for span in timeline.spans}
    for rank, row in enumerate(program.table):
        own = [span for span in timeline.spans if span.rank == rank]
        moves = [span for span in own if span.action.kind in MOVES]
        assert all(before.end <= span.start for before, span in pairwise(moves))
        spans = [span for span in own if span.action.kind not in {Kind.UNSHARD, *MOVES}]
        kinds = COMPUTE | CLOSING | {Kind.RESHARD}
        done = sorted((a for a in row if a.kind in kinds), key=lambda a: a.kind is Kind.REDUCE)
        assert [span.action for span in spans] == done  # of reductions, what their rank waits for behind all else
        assert all(before.end <= span.start for before, span in pairwise(spans))
        assert all(0 <= span.start <= span.end <= timeline.seconds for span in spans)
        for before, span in pairwise(spans):  # a recompute starts as soon as its rank is free
            assert moves or span.action.kind is not Kind.RECOMPUTE or span.start == before.end
        for span in (*moves, *spans):
            for need in needs(span.action, looked_through):
                assert end_of[need] + under_way(need, span.action, program, costs) <= span.start


@LAW
@given(lowered_programs(), costs_of_stages)
def test_no_rank_waits_without_a_reason(program: Program, costs: Sequence[StageCost]) -> None:
    costs = [replace(cost, send=0.0) for cost in costs]  # no message waits for the link
    spans = simulate(program, costs).timeline.spans
    looked_through = program.only({*Kind} - TRANSFERS)
    ends = {span.action: span.end for span in spans}
    free, moved = [0.0] * program.ranks, [0.0] * program.ranks
    for span in spans:
        moves = span.action.kind in MOVES  # one at a time, and the rank goes on beside
        beside = moves or span.action.kind is Kind.UNSHARD
        waits = [free[span.rank], moved[span.rank] * moves]
        assert span.start == max([*waits, *(ends[need] for need in needs(span.action, looked_through))])
        free[span.rank] = span.start if beside else span.end
        moved[span.rank] = span.end if moves else moved[span.rank]


def test_a_message_is_under_way_while_its_sender_goes_on_and_the_next_waits_for_the_link() -> None:
    costs = [StageCost(forward=1, backward=1, send=10), StageCost(forward=1, backward=1, send=3)]
    timeline = simulate(lowered(2, 2, "never"), costs).timeline
    assert [(str(s.action), s.start) for s in sorted(timeline.spans, key=lambda span: span.start)] == [
        ("0F0", 0),
        ("0F1", 1),
        ("1F0", 11),
        ("1F1", 21),
        ("1B0", 22),
        ("1B1", 23),
        ("0B0", 26),
        ("0B1", 29),
    ]


def test_bug_a_message_is_not_sent_before_its_place_in_the_row() -> None:
    rows = ["0F0 0F1 0SEND0@x:0>1 0SEND1@x:0>1", "1RECEIVE0@x:0>1 1RECEIVE1@x:0>1 1F0 1F1"]
    program = Program.of([parsed(text) for text in rows], 2)
    (first, *_) = (s for s in simulate(program, unit_costs(2)).timeline.spans if s.action.stage == 1)
    assert (str(first.action), first.start) == ("1F0", 2)


def test_no_actions_take_no_time_and_hold_the_state() -> None:
    simulation = simulate(Program((0,), 0, (), ((),)), [StageCost(forward=1, backward=1, state=7)])
    assert (simulation.timeline.seconds, simulation.timeline.spans, simulation.peak_bytes) == (0, (), (7,))


BYTES = StageCost(forward=1, backward=1, boundary=1, activations=10, state=100)


def peaks(program: Program, *costs: StageCost) -> tuple[int, ...]:
    return simulate(program, costs).peak_bytes


def test_boundaries_insides_and_state_are_held_from_the_forward_to_the_end_of_the_backward() -> None:
    insides: dict[Remat, int] = {"always": 10, "except_last": 20, "never": 40}
    for remat, inside in insides.items():
        assert peaks(lowered(3, 4, remat), *[BYTES] * 3) == (100 + 4 * 1 + inside,) * 3
    bare = place_recompute(Program.of(fill_drain(2, 3), 3), ["never", "always"])
    other = StageCost(forward=1, backward=1, boundary=2, activations=50, state=0)
    assert peaks(place_transfers(bare), BYTES, other) == (100 + 3 * 11, 3 * 2 + 50)
    shared = Program.of([parsed("0F0 1F0 1R0 1B0 0R0 0B0")], 1, rank_of=[0, 0])
    assert peaks(shared, BYTES, BYTES) == (2 * 100 + 2 * 1 + 10,)
    assert peaks(Program.of(forward_only(2, 5), 5), BYTES, BYTES) == (111, 111)
    for text, peak in (
        ("0F0 0B0 0F1 0B1", 111),
        ("0F0 0I0 0F1 0W0 0I1 0W1", 122),  # kept until the weights have their gradients
        ("0F0 0I0 0W0 0F1 0I1 0W1", 111),
    ):
        assert peaks(Program.of([parsed(text)], 2), BYTES) == (peak,)


def test_what_is_offloaded_is_held_until_the_next_move_and_from_its_fetch_on() -> None:
    for name, k, peak in (("gpipe", 2, (128, 128)), ("1f1b", 4, (124, 123, 122, 111))):
        program = place_offloads(program_of(name, k, 8), range(k))
        assert peaks(program, *[BYTES] * k) == peak
    # The inputs of micro-batches that are recomputed: BYTES has 1 byte of inputs and 10 of activations.
    bare = "0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3"
    moved = (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0OFFLOAD3 0FETCH0 0R0 0B0 0FETCH1 0R1 0B1 0FETCH2 0R2 0B2"
        " 0FETCH3 0R3 0B3"
    )
    kept, away = (peaks(Program.of([parsed(text)], 4), BYTES)[0] for text in (bare, moved))
    assert kept - away == 2  # of four inputs, two are there at once: one is copied while the next is used


def test_weights_are_gathered_while_their_rank_waits_and_held_with_their_gradients() -> None:
    program = place_reduces(place_transfers(Program.of(fill_drain(2, 2), 2)), [0, 1])
    costs = [StageCost(forward=1, backward=1, gather=3, reduce=2, state=7, gathered=50)] * 2
    found = simulate(place_shards(program, [1]), costs)
    starts = [(str(span.action), span.start, span.end) for span in found.timeline.spans if span.rank]
    assert starts[:2] == [("1UNSHARD", 0, 3), ("1F0", 3, 4)]  # rank 1 would begin at 1
    assert found.peak_bytes == (7, 7 + 50 + 50)
    forward = Program.of([parsed("0F0 1UNSHARD 1F0 1RESHARD")], 1, rank_of=[0, 0])
    assert peaks(forward, *costs) == (14 + 50,)


@LAW
@given(lowered_programs(split=False), costs_of_stages)
def test_the_peak_is_bounded_by_what_remat_keeps(program: Program, costs: Sequence[StageCost]) -> None:
    recomputed = {(a.stage, a.micro_batch) for a in listed(program) if a.kind is Kind.RECOMPUTE}
    for rank, peak in enumerate(simulate(program, costs).peak_bytes):
        stages = [s for s in range(program.stages) if program.rank_of[s] == rank]
        cells = [(s, m) for s in stages for m in range(program.micro_batches)]
        state = sum(costs[s].state for s in stages)
        boundaries = sum(costs[s].boundary for s, _ in cells)
        kept = sum(costs[s].activations for s, m in cells if (s, m) not in recomputed)
        one = max(costs[s].activations for s in stages)
        assert state <= peak <= state + boundaries + kept + one


def test_a_skip_does_not_hold_up_the_main_line() -> None:
    with_skip = lowered(4, 4, skips=[Route(0, 3, "e0")])
    costs = [StageCost(forward=1, backward=2, send=1)] * 4
    assert simulate(with_skip, costs).timeline.seconds == simulate(lowered(4, 4), costs).timeline.seconds


# What a mini-batch costs by its schedule.


@pytest.mark.parametrize("name", SCHEDULES)
def test_work_is_that_of_a_rank_and_the_rest_is_the_bubble(name: str) -> None:
    program = program_of(name, 4, 8)
    found = figures(program)
    assert found.work == 3 * 8 * program.stages / 4
    assert found.bubble == pytest.approx(1 - found.work / found.seconds)
    assert len(found.peaks) == 4


def test_what_is_held_is_counted_in_shares_of_a_rank_and_split_backwards_are_counted() -> None:
    assert figures(program_of("1f1b", 4, 8)).peaks == (4, 3, 2, 1)
    assert figures(program_of("interleaved", 2, 4, 3)).peaks == pytest.approx((7 / 3, 5 / 3))
    there_and_back = Program.of(program_of("zb_v", 1, 3).table, 3, rank_of=(0, 0))
    assert figures(there_and_back).peaks == (1,)
    for name, split in (("gpipe", 0), ("zb_h1", 1), ("dualpipe_v", 22 / 64)):
        assert figures(program_of(name, 4, 8)).split == split


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("zbv", 4, 8), r"schedule='zbv' is unknown. Use one of 'gpipe', '1f1b', .*'zb_v'"),
        (("zb_v", 0, 0), r"partitions=0\. Use .*\nmicro_batches=0\. Use"),
        (("gpipe", 4, 10**9), r"micro_batches=1000000000 exceeds"),
        (("zb_v", 2, 2, 0), r"stages_per_rank=0. Use"),
        (("1f1b", 2, 2, 2), r"schedule='1f1b' does not support stages_per_rank=2"),
        (("dualpipe_v", 4, 7), r"has no table for micro_batches=7 with 4 ranks. Use micro_batches=8"),
    ],
)
def test_names_and_sizes_that_cannot_be_are_refused(asked: tuple[str, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        program_of(*asked)


# What is predicted from the costs of layers alone.


def table(stages: int, micro_batches: int, remat: str | None = None) -> Program:
    program = Program.of(fill_drain(stages, micro_batches), micro_batches)
    return place_transfers(program if remat is None else place_recompute(program, [remat] * stages))  # type: ignore[list-item]


@LAW
@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 9), cost=st.sampled_from([3.0, 0.0, 0.1]))
def test_equal_stages_have_the_bubble_of_the_paper(stages: int, micro_batches: int, cost: float) -> None:
    plan = predict(Partition.of_sizes([1] * stages, [cost] * stages), table(stages, micro_batches))
    assert plan.bubble == pytest.approx(bubble(stages, micro_batches))
    unit = cost or 1.0  # costs of zero count as equal
    assert plan.timeline.seconds == pytest.approx(unit * (micro_batches + stages - 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recompute_that_stands_in_the_table_takes_no_message(name: str) -> None:
    bare = program_of(name, 3, 6)
    told = place_recompute(bare, ["always"] * bare.stages)
    costs = [
        StageCost(1.0, 2.0, boundary=3, activations=2 + at, sent_forward=5, sent_backward=4)
        for at in range(bare.stages)
    ]
    found = simulate(place_transfers(told), costs).peak_bytes
    simulator = Simulator(bare, messages=True)
    again = [
        frozenset(a.micro_batch for a in told.actions if a.kind is Kind.RECOMPUTE and a.stage == stage)
        for stage in range(bare.stages)
    ]
    for rank, own in enumerate(simulator.stages_of):
        peak = simulator.peak_bytes(rank, tuple(costs[at] for at in own), tuple(again[at] for at in own))
        assert peak == found[rank]


def test_a_recompute_takes_as_long_as_a_forward_beside_what_a_stage_costs() -> None:
    cut = Partition.of_sizes([1], [8.0])
    assert predict(cut, table(1, 5)).timeline.seconds == pytest.approx(5 * 8)
    assert predict(cut, table(1, 5, "always")).timeline.seconds == pytest.approx(5 * 8 * 4 / 3)
    assert predict(cut, table(1, 5, "except_last")).timeline.seconds == pytest.approx(5 * 8 + 4 * 8 / 3)


def test_bytes_are_predicted_where_they_were_counted() -> None:
    held = [StageCost(1.0, 2.0, boundary=2, activations=3, state=10)] * 2
    assert predict(Partition.of_sizes([2, 1], [1, 1, 1]), table(2, 4), held=held).peak_bytes == (10 + 4 * 5,) * 2
    assert predict(Partition.of_sizes([2, 1], [1, 1, 1]), table(2, 4)).peak_bytes is None
