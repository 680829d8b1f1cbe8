"""The check: what is lowered passes, and whatever is then broken is named."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpipe.schedule.action import CLOSING, SHARDS, TRANSFERS, Action, Kind, Route, parse_action
from gpipe.schedule.laws import check
from gpipe.schedule.lower import place_reduces, place_ties
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.rules import needs
from gpipe.schedule.schedules import fill_drain, forward_only
from tests.support.programs import LAW, bare_programs, closed, listed, lowered, lowered_programs, parsed

MOVED = "Stage 0, micro-batch 0 needs OFFLOAD and FETCH, or neither. It has "
OPTIONAL = {Kind.RECOMPUTE, *CLOSING}  # without them a program is another, lawful one


def mistakes(program: Program) -> list[str]:
    with pytest.raises(ScheduleError) as raised:
        check(program)
    title, *found = str(raised.value).split("\n- ")
    assert title == "The program is not valid. Fix these errors:"
    return found


def changed(program: Program, rank: int, row: Sequence[Action]) -> Program:
    return program.with_table(row if r == rank else old for r, old in enumerate(program.table))


def swapped(program: Program, first: Action, second: Action) -> Program:
    """The same program with two actions of one row in each other's place."""
    other = {first: second, second: first}
    return program.with_table((other.get(action, action) for action in row) for row in program.table)


@LAW
@given(bare_programs(), lowered_programs())
def test_every_program_is_lawful_bare_and_lowered(bare: Program, program: Program) -> None:
    check(bare)
    check(program)


@LAW
@given(lowered_programs(), st.data())
def test_an_action_that_is_missing_is_refused(program: Program, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from([a for a in listed(program) if a.kind not in OPTIONAL]))
    broken = program.with_table((a for a in row if a != lost) for row in program.table)
    forwards = {Kind.FORWARD, Kind.COMMIT}
    assume({a.kind for a in broken.actions} - TRANSFERS - SHARDS - forwards or lost.kind in {Kind.FORWARD, *SHARDS})
    found = mistakes(broken)
    assert lost.kind not in TRANSFERS or f"{lost.peer} needs {lost}, which is missing." in found


@LAW
@given(lowered_programs(), st.data())
def test_an_action_that_stands_twice_is_refused(program: Program, data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(listed(program)))
    rank = program.rank_of[twice.stage]
    at = data.draw(st.integers(0, len(program.table[rank])))
    row = [*program.table[rank][:at], twice, *program.table[rank][at:]]
    assert f"{twice} appears 2 times." in mistakes(changed(program, rank, row))


@LAW
@given(lowered_programs(), st.data())
def test_an_action_before_what_it_needs_is_refused(program: Program, data: st.DataObject) -> None:
    pairs = [
        (need, action)
        for action in listed(program)
        for need in needs(action, program)
        if program.rank_of[need.stage] == program.rank_of[action.stage]
    ]
    assume(pairs)
    need, action = data.draw(st.sampled_from(pairs))
    assert any("deadlocks" in text for text in mistakes(swapped(program, need, action)))


@LAW
@given(lowered_programs(), st.data())
def test_an_action_in_the_row_of_another_rank_is_refused(program: Program, data: st.DataObject) -> None:
    assume(program.ranks > 1)
    moved = data.draw(st.sampled_from(listed(program)))
    home = program.rank_of[moved.stage]
    rank = data.draw(st.sampled_from([r for r in range(program.ranks) if r != home]))
    away = program.with_table((a for a in row if a != moved) for row in program.table)
    at = data.draw(st.integers(0, len(away.table[rank])))
    broken = changed(away, rank, [*away.table[rank][:at], moved, *away.table[rank][at:]])
    expected = f"{moved} is in the row of rank {rank}, which does not have stage {moved.stage}."
    assert expected in mistakes(broken)


@LAW
@given(lowered_programs(), st.data())
def test_a_message_that_neither_end_lists_is_refused(program: Program, data: st.DataObject) -> None:
    sends = [a for a in listed(program) if a.kind is Kind.SEND]
    assume(len(sends) > 1)
    lost = data.draw(st.sampled_from(sends))
    ends = {(lost.micro_batch, lost.route, lost.carries_gradient)}
    broken = program.with_table(
        (a for a in row if a.kind not in TRANSFERS or (a.micro_batch, a.route, a.carries_gradient) not in ends)
        for row in program.table
    )
    assert any("but its rank does not send it" in text for text in mistakes(broken))


