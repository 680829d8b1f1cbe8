import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.action import CLOSING, COMPUTE, TRANSFERS, Action, Kind, Route, parse_action
from gpipe.schedule.program import Program
from tests.support.programs import LAW, listed, lowered_programs

numbers = st.integers(0, 10**6)
names = st.text(min_size=1).filter(lambda name: name.split() == [name] and not set(name) & set("@:"))
routes = st.builds(Route, numbers, numbers, names)
actions = (
    st.builds(Action, st.sampled_from(sorted(COMPUTE, key=str)), numbers, numbers)
    | st.builds(Action, st.sampled_from(sorted(CLOSING, key=str)), numbers)
    | st.builds(Action, st.sampled_from(sorted(TRANSFERS, key=str)), numbers, numbers, routes)
)


@LAW
@given(actions)
def test_an_action_reads_back_from_what_it_prints(action: Action) -> None:
    assert parse_action(str(action)) == action


@LAW
@given(lowered_programs())
def test_each_action_of_a_program_prints_differently(program: Program) -> None:
    assert len({str(action) for action in listed(program)}) == len(program.actions)


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


@pytest.mark.parametrize("text", ["", "F0", "2f0", "2X0", "-1F0", "2F0 ", "0SEND3@x", "0SEND3@x:0>", "0SEND3@:0>1"])
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action; an action looks like 2F0"):
        parse_action(text)


@pytest.mark.parametrize("name", ["", " ", "my skip", "a:b", "a@b", "e0\n", "e0\u2028"])
def test_bug_a_route_name_that_would_not_read_back_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a route"):
        Route(0, 1, name)
