"""Ways in which a cut once changed bits, or could: each a story, told with the plain loop beside it."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.odd_layers import Drift, Turned
from tests.support.plain_loop import Tree, assert_same_bits, one_thread, plain_call, plain_loop, same_bits

Cut = int | list[int]


def compare(
    layers: Sequence[nn.Module],
    cut: Cut,
    *,
    before: Callable[[gpipe.GPipe], object] = lambda pipe: None,
    x: Tensor | None = None,
    loss_fn: Callable[[Any, Any], Tensor] = F.mse_loss,
    way: str = "step",
    **settings: Any,
) -> None:
    """Two mini-batches through a pipe of these layers and through the plain loop: the same bits."""
    torch.manual_seed(3)
    x = torch.randn(41, 17) if x is None else x
    y = torch.randn(len(x), 9, dtype=x.dtype)
    reference = copy.deepcopy(list(layers))
    pipe = gpipe.GPipe(list(layers), cut, 3, seed=0, **settings)
    before(pipe)
    for step in (0, 1):
        if way == "step":
            loss = pipe.step(x, y, loss_fn)
        else:
            loss = loss_fn(pipe(x), y)
            loss.backward()
        plain = plain_loop if way == "step" else plain_call
        assert same_bits(loss.detach(), plain(reference, x.clone(), y, loss_fn, micro_batches=3, seed=0, step=step))
        assert_same_bits(pipe, reference)


def linear(inputs: int, outputs: int, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


class Does(nn.Module):
    """A layer that does what a function does."""

    def __init__(self, function: Callable[[Any], Tree]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tree) -> Tree:
        return self.function(value)


REMATS = pytest.mark.parametrize("remat", ["always", "never"])


@REMATS
@pytest.mark.parametrize("cut", [[2, 1], [1, 2], [1, 1, 1]])
def test_the_gradient_of_a_boundary_keeps_its_strides(cut: Cut, remat: str) -> None:
    # Autograd gives a leaf its gradient in the leaf's own strides; the bias of the layer before was then summed in
    # another order than without a cut.
    compare([linear(17, 13), Turned(), linear(13, 9)], cut, remat=remat)


def wide(x: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(-1, 37, -1)


def narrow(x: Tensor) -> Tensor:
    return x.sum(1) * 0.3 + x.transpose(1, 2).cumsum(2).mean(2) + x.reshape(len(x), -1).sum(1, keepdim=True)


@REMATS
@pytest.mark.parametrize("cut", [[2, 2], [1, 3], [3, 1]])
def test_an_expanded_boundary_stays_expanded(cut: Cut, remat: str) -> None:
    # The first run of a stage has copies, to find out whether it works in place; a copy of an expanded tensor is not
    # expanded, and sums over it have other bits.
    compare([linear(17, 9), Does(wide), Does(narrow), linear(9, 9)], cut, remat=remat)


@REMATS
def test_a_boundary_with_gaps_keeps_its_strides(remat: str) -> None:
    # The same with every second column: a copy closes the gaps.
    compare([linear(17, 17), Does(lambda x: x[:, ::2]), Drift(9, in_place=True), linear(9, 9)], [2, 2], remat=remat)


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_of_the_caller_changes_nothing(threads: int, driver: str) -> None:
    # MKL has one number of threads for the process, that of whoever called set_num_threads last: it was the caller.
    with one_thread():
        torch.set_num_threads(threads)
        compare([linear(700, 600), linear(600, 9)], 2, x=torch.randn(301, 700), driver=driver)
        assert torch.get_num_threads() == threads


def test_a_tensor_that_is_three_outputs_is_one_tensor() -> None:
    # The gradients of three uses of a tensor are added from the last use to the first.
    def loss_fn(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        losses = [F.mse_loss(tensor, target) * weight for tensor, weight in zip(output, (0.3, 1.7, 0.1), strict=True)]
        return losses[0] + losses[1] + losses[2]

    for way in ("step", "call"):
        compare([linear(17, 9), Does(lambda x: (x, x, x))], 2, loss_fn=loss_fn, way=way)


def evaluate(pipe: gpipe.GPipe) -> None:
    pipe.eval()
    with torch.no_grad():
        pipe(torch.ones(3, 17))
    pipe.train()


class InPlaceInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() if self.training else x


@REMATS
@pytest.mark.parametrize(
    "layer", [InPlaceInTraining(), nn.Dropout(0.3, inplace=True), nn.RReLU(inplace=True)], ids=str
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_that_works_in_place_in_training_only(layer: nn.Module, frozen: bool, remat: str) -> None:
    # A first run in evaluation showed nothing in place; in training torch then refused to work in place on a leaf.
    first = linear(17, 9).requires_grad_(not frozen)
    compare([first, layer, linear(9, 9)], [1, 2], before=evaluate, remat=remat)


class InPlaceFromTheFifth(nn.Module):
    """Begins to work in place at its fifth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x.relu_() if self.forwards >= 5 else x.relu()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_that_begins_to_work_in_place_is_refused_once(frozen: bool) -> None:
    layers = [linear(17, 9).requires_grad_(not frozen), InPlaceFromTheFifth(), linear(9, 9)]
    pipe = gpipe.GPipe(layers, [1, 2], 3, remat="always")
    with pytest.raises(RuntimeError, match=r"in[- ]place"):
        pipe.step(torch.ones(6, 17), torch.ones(6, 9), F.mse_loss)
    pipe.step(torch.ones(6, 17), torch.ones(6, 9), F.mse_loss)


