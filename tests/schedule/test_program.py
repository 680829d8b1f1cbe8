"""Actions and programs: what they print, what is read back, what is refused."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.action import CLOSING, COMPUTE, MAIN, MOVES, SHARDS, TRANSFERS, Action, Kind, Route, parse_action
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import fill_drain
from tests.support.programs import LAW, computing, listed, lowered, lowered_programs

numbers = st.integers(0, 10**6)
names = st.text(min_size=1).filter(lambda name: name.split() == [name] and not set(name) & set("@:"))
routes = st.builds(Route, numbers, numbers, names)
actions = (
    st.builds(Action, st.sampled_from(sorted(COMPUTE | MOVES, key=str)), numbers, numbers, st.none())
    | st.builds(Action, st.sampled_from(sorted(CLOSING | SHARDS, key=str)), numbers, st.none(), st.none())
    | st.builds(Action, st.sampled_from(sorted(TRANSFERS, key=str)), numbers, numbers, routes)
)


@LAW
@given(actions)
def test_an_action_reads_back_from_what_it_prints(action: Action) -> None:
    assert parse_action(str(action)) == action


def test_actions_print_as_the_words_say() -> None:
    for action, text in (
        (Action(Kind.BACKWARD_WEIGHT, 10, 3), "10W3"),
        (Action(Kind.RECEIVE, 4, 3, Route(1, 4, "e0")), "4RECEIVE3@e0:1>4"),
        (Action(Kind.COMMIT, 2), "2COMMIT"),
    ):
        assert str(action) == text
    for text, gradient in (
        ("0SEND0@x:0>1", False),
        ("1SEND0@x:0>1", True),
        ("0RECEIVE0@x:0>1", True),
        ("0F0", False),
    ):
        assert parse_action(text).carries_gradient is gradient


def test_what_is_no_action_or_would_not_read_back_is_refused() -> None:
    for text in ("", "F0", "2f0", "2X0", "-1F0", "2F0 ", "0SEND3@x", "0SEND3@x:0>", "0SEND3@:0>1"):
        with pytest.raises(ValueError, match="is not an action"):
            parse_action(text)
    for name in ("", " ", "my skip", "a:b", "a@b", "e0\n", "e0\u2028"):
        with pytest.raises(ValueError, match=r"name=.* is invalid"):
            Route(0, 1, name)


def test_a_slice_of_a_micro_batch_is_pickled_with_how_many_there_are() -> None:
    action = parse_action("0F1.1", slices=2)
    assert str(pickle.loads(pickle.dumps(action))) == "0F1.1"


@LAW
@given(lowered_programs())
def test_a_program_reads_back_from_its_text_and_its_csv(program: Program) -> None:
    assert Program.from_text(program.to_text()) == program
    assert Program.from_csv(program.to_csv()) == program
    assert hash(Program.from_text(program.to_text())) == hash(program)


@LAW
@given(lowered_programs())
def test_the_main_line_joins_each_stage_to_the_next(program: Program) -> None:
    main = [route for route in program.routes if route.name == MAIN]
    assert main == [Route(s, s + 1) for s in range(program.stages - 1)]
    assert sorted(r for ends in program.routes_into for r in ends) == sorted(program.routes)
    assert sorted(r for ends in program.routes_from for r in ends) == sorted(program.routes)


@LAW
@given(lowered_programs())
def test_only_keeps_kinds_and_order(program: Program) -> None:
    assert program.only(Kind) == program
    assert [list(row) for row in program.only(COMPUTE).table] == [computing(row) for row in program.table]
    assert listed(program.only([])) == []


SMALL = """\
rank_of 0 1 2
micro_batches 2
routes x:0>1 x:1>2 e0:0>2
row 0F0 0SEND0@x:0>1 0SEND0@e0:0>2 0F1 0SEND1@x:0>1 0SEND1@e0:0>2 0R0 0RECEIVE0@e0:0>2 0RECEIVE0@x:0>1 0B0 \
0RECEIVE1@e0:0>2 0R1 0RECEIVE1@x:0>1 0B1
row 1RECEIVE0@x:0>1 1RECEIVE1@x:0>1 1F0 1SEND0@x:1>2 1F1 1SEND1@x:1>2 1R0 1RECEIVE0@x:1>2 1B0 1SEND0@x:0>1 \
1R1 1RECEIVE1@x:1>2 1B1 1SEND1@x:0>1
row 2RECEIVE0@e0:0>2 2RECEIVE1@e0:0>2 2RECEIVE0@x:1>2 2RECEIVE1@x:1>2 2F0 2F1 2R0 2B0 2SEND0@x:1>2 \
2SEND0@e0:0>2 2R1 2B1 2SEND1@x:1>2 2SEND1@e0:0>2"""


def test_a_small_lowered_program_reads_as_it_always_did() -> None:
    assert lowered(3, 2, skips=[Route(0, 2, "e0")]).to_text() == SMALL


def test_what_cannot_be_read_or_has_too_many_micro_batches_is_refused() -> None:
    for line in ("rows 0F0", "row 0X0", "routes x0>1", "routes :0>1", "micro_batches 1 2", "rank_of a"):
        with pytest.raises(ValueError, match=r".+"):
            Program.from_text(line)
    with pytest.raises(ValueError, match="micro_batches=1000000000 exceeds"):
        Program.from_text("rank_of 0\nmicro_batches 1000000000\nrow 0F0 0B0")


def test_around_shows_the_place_and_what_is_cut_off() -> None:
    for at, text in (
        (0, ">0F0< 0F1 0F2 ..."),
        (2, "0F0 0F1 >0F2< 0B0 0B1 ..."),
        (3, "... 0F1 0F2 >0B0< 0B1 0B2"),
        (5, "... 0B0 0B1 >0B2<"),
    ):
        assert Program.of(fill_drain(1, 3), 3).around(index=at, rank=0, reach=2) == text
