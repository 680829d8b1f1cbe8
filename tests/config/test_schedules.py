"""What may be given as a schedule, and what is said of what may not."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import gpipe
from gpipe.schedule.action import Kind, parse_action
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of
from tests.support.plain_loop import squares


def layers(count: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


def three_stages(ranks: int, micro_batches: int) -> Program:
    """Stages on ranks 0, 1 and 0, one micro-batch after another."""
    if micro_batches == 1:
        raise ValueError("no such program")
    rows: list[list[str]] = [[], []]
    for m in range(micro_batches):
        rows[0] += [f"0F{m}", f"2F{m}", f"2B{m}", f"0B{m}"]
        rows[1] += [f"1F{m}", f"1B{m}"]
    return Program.of([map(parse_action, row) for row in rows], micro_batches, rank_of=(0, 1, 0))


def refused(**options: object) -> str:
    with pytest.raises(ValueError, match="GPipe cannot be built") as caught:
        gpipe.GPipe(layers(), **{"partitions": 2, "micro_batches": 3, **options})  # type: ignore[arg-type]
    return str(caught.value)


def assert_trains(pipe: gpipe.GPipe, *, rows: int = 7) -> None:
    assert pipe.verify(torch.randn(rows, 4), torch.randn(rows, 4), squares, against="model").equal


def test_an_unknown_name_is_refused_with_all_names() -> None:
    for unknown in ("zbv", 3):
        assert all(repr(name) in refused(schedule=unknown) for name in SCHEDULES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": gpipe.Interleaved(2, "1f1b")}, "schedule='1f1b' does not support stages_per_rank=2"),
        ({"schedule": gpipe.Interleaved(3, "zb_v")}, "schedule='zb_v' does not support stages_per_rank=3"),
        (
            {"schedule": gpipe.Interleaved(3, "zb_v"), "partitions": [1, 1, 2, 2]},
            r"built:\n- schedule='zb_v' does not support stages_per_rank=3. Use stages_per_rank=2.$",
        ),
        ({"schedule": gpipe.Interleaved(1)}, "does not support stages_per_rank=1"),
        ({"schedule": "dualpipe_v"}, "no table for micro_batches=3 with 2 ranks. Use micro_batches=4"),
        ({"schedule": gpipe.Interleaved(True)}, "stages=True. Use an integer"),
        ({"schedule": gpipe.Interleaved(0)}, "stages=0. Use an integer"),
        (
            {"schedule": gpipe.BreadthFirst(0, resident=True)},
            r"schedule=BreadthFirst\(stages=0, resident=True\) has stages=0. Use an integer >= 1."
            r"\n- schedule=BreadthFirst\(stages=0, resident=True\) has resident=True. Use an integer >= 1",
        ),
        ({"schedule": "zb_v", "partitions": [1, 2, 3]}, "has 3 stages, but schedule= needs a multiple of 2"),
        ({"schedule": gpipe.Interleaved(4)}, "has 8 stages, but there are only 6 layers"),
        ({"schedule": three_stages(2, 3), "partitions": 3}, "has no placement for partitions=3"),
        ({"schedule": three_stages(2, 2)}, "no table for micro_batches=3 with 2 ranks. Use micro_batches=2"),
        ({"schedule": three_stages(2, 3), "partitions": [3, 3]}, "schedule= is for a different number"),
        ({"schedule": three_stages, "micro_batches": 1}, "no such program"),
        ({"schedule": lambda ranks, micro_batches: None}, "returned a NoneType"),
        (
            {"schedule": lambda ranks, m: three_stages(2, m + 1)},
            "K=2 ranks and M=4 micro-batches when called with .2, 3.",
        ),
    ],
)
def test_a_size_that_a_page_cannot_have_is_refused(options: dict[str, object], said: str) -> None:
    assert re.search(said, refused(**options))


def test_a_function_that_raises_keeps_its_exception_and_is_named() -> None:
    def own(ranks: int) -> Program:
        raise AssertionError

    with pytest.raises(TypeError, match="positional argument") as caught:
        gpipe.GPipe(layers(), 2, 3, schedule=own)  # type: ignore[arg-type]  # of one argument
    assert "own raised this error when called with (2, 3)" in caught.value.__notes__[0]


def test_a_program_for_one_size_is_told_of_no_other() -> None:
    program = program_of("v_min", 4, 12)
    findings = gpipe.GPipe(layers(8), 4, 12, schedule=program).findings
    assert not [text for text in findings if "bubble" in text]
    assert "20%" in gpipe.GPipe(layers(8), 4, 8, schedule="v_half").findings[0]


def test_a_program_that_breaks_the_laws_is_refused_with_what_it_breaks() -> None:
    program = three_stages(2, 3)
    row = [action for action in program.table[1] if action.kind is Kind.FORWARD or action.micro_batch]
    said = refused(schedule=program.with_table([program.table[0], row]))
    assert "The program is not valid" in said
    assert "Stage 1, micro-batch 0" in said
    lowered = gpipe.GPipe(layers(), 2, 3, schedule=program).program
    assert "RECOMPUTE, SEND, RECEIVE" in refused(schedule=lowered)


@pytest.mark.parametrize("given", [three_stages, three_stages(2, 3)])
@pytest.mark.parametrize("partitions", [2, [1, 2, 3]])
def test_a_program_or_a_function_that_makes_one_is_a_schedule(given: object, partitions: int | list[int]) -> None:
    with gpipe.GPipe(layers(), partitions, 3, schedule=given, seed=0) as pipe:  # type: ignore[arg-type]
        assert pipe.program.rank_of == (0, 1, 0)
        assert pipe.partitions == 2
        assert_trains(pipe)


@pytest.mark.parametrize("given", [three_stages, three_stages(2, 3)])
def test_a_smaller_mini_batch_has_the_functions_program_or_fill_drain(given: object) -> None:
    with gpipe.GPipe(layers(), 2, 3, schedule=given, seed=0) as pipe:  # type: ignore[arg-type]
        for rows in (2, 1):
            pipe.step_number = 0
            pipe.zero_grad()
            assert_trains(pipe, rows=rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_smaller_mini_batch_never_fails(name: str) -> None:
    with gpipe.GPipe(layers(), 2, 4, schedule=name, seed=0) as pipe:
        for rows in (9, 3, 1):
            pipe.step_number = 0
            pipe.zero_grad()
            assert_trains(pipe, rows=rows)


def test_pipes_of_any_schedule_are_copied_and_pickled() -> None:
    for given in ("zb_v", three_stages):
        pipe = gpipe.GPipe(layers(), 2, 3, schedule=given, seed=0)
        assert copy.deepcopy(pipe).program == pickle.loads(pickle.dumps(pipe)).program == pipe.program


def test_stages_without_parameters_are_not_split() -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)], [1, 1, 1, 1], 4, schedule="zb_v")
    split = {action.stage for action in pipe.program.actions if action.kind is Kind.BACKWARD_WEIGHT}
    assert split <= {0, 3}
    assert [line.split()[-1] for line in pipe.summary().splitlines()[1:5]] == [
        "half" if stage in split else "-" for stage in range(4)
    ]


def test_measured_backwards_decide_what_is_split() -> None:
    small = gpipe.GPipe([nn.Linear(4, 4) for _ in range(4)], 2, 8, schedule="zb_h1", sample=torch.randn(8, 4))
    assert all(action.kind is not Kind.BACKWARD_WEIGHT for action in small.program.actions)
    assert small.prediction.timeline.seconds > 0
