"""Backwards in two parts: what waits for the second, and its errors. `test_same_bits.py` has their results."""

from collections.abc import Iterator

import pytest
from torch import Tensor, nn

import gpipe
from gpipe import pipeline
from gpipe.features.split_backward import SplitBackward
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.run import Rank, Run
from tests.support.plain_loop import mini_batch, squares, weights_of
from tests.support.split_rows import split


def network() -> list[nn.Module]:
    with weights_of(5):
        first, middle, last = nn.Linear(6, 8), [nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 4)
    return [first, nn.BatchNorm1d(8), middle[0], nn.Dropout(0.2), middle[1], nn.GELU(), middle[2], last]


@pytest.fixture
def held() -> Iterator[list[tuple[int, int, int]]]:
    """Notes what a rank keeps when the weights of a micro-batch are to come."""
    found: list[tuple[int, int, int]] = []
    backward_weight = SplitBackward._backward_weight

    def do(split: SplitBackward, run: Run, rank: Rank, step: CompiledAction) -> None:
        state = rank.states[step.stage, step.micro_batch]
        found.append((len(state.inputs), len(state.gradients), len(state.roots)))
        backward_weight(split, run, rank, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitBackward, "_backward_weight", do)
        yield found


def test_nothing_else_is_kept_for_the_weights(held: list[tuple[int, int, int]]) -> None:
    x, y = mini_batch(6, 4, rows=10)
    with split("weights last"), gpipe.GPipe(network(), [2, 3, 3], 4, seed=3) as pipe:
        pipe.step(x, y, squares)
    assert held == [(0, 0, 0)] * 12


def test_an_error_in_the_second_part_names_the_layer() -> None:
    def fail(parameter: Tensor) -> None:
        raise ValueError("no more")

    x, y = mini_batch(6, 4, rows=10)
    layers = network()
    layers[2].get_parameter("weight").register_post_accumulate_grad_hook(fail)
    with split("weights last"), gpipe.GPipe(layers, [2, 3, 3], 4, seed=3, driver="lockstep") as pipe:
        with pytest.raises(ValueError, match="no more") as caught:
            pipe.step(x, y, squares)
        told = caught.value.__notes__[0]
        assert "in the backward of weights of micro-batch 0, rank 1, stage 1, layer 2 (2: Linear)" in told
        assert ">1W0<" in told


def test_stages_under_fully_shard_run_their_backwards_at_once(held: list[tuple[int, int, int]]) -> None:
    class Spread(nn.Linear):
        def set_gradient_divide_factor(self, factor: float) -> None:
            """As a module has it that `fully_shard` was told of."""

    x, y = mini_batch(6, 4)
    early: dict[int, bool] = {}
    with weights_of(1):
        layers: list[nn.Module] = [Spread(6, 5), nn.Linear(5, 4)]
    backward_input = SplitBackward._backward_input

    def do(split: SplitBackward, run: Run, rank: Rank, step: CompiledAction) -> None:
        backward_input(split, run, rank, step)
        early.setdefault(step.stage, layers[step.stage].weight.grad is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitBackward, "_backward_input", do)
        with split("weights last"), gpipe.GPipe(layers, 2, 2, driver="lockstep", remat="never") as pipe:
            with pytest.raises(ValueError, match=r"\[fully-shard-in-one-process\]"):
                pipe.step(x, y, squares)
            patch.setattr(pipeline, "any_sharded", lambda *_: False)
            pipe.step(x, y, squares)
    assert early == {1: False, 0: True}