@LAW
@given(lowered_programs(), st.data(), st.sampled_from([Kind.SEND, Kind.RECEIVE]))
def test_two_messages_in_another_order_than_the_peer_lists_are_refused(
    program: Program, data: st.DataObject, kind: Kind
) -> None:
    def ends(a: Action) -> tuple[int, int]:
        return program.rank_of[a.stage], program.rank_of[a.peer.stage]

    transfers = [a for a in listed(program) if a.kind is kind]
    pairs = [(a, b) for i, a in enumerate(transfers) for b in transfers[i + 1 :] if ends(a) == ends(b)]
    assume(pairs)
    first, second = data.draw(st.sampled_from(pairs))
    assert any("differently" in text for text in mistakes(swapped(program, first, second)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0F0 0OFFLOAD0 0B0", MOVED + "OFFLOAD."),
        ("0F0 0FETCH0 0B0", MOVED + "FETCH."),
        ("0F0 0OFFLOAD0 0R0 0B0", MOVED + "OFFLOAD."),
        ("0F0 0OFFLOAD0 0R0 0FETCH0 0B0", "The program deadlocks:"),
        ("0FETCH0 0OFFLOAD0 0F0 0B0", "The program deadlocks:"),
        ("0F0 0OFFLOAD0 0B0 0FETCH0", "The program deadlocks:"),
        ("0F0 0FETCH0 0OFFLOAD0 0B0", "The program deadlocks:"),
    ],
)
def test_what_goes_to_the_host_comes_back_before_its_backward(row: str, said: str) -> None:
    assert [text.split("\n")[0] for text in mistakes(Program.of([parsed(row)], 1))] == [said]
    check(Program.of([parsed("0F0 0OFFLOAD0 0FETCH0 0I0 0W0")], 1))
    check(Program.of([parsed("0F0 0OFFLOAD0 0FETCH0 0R0 0B0")], 1))


def edited(*changes: tuple[str, str]) -> Program:
    text = lowered(3, 2, "never").to_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return Program.from_text(text)


def test_all_mistakes_are_named_at_once_those_of_law_1_before_all_others() -> None:
    others = [
        ("1B1 ", ""),
        ("1RECEIVE0@x:0>1 1RECEIVE1@x:0>1", "1RECEIVE1@x:0>1 1RECEIVE0@x:0>1"),
        ("2F0 ", ""),
        (" 2SEND1@x:1>2", ""),
    ]
    first = [("row 0F0", "row 0F0 0F0 5F0 0SEND0"), (" 0B1\n", " 0B1 1COMMIT\n"), ("2F1", "2F7")]
    assert mistakes(edited(*first, *others)) == [
        "0F0 appears 2 times.",
        "5F0 is in the row of rank 0, which does not have stage 5.",
        "0SEND0 needs a route of the program that starts or ends at stage 0.",
        "1COMMIT is in the row of rank 0, which does not have stage 1.",
        "2F7 needs a micro-batch from 0 to 1.",
    ]
    assert mistakes(edited(*others)) == [
        "Stage 1, micro-batch 1 needs one B, or one I and one W. It has none.",
        "2F0 is missing.",
        "1RECEIVE1@x:1>2 needs 2SEND1@x:1>2, which is missing.",
        "Ranks 0 and 1 list message 0 differently: 0SEND0@x:0>1 and 0SEND1@x:0>1.",
    ]


