from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.plan.schedules import SCHEDULES
from gpipe.recipes.options import TrainOptions
from gpipe.recipes.recipe import Recipe


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_learning_rate_rises_then_falls(steps: int, warm_up: float) -> None:
    recipe = Recipe(warm_up=warm_up)
    rates = [recipe.learning_rate_at(step, steps) for step in range(steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 < rate <= recipe.learning_rate for rate in rates)


def test_the_optimizer_is_a_plain_one() -> None:
    assert type(Recipe().optimizer([torch.nn.Parameter(torch.zeros(1))])) is torch.optim.SGD


def test_the_default_options_are_legal() -> None:
    TrainOptions().check()


def test_all_options_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="--epochs is -1: choose 1 or more") as refusal:
        TrainOptions(partitions=10, micro_batches=0, layers=3, filters=8, epochs=-1, seed=-2, out=file).check()
    assert str(refusal.value).splitlines() == [
        "--micro-batches is 0: choose 1 or more",
        "--filters is 8: choose 16 or more",
        "--epochs is -1: choose 1 or more",
        "--seed is -2: choose 0 or more",
        "--partitions is 10, but --layers 3 makes 9 layers: choose 9 or fewer partitions, or more layers",
        f"--out is {file}, a file: choose a folder",
    ]


def test_every_schedule_can_be_trained_by() -> None:
    assert get_args(get_type_hints(TrainOptions)["schedule"]) == tuple(SCHEDULES)


def test_stages_of_each_partition_count_as_layers() -> None:
    with pytest.raises(ValueError, match=r"--partitions is 5 of 2 stages each, .* choose 4 or fewer partitions"):
        TrainOptions(partitions=5, schedule="zb_v").check()
