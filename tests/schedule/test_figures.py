import pytest

from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import figures


@pytest.mark.parametrize("name", SCHEDULES)
def test_work_is_that_of_a_rank_and_the_rest_is_the_bubble(name: str) -> None:
    program = program_of(name, 4, 8)
    found = figures(program)
    assert found.work == 3 * 8 * program.stages / 4
    assert found.bubble == pytest.approx(1 - found.work / found.seconds)
    assert len(found.peaks) == 4


def test_what_is_held_is_counted_in_shares_of_a_rank() -> None:
    assert figures(program_of("1f1b", 4, 8)).peaks == (4, 3, 2, 1)
    assert figures(program_of("interleaved", 2, 4, 3)).peaks == pytest.approx((7 / 3, 5 / 3))
    there_and_back = Program.of(program_of("zb_v", 1, 3).table, 3, rank_of=(0, 0))
    assert figures(there_and_back).peaks == (1,)


@pytest.mark.parametrize(("name", "split"), [("gpipe", 0), ("zb_h1", 1), ("dualpipe_v", 22 / 64)])
def test_split_backwards_are_counted(name: str, split: float) -> None:
    assert figures(program_of(name, 4, 8)).split == split


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("zbv", 4, 8), r"schedule='zbv'; known are 'gpipe', '1f1b', .*'dualpipe_v'$"),
        (("zb_v", 0, 0), r"partitions=0; give .*\nmicro_batches=0; give"),
        (("gpipe", 4, 10**9), r"micro_batches=1000000000; give at most 100,000"),
        (("zb_v", 2, 2, 0), r"stages_per_rank=0; give"),
        (("1f1b", 2, 2, 2), r"schedule='1f1b' cannot place stages_per_rank=2; the nearest that it can is 1"),
        (("dualpipe_v", 4, 7), r"has no table for micro_batches=7 over K=4 ranks; .* is micro_batches=8"),
    ],
)
def test_names_and_sizes_that_cannot_be_are_refused(asked: tuple[str, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        program_of(*asked)
