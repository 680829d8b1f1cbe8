"""What a new user gets wrong is told in words that say what to write instead."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.mistaken import Two, X, Y, layers, make, refusal
from tests.support.odd_layers import Pop, Stash


class Forgets(nn.Module):
    pass


def function_of_x(x: Tensor) -> Tensor:
    return x


NOT_LAYERS: list[tuple[object, str]] = [
    (torch.relu, "layer 1 is the function relu. Pass a module: nn.ReLU()"),
    (F.gelu, "layer 1 is the function gelu. Pass a module: nn.GELU()"),
    (F.relu, "layer 1 is the function relu. Pass a module: nn.ReLU()"),
    (torch.tanh, "layer 1 is the function tanh. Pass a module: nn.Tanh()"),
    (F.leaky_relu, "Pass a module: nn.LeakyReLU()"),
    (partial(F.max_pool2d, kernel_size=2), "layer 1 is the function max_pool2d. Pass a module: nn.MaxPool2d(...)"),
    (
        lambda x: x,
        "layer 1 is a function with required arguments (x). Pass a module whose forward calls it, or",
    ),
    (function_of_x, "layer 1 is the function function_of_x with required arguments (x)"),
    (
        nn.Linear,
        "requires arguments (in_features, out_features). Pass an instance: nn.Linear(...)",
    ),
    (nn.ReLU().forward, "layer 1 is a method of a ReLU. Pass the module itself"),
    (nn.MSELoss(), "layer 1 (MSELoss) is a loss. Pass it to each step: pipe.step(inputs, targets, nn.MSELoss())"),
    (None, "layer 1 is None. Remove it"),
    ([nn.ReLU()], "layer 1 is a list. Join its layers with nn.Sequential(*...)"),
    (nn.ModuleList([nn.ReLU()]), "layer 1 (ModuleList) has no forward method. Pass its elements as layers"),
    (Forgets(), "layer 1 (Forgets) has no forward method. Define one: def forward(self, x)"),
    (nn.DataParallel(nn.ReLU()), "layer 1 (DataParallel) already replicates its module. Pass its .module"),
    (torch.ones(3), "layer 1 is a Tensor. Pass an nn.Module"),
    (nn.Linear(2, 2, device="meta"), "layer 1 (Linear): weight, bias is on the meta device and has no values"),
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
        ({"a": nn.ReLU()}, "layers is a dict, not a sequence of layers. Pass its values in order"),
        (
            nn.ModuleDict({"a": nn.ReLU()}),
            "layers is a ModuleDict, not a sequence of layers. Pass its values in order",
        ),
        (
            nn.ModuleList([nn.ReLU()]),
            "not a sequence of layers. Pass list(layers), or nn.Sequential(*layers)",
        ),
        ({nn.ReLU(), nn.Tanh()}, "layers is a set, which has no order. Pass a list"),
        ("relu", "layers is a str, not a sequence of layers. Pass an nn.Sequential"),
        (torch.ones(2), "layers is a Tensor, not a sequence of layers. Pass an nn.Sequential"),
        (Two(), "Two is not a sequence of layers"),
    ],
)
def test_what_is_no_sequence_of_layers_is_refused_with_what_to_write(wrong: object, text: str) -> None:
    assert text in refusal(lambda: gpipe.GPipe(wrong, 1, 2), ValueError)  # type: ignore[arg-type]


def test_a_pipe_in_a_pipe_is_refused_and_its_layers_are_not() -> None:
    inner = make()
    for wrong in (inner, nn.Sequential(nn.Tanh(), inner)):
        text = refusal(lambda wrong=wrong: make([wrong, nn.Linear(2, 2)]), ValueError)  # type: ignore[misc]
        assert "[pipe-in-layer]" in text
    make([*inner, nn.Linear(2, 2)]).step(X, Y, F.mse_loss)


def test_skips_below_a_layer_are_refused_unless_something_runs_them() -> None:
    buried = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Stash("a", width=4), Pop({"a": 4}, width=4)))
    text = refusal(lambda: make([buried, nn.Tanh()]), ValueError)
    assert "layer 0 (Sequential): its submodule 1.0 (Stash) has stash = ('a',), but only layers of the pipe" in text
    assert "its submodule 1.1 (Pop) has pop = ('a',)" in text
    assert "Pass the submodules of layer 0 as separate layers" in text
    make([nn.Linear(4, 4), nn.Sequential(gpipe.Sequential(Stash("a", width=4), Pop({"a": 4}, width=4)))]).step(
        X, X, F.mse_loss
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"chunks": 8}, "'chunks'. Use micro_batches="),
        ({"n_microbatches": 8}, "'n_microbatches'. Use micro_batches="),
        ({"num_stages": 2}, "'num_stages'. Use partitions="),
        ({"num_partitions": 2}, "'num_partitions'. Use partitions="),
        (
            {"checkpoint": "always"},
            "'checkpoint'. Use remat='always', 'except_last', 'never', or the number",
        ),
        ({"device": "cpu"}, "'device'. Use devices="),
        (
            {"loss_fn": F.mse_loss},
            "'loss_fn'. Pass the loss function to each step: pipe.step(inputs, targets, loss_fn)",
        ),
        ({"remats": "never"}, "'remats'. Use remat="),
        ({"zebras": 2}, "'zebras'. Remove it.\nKnown arguments: model, partitions"),
        ({"chunks": 8, "num_stages": 2}, "'num_stages'. Use partitions="),
        ({"balance": [2, 1]}, "'balance'. Use partitions=[<layers of each stage>, ...]"),
        ({"costs": [1, 2]}, "'costs'. Use plan=gpipe.find_plan(..., costs=...)"),
        ({"verify": False}, "'verify'. Set pipe.verify_steps = False"),
    ],
)
def test_words_of_other_libraries_are_refused_with_ours(given: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: gpipe.GPipe(layers(), **given), TypeError)
    assert text in refusal(lambda: gpipe.GPipe(layers(), 2, 2, **given), TypeError)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"micro_batches": True}, "micro_batches=True is invalid"),
        ({"micro_batches": "8"}, "micro_batches='8' is invalid"),
        ({"micro_batches": np.int64(8)}, "(a Python int: convert the int64 with int())"),
        ({"partitions": np.array([2, 1])}, "or the layers of each partition, as a list of ints"),
        (
            {"ties": ("0.weight", "2.weight")},
            "is not a list of groups of names. Pass e.g. [('0.weight', '5.weight')]",
        ),
        ({"batch_norm": True}, "batch_norm=True is unknown"),
        ({"driver": gpipe.Threads(0)}, "intra_op_threads=0 is invalid"),
        ({"sample": X.numpy()}, "sample is a numpy array, but only tensors are split"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_with_the_right_one(how: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: make(**how), ValueError)


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


@pytest.mark.parametrize("make_lazy", [nn.LazyBatchNorm1d, lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False))])
def test_lazy_modules_with_buffers_are_rejected_until_they_have_shapes(make_lazy: Callable[[], nn.Module]) -> None:
    text = r"layer 1 \(.*\) is lazy, and its buffers \((0\.)?running_mean, .* Run the layers once on an example"
    found = [nn.Linear(4, 4), make_lazy(), nn.LazyLinear(2)]
    for given in (found, [nn.Linear(4, 4), make_lazy, nn.LazyLinear(2)]):
        with pytest.raises(ValueError, match=text):
            make(given)
    nn.Sequential(*found)(X)
    make(found).step(X, Y, F.mse_loss)


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
        "StepLR. Pass the torch optimizer": lambda: wrong.save(folder, pipe, scheduler),
        "GradScaler. Pass the torch optimizer": lambda: wrong.load(folder, pipe, torch.amp.GradScaler("cpu")),
        "not its state_dict()": lambda: wrong.save(folder, pipe, optimizer.state_dict()),
        "gpipe.GradScaler(pipe)": lambda: wrong.GradScaler(optimizer),
        "gpipe.record: pipe is a NoneType": lambda: wrong.record(None).__enter__(),
        "Use gpipe.detect_nonfinite(pipe)": lambda: wrong.detect_nonfinite(nn.Linear(1, 1)).__enter__(),
        "max_norm='1' is not a number": lambda: wrong.GPipe.clip_grad_norm_(pipe, "1"),
        "norm_type='inf' is not a number": lambda: wrong.GPipe.clip_grad_norm_(pipe, 1, "inf"),
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
        with pytest.raises(gpipe.CheckpointError, match="This is a file"):
            asked(tmp_path / "model.pt")


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
    with pytest.raises(TypeError, match=r"\[pipe-not-traceable\]"):
        make_graph(gpipe.GPipe([nn.Linear(2, 1)], 1, 1))


def test_all_attributes_of_a_pipe_can_be_listed() -> None:
    pipe = gpipe.GPipe([nn.Linear(2, 1)], 1, 1)
    assert dict(inspect.getmembers(pipe))["partitions"] == 1