def first_in_place(value: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([value[0].relu_(), value[1]], 1)


def with_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 2
    return x, x[:, :3]


def test_views_of_one_memory_worked_on_in_place() -> None:
    # Behind a cut the view no longer saw what was done to the tensor. To be the same, or refused.
    layers = [linear(17, 9), Does(with_a_view), Does(first_in_place), linear(12, 9)]
    compare(copy.deepcopy(layers), [4])
    compare(copy.deepcopy(layers), [1, 3])
    with pytest.raises(RuntimeError, match="share"):
        compare(layers, [2, 2])


class Stash(nn.Module):
    stash = ("early",)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"early": x}


class Pop(nn.Module):
    pop = ("early",)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return x + 2 * early


@pytest.mark.parametrize("cut", [[5], [3, 2], [2, 1, 2], [2, 3], [4, 1]])
def test_a_stash_worked_on_in_place(cut: Cut) -> None:
    # Whether a pop saw the ReLU depended on the cut. A stash is what it was when stashed; who changes it is refused.
    layers = [linear(17, 9), Stash(), nn.ReLU(inplace=True), Pop(), linear(9, 9)]
    x, y = torch.ones(6, 17), torch.ones(6, 9)
    expected = gpipe.GPipe(
        [*copy.deepcopy(layers[:2]), nn.ReLU(), Pop(), copy.deepcopy(layers[4])], 1, 3, seed=0
    ).step(x, y, F.mse_loss)
    pipe = gpipe.GPipe(layers, cut, 3, seed=0)
    try:
        loss = pipe.step(x, y, F.mse_loss)
    except RuntimeError as error:
        assert re.search("stash|shares its memory", str(error))  # noqa: PT017  # either is right, silence is not
    else:
        assert same_bits(loss, expected)


class Weigh(nn.Module):
    """Uses what was stashed."""

    pop = ("early",)

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = linear(9, 9, seed)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        out: Tensor = x + self.linear(early) * early.mean(1, keepdim=True)
        return out


@REMATS
@pytest.mark.parametrize("cut", [[5], [2, 3], [2, 1, 2], [2, 2, 1], [3, 1, 1], [1, 1, 1, 1, 1]], ids=str)
def test_the_gradients_of_three_pops_are_added_from_the_last_to_the_first(cut: Cut, remat: str) -> None:
    compare([linear(17, 9), Stash(), *map(Weigh, range(3))], cut, remat=remat)


def test_an_unpartitioned_stash_worked_on_in_place_is_refused() -> None:
    with pytest.raises(RuntimeError, match="stash"):
        gpipe.Sequential(linear(17, 9), Stash(), nn.ReLU(inplace=True), Pop())(torch.ones(2, 17))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@REMATS
def test_other_precisions(dtype: torch.dtype, remat: str) -> None:
    layers = [linear(17, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Dropout(0.2), linear(9, 9)]
    compare([layer.to(dtype) for layer in layers], 3, x=torch.randn(41, 17).to(dtype), remat=remat)


def test_an_output_may_be_worked_on_in_place() -> None:
    for micro_batches in (1, 3):
        x = torch.randn(6, 17)
        pipe = gpipe.GPipe([linear(17, 9), linear(9, 5)], 2, micro_batches)
        pipe(x).relu_().sum().backward()
        plain = nn.Sequential(linear(17, 9), linear(9, 5))
        plain(x).relu_().sum().backward()
        for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_inputs_are_left_alone_by_a_first_layer_that_works_in_place() -> None:
    x = torch.randn(6, 17)
    before = x.clone()
    pipe = gpipe.GPipe([nn.ReLU(inplace=True), linear(17, 9)], 2, 3)
    for _ in range(2):
        pipe.step(x, torch.ones(6, 9), F.mse_loss)
        pipe(x).sum().backward()
    assert torch.equal(x, before)
