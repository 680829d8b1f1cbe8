"""What is given to a step or a call, and what a loss or a layer gives back: mistakes are told in words that help."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gpipe
from gpipe.batch.inputs import split_targets
from tests.support.mistaken import Two, X, Y, layers, make, refusal


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_words_that_step_and_call_do_not_know_are_refused_with_ours() -> None:
    pipe: Any = make()
    assert "Pass loss_fn= to each step" in refusal(lambda: pipe.step(X, Y, criterion=F.mse_loss), TypeError)
    assert "'target'. Use targets=" in refusal(lambda: pipe.step(X, target=Y, loss_fn=F.mse_loss), TypeError)
    assert "Pass other arguments by name" in refusal(lambda: pipe.step(X, Y, F.mse_loss, "sum"), TypeError)
    assert "pipe((x, mask))" in refusal(lambda: pipe(X, Y), TypeError)
    assert "pipe(x)" in refusal(lambda: pipe(x=X), TypeError)
    assert "Pass all layers in one list" in refusal(lambda: gpipe.GPipe(*layers(), 2, 2), TypeError)  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (nn.MSELoss, "loss_fn is the class nn.MSELoss, not a loss. Pass an instance: nn.MSELoss()."),
        (None, "loss_fn is None, not a function. Pass a function of (output, target), such as nn.MSELoss()"),
        ("mse", "loss_fn is a str, not a function. Pass a function of (output, target)"),
        (torch.ones(()), "loss_fn is a Tensor, not a function. Pass a function of (output, target)"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_runs(loss_fn: Any, text: str) -> None:
    pipe = make()
    assert text in refusal(lambda: pipe.step(X, Y, loss_fn), TypeError)
    assert pipe.step_number == 0


class Output(NamedTuple):
    output: Tensor
    loss: Tensor


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda out, target: (out - target) ** 2, "a tensor of shape (4, 2), not the scalar loss"),
        (
            lambda out, target: F.mse_loss(out, target).item(),
            "Return the tensor, without .item()",
        ),
        (lambda out, target: out.sum().to(torch.complex64), "a tensor of dtype torch.complex64"),
        (lambda out, target: (1.5, out), "the Python number 1.5, which has no gradient"),
        (
            lambda out, target: None,
            "Add a return statement",
        ),
        (lambda out, target: {"loss": out.mean()}, "Return only the loss, or (loss, metrics). [loss-not-scalar]"),
        (lambda out, target: Output(out, out.mean()), "Return its .loss. [loss-not-scalar]"),
        (lambda out, target: (out.mean(), 1, 2), "a tuple of length 3"),
        (lambda out: out.mean(), "[loss-fn-arguments]"),
        (lambda out, target, more: out.mean(), "[loss-fn-arguments]"),
    ],
)
@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_wrong_loss_is_told_as_the_loss_with_what_to_return(
    remat: str, loss_fn: Callable[..., Any], text: str
) -> None:
    found = refusal(lambda: make(remat=remat).step(X, Y, loss_fn), TypeError)
    assert text in found
    assert "in the loss of micro-batch " in found


def test_a_step_without_targets_is_told_to_give_them() -> None:
    text = refusal(lambda: make().step(X, loss_fn=F.mse_loss), AttributeError)  # type: ignore[call-overload]
    assert "in the loss of micro-batch 0" in text
    assert "[targets-missing]" in text
    make().step(X, None, lambda output, target: output.mean())


class Words(dict[str, Tensor]):
    """Pytree does not look into it."""


class Parts(list[Tensor]):
    """Likewise."""


@dataclass
class Sample:
    x: Tensor


class Slotted:
    __slots__ = ("deep",)

    def __init__(self) -> None:
        self.deep = {"a": [(X,)]}


HIDDEN = [Words(x=X), Parts([X]), {X}, frozenset([X]), Sample(X), Slotted(), SimpleNamespace(a=[X]), nn.Linear(1, 1)]


@pytest.mark.parametrize("hidden", HIDDEN, ids=lambda hidden: type(hidden).__name__)
def test_tensors_that_cannot_be_seen_are_refused_by_name_unless_meant_whole(hidden: Any) -> None:
    pipe, name = make(), type(hidden).__name__
    for call in (
        lambda: pipe.step({"a": X, "b": [hidden]}, Y, F.mse_loss),
        lambda: pipe({"a": X, "b": [hidden]}),
    ):
        text = refusal(call, TypeError)
        assert f"inputs['b'][0] is a {name} that holds tensors" in text
        assert "torch.utils._pytree.register_pytree_node" in text
    assert f"targets is a {name}" in refusal(lambda: pipe.step(X, hidden, F.mse_loss), TypeError)

    class Takes(nn.Module):
        def forward(self, given: tuple[Tensor, object]) -> Tensor:
            assert given[1] is hidden
            return given[0]

    make([Takes(), *layers()]).step((X, gpipe.Whole(hidden)), Y, F.mse_loss)


class Frame:
    """As pandas and JAX have them: numpy can read it."""

    def __array__(self) -> Any:
        return X.numpy()


def rows() -> Iterator[Tensor]:
    yield X


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (X.numpy(), "is a numpy array, but only tensors are split. Convert it with torch.from_numpy(...)"),
        ({"x": X, "y": np.ones(8)}, "['y'] is a numpy array"),
        (Frame(), "is a Frame, but only tensors are split. Convert it with torch.as_tensor(numpy.asarray(...))"),
        (X.to_sparse(), "is sparse (torch.sparse_coo) and cannot be split"),
        (nn.utils.rnn.pack_sequence([X, X]), "is a PackedSequence, which cannot be split by rows"),
        (DataLoader(TensorDataset(X)), "is a DataLoader, not a mini-batch"),
        (TensorDataset(X), "is a TensorDataset, not a mini-batch"),
        (rows(), "is a generator, not a mini-batch"),
        (map(torch.relu, [X]), "is a map, not a mini-batch"),
    ],
)
def test_values_of_other_kinds_are_refused_with_how_to_turn_them_into_tensors(wrong: object, text: str) -> None:
    check_refused(wrong, text)


def test_nested_tensors_are_refused() -> None:
    wrong = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)  # which takes torch a second to load
    check_refused(wrong, "is a nested tensor, which cannot be split by rows")


def check_refused(wrong: object, text: str) -> None:
    pipe = make()
    assert text in refusal(lambda: pipe(wrong), TypeError)
    both = refusal(lambda: pipe.step(wrong, wrong, F.mse_loss), TypeError)
    assert [
        both.count(f"{what}{text}" if text[0] == "[" else f"{what} {text}") for what in ("inputs", "targets")
    ] == [1, 1]


def test_inputs_without_a_tensor_say_what_they_are() -> None:
    for wrong, text in (
        (None, "inputs is None and has no tensor"),
        (torch.tensor(1.0), "inputs is a Tensor and has no tensor"),
        (gpipe.Whole(X), "inputs is a Whole and has no tensor"),
        ({}, "inputs is an empty dict"),
        ("words", "inputs is a str and"),
        ([1.0, 2.0], "inputs is a list of numbers and"),
    ):
        assert text in refusal(lambda wrong=wrong: make()(wrong), ValueError)  # type: ignore[misc]


def test_a_list_with_a_value_for_each_row_would_go_whole_to_every_micro_batch() -> None:
    pipe = make()
    text = refusal(lambda: pipe.step((X, list(range(8))), ["a"] * 8, F.mse_loss), ValueError)
    assert "inputs[1] is a list with 8 entries" in text
    assert "targets is a list with 8 entries" in text
    pipe.step(X, (Y, [1, 2]), lambda output, target: F.mse_loss(output, target[0]))


@dataclass
class Told:
    lengths: object


class Fields(NamedTuple):
    one: int
    two: int


@pytest.mark.parametrize("wrap", [lambda value: value, Told, lambda value: {"more": [Told((1, value))]}])
@pytest.mark.parametrize(
    "values",
    [
        (1, 2, 3, 4),
        range(4),
        array("i", [1, 2, 3, 4]),
        deque([1, 2, 3, 4]),
        [[1], [2, 3], [], [4]],
        ("a", "b", "c", "d"),
    ],
    ids=str,
)
def test_so_would_any_sequence_and_what_stands_in_an_object(values: Any, wrap: Callable[[Any], Any]) -> None:
    # A tuple, a range, a deque, 0-dim tensors or an attribute went whole, where a list was refused.
    pipe = make()
    targets = (Y[:4], wrap(values))
    assert f"is a {type(values).__name__} with 4 entries" in refusal(
        lambda: pipe.step(X[:4], targets, first), ValueError
    )
    assert "targets" in refusal(lambda: split_targets(targets, [2, 2], ready_made=False), ValueError)
    pipe.step(X[:4], (Y[:4], gpipe.Whole(wrap(values))), first)
    pipe.step(X, (Y, wrap(values)), first)  # of 8 rows: no row has a value
    pipe.step(X[:1], (Y[:1], wrap([1])), first)  # one micro-batch has all


def test_numbers_that_are_tensors_arrays_in_objects_and_named_tuples_are_refused_and_shapes_are_not() -> None:
    pipe = make()
    for values in ([torch.tensor(1)] * 4, tuple(torch.arange(4))):  # none of which has rows
        step = partial(pipe.step, X[:4], (Y[:4], values), first)
        assert "targets[1] is a" in refusal(step, ValueError)
    text = refusal(lambda: pipe.step(X[:2], (Y[:2], Told(np.ones((2, 3))), Fields(1, 2)), first), ValueError)
    assert "targets[1].lengths is a ndarray with 2 entries" in text
    assert "targets[2] is a Fields with 2 entries" in text
    for whole in (torch.Size([1, 2]), (None, None), {"a": 1, "b": 2}, "ab", Told(torch.Size([1, 2]))):
        pipe.step(X[:2], (Y[:2], whole), first)


def first(output: Tensor, target: Any) -> Tensor:
    return F.mse_loss(output, target[0])


def test_a_layer_of_two_arguments_is_told_that_it_is_given_one_value() -> None:
    text = refusal(lambda: make([Pair(), Two()]).step(X, X, F.mse_loss), TypeError)
    assert "Two.forward() missing 1 required positional argument: 'y'" in text
    assert "[one-argument-per-layer]" in text


def test_a_layer_that_is_given_none_or_a_tuple_is_told_where_it_may_come_from() -> None:
    class Silent(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)

    text = refusal(lambda: make([Silent(4, 4), nn.Linear(4, 4)]).step(X, X, F.mse_loss), TypeError)
    assert "If the layer before returns None: add a missing return statement" in text
    text = refusal(lambda: make([nn.LSTM(4, 4), nn.Linear(4, 4)]).step(X, X, F.mse_loss), TypeError)
    assert "[layer-input-not-tensor]" in text


def test_a_weight_that_is_no_number_is_refused() -> None:
    wrong: list[Any] = [lambda target: None, lambda target: torch.ones(3), lambda target: "much"]
    for weight in wrong:
        with pytest.raises(TypeError, match=r"\[invalid-loss-weights\]"):
            make().step(X, Y, F.mse_loss, reduction=weight)


def test_a_scale_that_leaves_nothing_of_the_gradients_is_refused() -> None:
    pipe = gpipe.GPipe([nn.Linear(2, 1)], 1, 1)
    for scale in (float("nan"), float("inf"), -float("inf"), 0, 0.0):
        with pytest.raises(ValueError, match="would erase all gradients"):
            pipe.step(torch.ones(2, 2), torch.ones(2, 1), nn.functional.mse_loss, scale=scale)


def test_a_norm_that_turns_gradients_round_is_refused() -> None:
    pipe = gpipe.GPipe([nn.Linear(2, 1)], 1, 1)
    pipe.step(torch.ones(2, 2), torch.ones(2, 1), nn.functional.mse_loss)
    before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    for norm in (-1, float("nan"), -float("inf")):
        with pytest.raises(ValueError, match="max_norm="):
            pipe.clip_grad_norm_(norm)
    assert all(
        torch.equal(old, p.grad) for old, p in zip(before, pipe.parameters(), strict=True) if p.grad is not None
    )