@LAW
@given(lowered_programs(), st.data())
def test_a_stage_that_takes_two_micro_batches_out_of_turn_is_named(program: Program, data: st.DataObject) -> None:
    kinds = {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    pairs = [
        (a, a._replace(micro_batch=a.micro_batch + 1))
        for a in listed(program)
        if a.kind in kinds and a.micro_batch is not None
    ]
    pairs = [(a, b) for a, b in pairs if b in program.actions]
    assume(pairs)
    first, second = data.draw(st.sampled_from(pairs))
    found = mistakes(swapped(program, first, second))
    assert f"{first} comes after {second}. A stage must run the micro-batches in order." in found


def test_bug_an_order_is_checked_although_something_else_is_missing() -> None:
    program = lowered(2, 3, "never")
    first, second, third = [a for a in listed(program) if a.kind is Kind.RECEIVE and a.stage == 1]
    broken = swapped(program, first, second)
    found = mistakes(broken.with_table((a for a in row if a != third) for row in broken.table))
    assert found == [
        "0SEND2@x:0>1 needs 1RECEIVE2@x:0>1, which is missing.",
        "1F2 needs the result of 0F2, but its rank does not send it.",
        "Ranks 0 and 1 list message 0 differently: 0SEND0@x:0>1 and 0SEND1@x:0>1.",
    ]


@pytest.mark.parametrize("route", [Route(1, 0, "e0"), Route(0, 0, "e0"), Route(0, 9, "e0"), Route(7, 8, "e0")])
def test_bug_a_route_that_leads_nowhere_is_named_and_stops_nothing(route: Route) -> None:
    program = Program.of(fill_drain(2, 1), 1, skips=[route])
    assert mistakes(program) == [f"Route {route} does not lead to a later stage."]


@pytest.mark.parametrize(
    ("stray", "mistake"),
    [
        ("0F", "0F needs a micro-batch from 0 to 0."),
        ("0F1", "0F1 needs a micro-batch from 0 to 0."),
        ("3F0", "3F0 is in the row of rank 0, which does not have stage 3."),
        ("0R0@x:0>1", "0R0@x:0>1 cannot have a route, because it is not a SEND or RECEIVE."),
        ("0COMMIT0", "0COMMIT0 cannot have a micro-batch, because it applies to the whole stage."),
        ("0SEND0", "0SEND0 needs a route of the program that starts or ends at stage 0."),
        ("0SEND0@e0:0>1", "0SEND0@e0:0>1 needs a route of the program that starts or ends at stage 0."),
        ("0SEND0@x:1>2", "0SEND0@x:1>2 needs a route of the program that starts or ends at stage 0."),
        ("0I0", "Stage 0, micro-batch 0 needs one B, or one I and one W. It has B, I."),
    ],
)
def test_bug_an_action_that_means_nothing_is_named_and_stops_nothing(stray: str, mistake: str) -> None:
    """Some of these were passed over, others ended the check with an error of its own."""
    program = lowered(3, 1, "never")
    assert mistakes(changed(program, 0, [*program.table[0], parse_action(stray)])) == [mistake]


def test_a_route_that_stands_twice_is_refused() -> None:
    assert mistakes(Program.of(fill_drain(2, 1), 1, skips=[Route(0, 1)])) == ["Route x:0>1 appears 2 times."]


@pytest.mark.parametrize("text", ["1B0", "1TIE", "1REDUCE"])
def test_training_is_all_or_nothing(text: str) -> None:
    forward = Program.of(forward_only(2, 1), 1)
    found = mistakes(changed(forward, 1, [*forward.table[1], parse_action(text)]))
    assert found[0] == "Stage 0, micro-batch 0 needs one B, or one I and one W. It has none."


@pytest.mark.parametrize("kind", sorted(CLOSING, key=str))
def test_a_stage_closes_once_behind_what_it_closes(kind: Kind) -> None:
    program = closed(lowered(2, 2))
    check(program)
    row = program.table[0]
    early = changed(program, 0, [Action(kind, 0), *(a for a in row if a.kind is not kind)])
    assert mistakes(early)[0].splitlines()[0] == "The program deadlocks:"
    assert mistakes(changed(program, 0, [*row, Action(kind, 0)])) == [f"0{kind.value} appears 2 times."]


def test_a_rank_closes_its_stages_in_one_order() -> None:
    rows = [[Action(kind, s, 0) for kind, s in ((Kind.FORWARD, 0), (Kind.FORWARD, 1))]]
    rows[0] += [Action(Kind.BACKWARD, 1, 0), Action(Kind.BACKWARD, 0, 0)]
    program = Program.of(rows, 1, rank_of=(0, 0))
    right = place_reduces(place_ties(program, [1]), [0, 1])
    assert [str(action) for action in right.table[0][-3:]] == ["0REDUCE", "1TIE", "1REDUCE"]
    check(right)
    both = place_reduces(program, [0, 1])
    assert " ".join(map(str, both.table[0])) == "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE"
    wrong = changed(both, 0, [*program.table[0], Action(Kind.REDUCE, 0), Action(Kind.REDUCE, 1)])
    assert mistakes(wrong) == ["Rank 0 lists 0REDUCE 1REDUCE. The order in all replicas must be 1REDUCE 0REDUCE."]


def test_a_stage_that_is_done_before_a_later_one_waits_for_it_to_reduce() -> None:
    texts = ["0F0", "1F0", "0F1", "1F1", "1I0", "0I0", "1I1", "0I1", "0W0", "0W1", "1W0", "1W1"]
    program = Program.of([map(parse_action, texts)], 2, rank_of=(0, 0))
    assert [str(action) for action in place_reduces(program, [0, 1]).table[0][-3:]] == ["1W1", "1REDUCE", "0REDUCE"]
