import pytest

from gpipe.schedule.action import Kind, parse_action
from gpipe.schedule.cost import StageCost, seconds, unit_costs

COSTS = [
    StageCost(forward=3, backward=8, send=0.5, tie=6, reduce=7),
    StageCost(forward=2, backward=4, recompute=1),
]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F0", 3),
        ("0R0", 3),
        ("1R0", 1),
        ("0B0", 8),
        ("0I0", 4),
        ("0W0", 4),
        ("0SEND0@x:0>1", 0.5),
        ("1SEND0@x:0>1", 0),
        ("0RECEIVE0@x:0>1", 0),
        ("0COMMIT", 0),
        ("0REDUCE", 7),
        ("1REDUCE", 0),
        ("0TIE", 6),
        ("1TIE", 0),
    ],
)
def test_an_action_costs_what_its_stage_says(action: str, expected: float) -> None:
    assert seconds(parse_action(action), COSTS) == expected


def test_input_and_weight_backward_cost_one_backward() -> None:
    for stage in (0, 1):
        halves = seconds(parse_action(f"{stage}I0"), COSTS) + seconds(parse_action(f"{stage}W0"), COSTS)
        assert halves == seconds(parse_action(f"{stage}B0"), COSTS)


def test_every_kind_has_a_cost() -> None:
    (cost,) = unit_costs(1)
    for kind in Kind:
        assert seconds(parse_action(f"0{kind.value}0"), [cost]) >= 0


def test_unit_costs_are_alike() -> None:
    assert unit_costs(3) == (StageCost(forward=1, backward=1),) * 3
