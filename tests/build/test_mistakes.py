"""What a new user gets wrong is told in words that say what to write instead."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gpipe
from tests.support.odd_layers import Pop, Stash

X, Y = torch.ones(8, 4), torch.zeros(8, 2)


def layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]


def make(found: Any = None, **how: Any) -> gpipe.GPipe:
    return gpipe.GPipe(found or layers(), how.pop("partitions", 2), how.pop("micro_batches", 2), **how)


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    return "".join(traceback.format_exception_only(raised.value))


class Forgets(nn.Module):
    pass


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def function_of_x(x: Tensor) -> Tensor:
    return x


NOT_LAYERS: list[tuple[object, str]] = [
    (torch.relu, "layer 1 is the function relu; give a module: nn.ReLU()"),
    (F.gelu, "layer 1 is the function gelu; give a module: nn.GELU()"),
    (F.relu, "layer 1 is the function relu; give a module: nn.ReLU()"),
    (torch.tanh, "layer 1 is the function tanh; give a module: nn.Tanh()"),
    (F.leaky_relu, "give a module: nn.LeakyReLU()"),
    (partial(F.max_pool2d, kernel_size=2), "layer 1 is the function max_pool2d; give a module: nn.MaxPool2d(...)"),
    (lambda x: x, "layer 1 is a function of (x); give a module whose forward does it, or a callable that builds one"),
    (function_of_x, "layer 1 is the function function_of_x of (x)"),
    (nn.Linear, "layer 1 is the class Linear, which needs in_features, out_features; give one of it: nn.Linear(...)"),
    (nn.ReLU().forward, "layer 1 is a method of a ReLU; give the module itself"),
    (nn.MSELoss(), "layer 1 (MSELoss) is a loss; give it to each step: pipe.step(inputs, targets, nn.MSELoss())"),
    (None, "layer 1 is a NoneType; leave it out, or give nn.Identity()"),
    ([nn.ReLU()], "layer 1 is a list; join its layers: nn.Sequential(*...)"),
    (nn.ModuleList([nn.ReLU()]), "layer 1 (ModuleList) has no forward; give its parts as layers"),
    (Forgets(), "layer 1 (Forgets) has no forward; give it one: def forward(self, x)"),
    (nn.DataParallel(nn.ReLU()), "layer 1 (DataParallel) is replicated already; give the plain layer, .module"),
    (torch.ones(3), "layer 1 is a Tensor; give an nn.Module"),
    (nn.Linear(2, 2, device="meta"), "layer 1 (Linear) has no values: weight, bias on the meta device"),
]


@pytest.mark.parametrize(("wrong", "text"), NOT_LAYERS)
def test_what_is_no_layer_is_refused_with_what_to_write(wrong: object, text: str) -> None:
    assert text in refusal(lambda: make([nn.Linear(4, 4), wrong]), ValueError)


def test_all_that_are_no_layers_are_told_at_once() -> None:
    text = refusal(lambda: make([wrong for wrong, _ in NOT_LAYERS], micro_batches=0), ValueError)
    assert len(text.splitlines()) >= len(NOT_LAYERS) + 2


def test_what_only_looks_like_no_layer_stays_one() -> None:
    class Called(nn.Module):
        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    attached = Forgets()
    attached.forward = torch.tanh
    loss = nn.MSELoss()
    loss.pop = ("target",)  # type: ignore[assignment]

    class Targets(nn.Module):
        stash = ("target",)

        def forward(self, x: Tensor) -> Any:
            return x, {"target": x + 2}

    pipe = make([nn.Linear(4, 4), Targets(), Called(), attached, loss])
    assert pipe.step(X, Y, lambda output, target: output) > 0


def test_what_builds_a_layer_stays_one() -> None:
    pipe = make([partial(nn.Linear, 4, 4), nn.ReLU, lambda: nn.Linear(4, 2)])
    assert [type(layer) for layer in pipe] == [nn.Linear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"a": nn.ReLU()}, "layers is a dict; give its values in order"),
        (nn.ModuleDict({"a": nn.ReLU()}), "layers is a ModuleDict; give its values in order"),
        (nn.ModuleList([nn.ReLU()]), "layers is a ModuleList; give list(layers), or nn.Sequential(*layers)"),
        ({nn.ReLU(), nn.Tanh()}, "layers is a set, which has no order; give a list"),
        ("relu", "layers is a str; give an nn.Sequential"),
        (torch.ones(2), "layers is a Tensor; give an nn.Sequential"),
        (Two(), "layers is a Two; give an nn.Sequential"),
    ],
)
def test_what_is_no_sequence_of_layers_is_refused_with_what_to_write(wrong: object, text: str) -> None:
    assert text in refusal(lambda: gpipe.GPipe(wrong, 1, 2), ValueError)  # type: ignore[arg-type]


def test_a_pipe_in_a_pipe_is_refused_and_its_layers_are_not() -> None:
    inner = make()
    for wrong in (inner, nn.Sequential(nn.Tanh(), inner)):
        text = refusal(lambda wrong=wrong: make([wrong, nn.Linear(2, 2)]), ValueError)  # type: ignore[misc]
        assert "holds a pipe, and a pipe cannot run in another; give its layers instead, *pipe" in text
    make([*inner, nn.Linear(2, 2)]).step(X, Y, F.mse_loss)


def test_skips_below_a_layer_are_refused_unless_something_runs_them() -> None:
    buried = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Stash("a", width=4), Pop({"a": 4}, width=4)))
    text = refusal(lambda: make([buried, nn.Tanh()]), ValueError)
    assert "layer 0 (Sequential): its part 1.0 (Stash) has stash = ('a',), which only a layer of the pipe" in text
    assert "its part 1.1 (Pop) has pop = ('a',)" in text
    assert "give the parts of layer 0 as layers of their own" in text
    make([nn.Linear(4, 4), nn.Sequential(gpipe.Sequential(Stash("a", width=4), Pop({"a": 4}, width=4)))]).step(
        X, X, F.mse_loss
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"chunks": 8}, "there is no chunks=; give micro_batches="),
        ({"n_microbatches": 8}, "there is no n_microbatches=; give micro_batches="),
        ({"num_stages": 2}, "there is no num_stages=; give partitions="),
        ({"num_partitions": 2}, "there is no num_partitions=; give partitions="),
        ({"checkpoint": "always"}, "there is no checkpoint=; give remat='always', 'except_last' or 'never'"),
        ({"balance": [2, 1]}, "balance=[2, 1]: give the layers of each partition as partitions="),
        ({"device": "cpu"}, "there is no device=; give devices="),
        ({"loss_fn": F.mse_loss}, "there is no loss_fn=; give to each step: pipe.step(inputs, targets, loss_fn)"),
        ({"remats": "never"}, "there is no remats=; give remat="),
        ({"wings": 2}, "there is no wings=; leave it out\nknown are layers, partitions"),
        ({"chunks": 8, "num_stages": 2}, "there is no num_stages=; give partitions="),
    ],
)
def test_words_of_other_libraries_are_refused_with_ours(given: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: gpipe.GPipe(layers(), **given), TypeError)
    assert text in refusal(lambda: gpipe.GPipe(layers(), 2, 2, **given), TypeError)


def test_words_that_step_and_call_do_not_know_are_refused_with_ours() -> None:
    pipe: Any = make()
    assert "give loss_fn=" in refusal(lambda: pipe.step(X, Y, criterion=F.mse_loss), TypeError)
    assert "give targets=" in refusal(lambda: pipe.step(X, target=Y, loss_fn=F.mse_loss), TypeError)
    assert "the rest by name" in refusal(lambda: pipe.step(X, Y, F.mse_loss, "sum"), TypeError)
    assert "pipe((x, mask))" in refusal(lambda: pipe(X, Y), TypeError)
    assert "pipe(x)" in refusal(lambda: pipe(x=X), TypeError)
    assert "give the layers as one" in refusal(lambda: gpipe.GPipe(*layers(), 2, 2), TypeError)  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (nn.MSELoss, "loss_fn is the class nn.MSELoss; give one of it: nn.MSELoss()"),
        (None, "loss_fn is None; give a function of (output, target), such as nn.MSELoss()"),
        ("mse", "loss_fn is a str; give a function of (output, target)"),
        (torch.ones(()), "loss_fn is a Tensor; give a function of (output, target)"),
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
        (lambda out, target: (out - target) ** 2, "a tensor of shape (4, 2), torch.float32: add .mean()"),
        (lambda out, target: F.mse_loss(out, target).item(), "return the tensor itself, without .item()"),
        (lambda out, target: None, "it returned None: does its `return` lack?"),
        (lambda out, target: {"loss": out.mean()}, "a dict: return the loss in it, or (loss, metrics)"),
        (lambda out, target: Output(out, out.mean()), "a Output: return its .loss"),
        (lambda out, target: (out.mean(), 1, 2), "a tuple of 3: put what is not the loss into one"),
        (lambda out: out.mean(), "the loss is called as loss_fn(output, target)"),
        (lambda out, target, more: out.mean(), "the loss is called as loss_fn(output, target)"),
    ],
)
@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_wrong_loss_is_told_as_the_loss_with_what_to_return(
    remat: str, loss_fn: Callable[..., Any], text: str
) -> None:
    found = refusal(lambda: make(remat=remat).step(X, Y, loss_fn), TypeError)
    assert text in found
    assert "in the loss of micro-batch " in found


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


@pytest.mark.parametrize(
    "hidden",
    [
        Words(x=X),
        Parts([X]),
        {X},
        frozenset([X]),
        Sample(X),
        Slotted(),
        SimpleNamespace(a={"b": [X]}),
        nn.Linear(1, 1),
    ],
    ids=lambda hidden: type(hidden).__name__,
)
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
    """As pandas has them, by name."""

    __module__ = "pandas.core.frame"


def rows() -> Iterator[Tensor]:
    yield X


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (X.numpy(), "is a numpy array; give a tensor: torch.from_numpy(...)"),
        ({"x": X, "y": np.ones(8)}, "['y'] is a numpy array"),
        (Frame(), "is a Frame of pandas; give a tensor: torch.from_numpy(t.to_numpy())"),
        (X.to_sparse(), "is sparse (torch.sparse_coo), which cannot be split into micro-batches; give t.to_dense()"),
        (
            torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),
            "is a nested tensor, which has no rows to split",
        ),
        (nn.utils.rnn.pack_sequence([X, X]), "is a PackedSequence; give it padded"),
        (DataLoader(TensorDataset(X)), "is a DataLoader; give one mini-batch of it at a time"),
        (TensorDataset(X), "is a TensorDataset; give one mini-batch of it at a time"),
        (rows(), "is a generator; give one mini-batch of it at a time"),
        (map(torch.relu, [X]), "is a map; give one mini-batch of it at a time"),
    ],
)
def test_values_of_other_kinds_are_refused_with_how_to_turn_them_into_tensors(wrong: object, text: str) -> None:
    pipe = make()
    assert text in refusal(lambda: pipe(wrong), TypeError)
    both = refusal(lambda: pipe.step(wrong, wrong, F.mse_loss), TypeError)
    assert [
        both.count(f"{what}{text}" if text[0] == "[" else f"{what} {text}") for what in ("inputs", "targets")
    ] == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (None, "not None without one"),
        ({}, "not an empty dict"),
        ("words", "not a str without one"),
        ([1.0, 2.0], "not numbers in a list: torch.tensor(...)"),
    ],
)
def test_inputs_without_a_tensor_say_what_they_are(wrong: object, text: str) -> None:
    assert text in refusal(lambda: make()(wrong), ValueError)


def test_a_list_with_a_value_for_each_row_would_go_whole_to_every_micro_batch() -> None:
    pipe = make()
    text = refusal(lambda: pipe.step((X, list(range(8))), ["a"] * 8, F.mse_loss), ValueError)
    assert "inputs[1] is a list of 8 values" in text
    assert "targets is a list of 8 values" in text
    pipe.step(X, (Y, [1, 2]), lambda output, target: F.mse_loss(output, target[0]))


def test_a_layer_of_two_arguments_is_told_that_it_is_given_one_value() -> None:
    text = refusal(lambda: make([Pair(), Two()]).step(X, X, F.mse_loss), TypeError)
    assert "Two.forward() missing 1 required positional argument: 'y'" in text
    assert "a layer is given one value, what the layer before returned, also where that is a tuple" in text


def test_a_layer_that_is_given_none_or_a_tuple_is_told_where_it_may_come_from() -> None:
    class Silent(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)

    text = refusal(lambda: make([Silent(4, 4), nn.Linear(4, 4)]).step(X, X, F.mse_loss), TypeError)
    assert "if it is what the layer before returned: does its forward lack a return?" in text
    text = refusal(lambda: make([nn.LSTM(4, 4), nn.Linear(4, 4)]).step(X, X, F.mse_loss), TypeError)
    assert "as of an LSTM or an attention; put one between that takes the tensor out" in text


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"micro_batches": True}, "micro_batches=True; give M"),
        ({"micro_batches": "8"}, "micro_batches='8'; give M"),
        ({"micro_batches": np.int64(8)}, "as an int: int(...), not a int64"),
        ({"partitions": np.array([2, 1])}, "or the layers of each partition, as a list of ints"),
        ({"ties": ("0.weight", "2.weight")}, "give groups of names: [('0.weight', '5.weight')]"),
        ({"sample": X.numpy()}, "sample is a numpy array; give a tensor"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_with_the_right_one(how: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: make(**how), ValueError)


@pytest.mark.parametrize("returned", [None, torch.ones(3), "much"])
def test_a_weight_that_is_no_number_is_refused(returned: object) -> None:
    text = refusal(lambda: make().step(X, Y, F.mse_loss, reduction=lambda target: returned), TypeError)
    assert "reduction must return the weight of a micro-batch, one number" in text


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_lazy_modules_may_be_called_before_the_first_step(driver: str, remat: str) -> None:
    pipe = make([nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)], driver=driver, remat=remat)
    assert "partition" in pipe.summary()
    optimizer = torch.optim.Adam(pipe.parameters())
    F.mse_loss(pipe(X), Y).backward()
    assert all(p.grad is not None for p in pipe.parameters())
    optimizer.step()
    pipe.step(X, Y, F.mse_loss)


# What is given in another order, or is another thing.


def given_wrongly(pipe: gpipe.GPipe, folder: str) -> dict[str, Callable[[], object]]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrong: Any = gpipe
    return {
        "gpipe.save(folder, pipe": lambda: wrong.save(pipe, folder),
        "gpipe.load(folder, pipe": lambda: wrong.load(pipe, folder),
        "gpipe.load_weights(folder, pipe": lambda: wrong.load_weights(pipe, folder),
        "gpipe.save_weights(folder, pipe": lambda: wrong.save_weights(pipe, folder),
        "gpipe.find_checkpoint(folder, pipe": lambda: wrong.find_checkpoint(pipe),
        "pipe is a str": lambda: wrong.save(folder, "pipe"),
        "StepLR; give the optimizer alone": lambda: wrong.save(folder, pipe, scheduler),
        "GradScaler; give the optimizer alone": lambda: wrong.load(folder, pipe, torch.amp.GradScaler("cpu")),
        "not its state_dict()": lambda: wrong.save(folder, pipe, optimizer.state_dict()),
        "gpipe.GradScaler(pipe)": lambda: wrong.GradScaler(optimizer),
        "gpipe.record was given a NoneType": lambda: wrong.record(None).__enter__(),
        "gpipe.detect_nonfinite was given a Linear": lambda: wrong.detect_nonfinite(nn.Linear(1, 1)).__enter__(),
        "max_norm='1'; give a number": lambda: wrong.GPipe.clip_grad_norm_(pipe, "1"),
        "norm_type='inf'; give a number": lambda: wrong.GPipe.clip_grad_norm_(pipe, 1, "inf"),
    }


@pytest.mark.parametrize("text", given_wrongly(gpipe.GPipe([nn.Linear(1, 1)], 1, 1), ""))
def test_what_is_given_wrongly_is_refused_in_our_words(text: str, tmp_path: Path) -> None:
    wrongly = given_wrongly(gpipe.GPipe([nn.Linear(2, 1)], 1, 1), str(tmp_path))
    with pytest.raises(TypeError, match=re.escape(text)):
        wrongly[text]()
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    for asked in (gpipe.load, gpipe.find_checkpoint):
        with pytest.raises(gpipe.CheckpointError, match="this is a file; give the folder"):
            asked(tmp_path / "model.pt")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 0, 0.0])
def test_a_scale_that_leaves_nothing_of_the_gradients_is_refused(scale: float) -> None:
    pipe = gpipe.GPipe([nn.Linear(2, 1)], 1, 1)
    with pytest.raises(ValueError, match="give a finite number other than 0"):
        pipe.step(torch.ones(2, 2), torch.ones(2, 1), nn.functional.mse_loss, scale=scale)


@pytest.mark.parametrize(
    "make_graph",
    [
        lambda pipe: torch.jit.trace(pipe, torch.ones(2, 2)),
        torch.jit.script,
        lambda pipe: torch.export.export(pipe, (torch.ones(2, 2),)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_graph_of_a_pipe_is_refused_in_our_words(make_graph: Callable[[gpipe.GPipe], object]) -> None:
    with pytest.raises(TypeError, match=r"export\nthe plain layers|export the plain layers"):
        make_graph(gpipe.GPipe([nn.Linear(2, 1)], 1, 1))


def test_all_attributes_of_a_pipe_can_be_listed() -> None:
    pipe = gpipe.GPipe([nn.Linear(2, 1)], 1, 1)
    assert dict(inspect.getmembers(pipe))["partitions"] == 1
