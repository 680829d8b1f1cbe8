import pytest
from hypothesis import given

from gpipe.schedule.action import COMPUTE, MAIN, Kind, Route
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import fill_drain
from tests.support.programs import LAW, computing, listed, lowered, lowered_programs


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


@pytest.mark.parametrize(
    "line", ["rows 0F0", "row 0X0", "routes x0>1", "routes :0>1", "micro_batches 1 2", "rank_of a"]
)
def test_a_line_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Program.from_text(line)


def test_a_table_of_too_many_micro_batches_is_refused_before_it_is_built() -> None:
    with pytest.raises(ValueError, match="micro_batches=1000000000; give at most 100,000"):
        Program.from_text("rank_of 0\nmicro_batches 1000000000\nrow 0F0 0B0")


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, ">0F0< 0F1 0F2 ..."),
        (2, "0F0 0F1 >0F2< 0B0 0B1 ..."),
        (3, "... 0F1 0F2 >0B0< 0B1 0B2"),
        (5, "... 0B0 0B1 >0B2<"),
    ],
)
def test_around_shows_the_place_and_what_is_cut_off(at: int, text: str) -> None:
    assert Program.of(fill_drain(1, 3), 3).around(0, at, reach=2) == text
