"""Stories of what flows between layers, and of ways in which a cut once changed bits, or could."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.kinds.blocks import Apply
from tests.support.kinds.values import Pop, Stash
from tests.support.plain_loop import (
    assert_same_bits,
    one_thread,
    plain_loop,
    same_bits,
    squares,
    train,
    train_plainly,
    weights_of,
)  # fmt: skip

M = 3
KINDS = pytest.mark.parametrize(("driver", "remat"), [("lockstep", "never"), ("threads", "always")])
X, Y = torch.randn(7, 6), torch.randn(7, 6)


def linears(*widths: int) -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(given, made) for given, made in pairwise(widths)]


def compare(
    layers: Sequence[nn.Module],
    cut: int | list[int],
    *,
    before: Callable[[gpipe.GPipe], object] = lambda pipe: None,
    x: Tensor = X,
    loss_fn: Callable[[Any, Any], Tensor] = squares,
    way: str = "step",
    **settings: Any,
) -> None:
    """Two mini-batches through a pipe of these layers and through the plain loop: the same bits."""
    nn.Sequential(*layers).zero_grad()
    reference = copy.deepcopy(list(layers))
    with gpipe.GPipe(list(layers), cut, M, seed=0, **settings) as pipe:
        before(pipe)
        for step in (0, 1):
            y = Y if len(x) == len(Y) else torch.ones(len(x), 6)
            loss = train(pipe, x, y, loss_fn, way)
            plain = train_plainly(reference, x.clone(), y, loss_fn, way, micro_batches=M, seed=0, step=step)
            assert same_bits(loss, plain)
            assert_same_bits(pipe, reference)


@pytest.mark.parametrize("way", ["step", "call"])
@KINDS
def test_each_layer_sees_tensors_as_the_plain_layers_do(way: str, driver: str, remat: str) -> None:
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def forward(self, value: Any) -> Any:
            leaves = torch.utils._pytree.tree_leaves(value)
            self.seen.append([(t.requires_grad, t.stride(), t.dtype, t.shape) for t in leaves])
            return value

    def build() -> list[nn.Module]:
        frozen, first, last = linears(6, 6, 6, 6)
        frozen.requires_grad_(False)
        fork = Apply(lambda x: {"y": x, "n": x.argmax(1), "d": x.detach()})
        return [
            Look(), frozen, Look(), first, fork, Look(), Apply(lambda v: (v["y"][:, ::2], v["d"])), Look(),
            Apply(lambda v: v[0].repeat(1, 2) + v[1]), Look(), last,
        ]  # fmt: skip

    layers, reference = build(), build()
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    with gpipe.GPipe(layers, len(layers), M, driver=driver, remat=remat, seed=4) as pipe:
        train(pipe, X, Y, squares, way)
    for layer, other in zip(layers, reference, strict=True):
        if isinstance(layer, Look) and isinstance(other, Look):
            assert layer.seen == other.seen * (2 if remat == "always" else 1)


def test_a_target_may_be_whole_and_a_tree() -> None:
    seen = []

    def loss_fn(output: Any, target: Any) -> Tensor:
        seen.append((len(target["y"]), target["table"].shape, target["n"]))
        return squares(output, target["y"]) * target["scale"]

    target = {"y": Y, "table": gpipe.Whole(torch.ones(2, 2)), "scale": torch.tensor(0.5), "n": 3}
    gpipe.GPipe(linears(6, 6, 6), 2, M, driver="lockstep", remat="never").step(X, target, loss_fn)
    assert seen == [(rows, (2, 2), 3) for rows in (3, 2, 2)]


def test_a_value_that_changes_its_kind_from_micro_batch_to_micro_batch_may_flow_but_not_be_merged() -> None:
    odd = Apply(lambda x: (x, x) if len(x) == 3 else x)
    even = Apply(lambda value: torch.add(*value) if isinstance(value, tuple) else value * 2)
    first, last = linears(6, 6, 6)
    for way in ("step", "call"):
        compare([first, odd, even, last], 4, way=way)
    with pytest.raises(TypeError, match=r"output does not have the same structure .*\[outputs-cannot-be-joined\]"):
        gpipe.GPipe([first, odd], 2, M, driver="lockstep")(X)


def test_a_tensor_that_is_three_outputs_is_one_tensor() -> None:
    # The gradients of three uses of a tensor are added from the last use to the first.
    def loss_fn(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        losses = [F.mse_loss(tensor, target) * weight for tensor, weight in zip(output, (0.3, 1.7, 0.1), strict=True)]
        return losses[0] + losses[1] + losses[2]

    for way in ("step", "call"):
        compare([*linears(6, 6), Apply(lambda x: (x, x, x))], 2, loss_fn=loss_fn, way=way)


# Work in place.


@pytest.mark.parametrize("before", ["eval", "no_grad", "inference_mode", "frozen"])
@KINDS
def test_what_works_in_place_is_found_whatever_ran_before(before: str, driver: str, remat: str) -> None:
    # A first run in evaluation showed nothing in place; in training torch then refused to work in place on a leaf.
    def run(pipe: gpipe.GPipe) -> None:
        match before:
            case "eval":
                pipe.eval().step(X, Y, squares)
            case "no_grad" | "inference_mode":
                with getattr(torch, before)():
                    pipe.eval()(X)
                    pipe.train()(X)
            case "frozen":
                pipe.requires_grad_(False)(X)
        pipe.train().requires_grad_(True).zero_grad()
        pipe.step_number = 0

    first, second, third = linears(6, 6, 6, 6)
    in_training = Apply(lambda x: x.relu_() if in_training.training else x)
    for layer in (nn.Dropout(0.4, inplace=True), nn.RReLU(inplace=True), in_training):
        compare([first, layer, second, layer, third], 5, before=run, driver=driver, remat=remat)


def test_views_of_one_memory_worked_on_in_place() -> None:
    # Behind a cut the view no longer saw what was done to the tensor. To be the same, or refused.
    def with_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return x, x[:, :3]

    (first,), (last,), views = linears(6, 6), linears(9, 6), Apply(with_a_view)
    work = Apply(lambda v: torch.cat([v[0].relu_(), v[1]], 1))
    for cut in ([4], [1, 3]):
        compare([first, views, work, last], cut)
    with pytest.raises(RuntimeError, match="share"):
        compare([first, views, work, last], [2, 2])


OTHER_LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(6).to_sparse(),
    "csr": lambda: torch.eye(6).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(6).to_mkldnn(),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@KINDS
def test_a_tensor_beside_one_of_another_layout_may_be_worked_on_in_place(
    driver: str, remat: str, layout: str
) -> None:
    other = OTHER_LAYOUTS[layout]()
    (first,), (last,) = linears(6, 6), linears(6, 6)
    pair = Apply(lambda x: (x * 2, other))
    work = Apply(lambda v: (v[0].relu_(), v[1]))
    take = Apply(lambda v: v[0])
    for cut in ([5], [2, 3], [2, 1, 2]):
        compare([first, pair, work, take, last], cut, driver=driver, remat=remat)


def test_an_output_may_be_worked_on_in_place_and_inputs_are_left_alone() -> None:
    for micro_batches in (1, 3):
        x, layers, plain = X.clone(), linears(6, 6, 5), linears(6, 6, 5)
        pipe = gpipe.GPipe([nn.ReLU(inplace=True), *layers], 2, micro_batches)
        pipe(x).relu_().sum().backward()
        nn.Sequential(nn.ReLU(), *plain)(x).relu_().sum().backward()
        for p, q in zip(pipe.parameters(), nn.Sequential(*plain).parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        pipe.step(x, torch.ones(7, 5), squares)
        assert torch.equal(x, X)


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_of_the_caller_changes_nothing(threads: int, driver: str) -> None:
    # MKL has one number of threads for the process, that of whoever called set_num_threads last: it was the caller.
    with one_thread():
        torch.set_num_threads(threads)
        compare(linears(700, 600, 6), 2, x=torch.randn(301, 700), driver=driver)
        assert torch.get_num_threads() == threads


def test_an_unpartitioned_stash_worked_on_in_place_is_refused() -> None:
    with pytest.raises(RuntimeError, match="stash"):
        gpipe.Sequential(*linears(6, 6), Stash(), nn.ReLU(inplace=True), Pop())(X)
