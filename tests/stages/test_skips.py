"""Skip connections: from stage to stage and within one, to the bits of `gpipe.Sequential` and of the plain loop."""

import copy
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import (
    REMATS,
    assert_same_bits,
    mini_batch,
    one_thread,
    plain_call,
    same_bits,
)

M = 3
WIDTH = 5


class Stash(nn.Module):
    """Keeps its input, or its very output, under a name."""

    def __init__(self, name: str, *, output: bool = False) -> None:
        super().__init__()
        self.stash = (name,)
        self.output = output
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.linear(x)
        return y, {self.stash[0]: y if self.output else x}


class Nothing(Stash):
    """Keeps None."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), dict.fromkeys(self.stash)


class Pop(nn.Module):
    """Uses what was kept, more than once, and its own input too."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.pop = names
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **popped: Tensor | None) -> Tensor:
        out: Tensor = self.linear(x)
        for tensor in popped.values():
            out = out * 2 if tensor is None else out + tensor.sin() * x + tensor * 0.5
        return out


class StashAndPop(nn.Module):
    """Pops one tensor and stashes two, among them the one that it popped."""

    stash = ("b", "again")
    pop = ("a",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, a: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x) * a.cos(), {"again": a, "b": x + a}


class Mask(nn.Module):
    """Stashes what needs no gradient."""

    stash = ("mask",)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"mask": x > 0}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "over all": lambda: [linear(), Stash("a"), linear(), nn.Tanh(), linear(), Pop("a")],
    "to the next layer": lambda: [linear(), Stash("a"), Pop("a"), linear()],
    "several pops": lambda: [linear(), Stash("a"), Pop("a"), Pop("a"), Pop("a"), Pop("a")],
    "nested": lambda: [linear(), Stash("a"), Stash("b"), linear(), Pop("b"), linear(), Pop("a")],
    "crossed": lambda: [linear(), Stash("a"), Stash("b"), linear(), Pop("a"), linear(), Pop("b")],
    "two at once": lambda: [linear(), Stash("a"), Stash("b"), nn.Tanh(), linear(), Pop("b", "a")],
    "the very output": lambda: [linear(), Stash("a", output=True), Pop("a"), linear(), Pop("a"), linear()],
    "handed on": lambda: [
        linear(),
        Stash("a", output=True),
        StashAndPop(),
        linear(),
        Pop("again", "b", "a"),
        Pop("again"),
    ],
    "without gradient": lambda: [linear(), Mask(), linear(), Pop("mask"), linear()],
    "None": lambda: [Nothing("a"), nn.ReLU(), Pop("a"), Stash("b"), Pop("a", "b")],
    "with dropout": lambda: [linear(), Stash("a"), nn.Dropout(0.3), Pop("a"), nn.BatchNorm1d(WIDTH), Pop("a")],
}


def build(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return MODELS[name]()


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return mini_batch(WIDTH, WIDTH, rows)


def cuts(layers: int) -> list[list[int]]:
    """Every way to cut so many layers."""
    found = []
    for count in range(layers):
        for places in combinations(range(1, layers), count):
            found.append([b - a for a, b in pairwise([0, *places, layers])])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_skips_give_the_bits_of_the_reference_loop_for_every_cut(name: str) -> None:
    for at, cut in enumerate(cuts(len(build(name)))):
        how: Any = {"remat": REMATS[at % len(REMATS)], "driver": ("threads", "lockstep")[at % 2]}
        with gpipe.GPipe(build(name), cut, M, seed=2, **how) as pipe:
            assert pipe.verify(*data(), F.mse_loss, against="model").equal


@pytest.mark.parametrize("name", [name for name in MODELS if name != "with dropout"])
def test_one_micro_batch_gives_the_bits_of_a_gpipe_sequential(name: str) -> None:
    x, y = data()
    plain = gpipe.Sequential(*build(name))
    with one_thread():
        output = plain(x)
        F.mse_loss(output, y).backward()
    for cut in cuts(len(plain)):
        pipe = gpipe.GPipe(build(name), cut, 1)
        made = pipe(x)
        F.mse_loss(made, y).backward()
        assert same_bits(made, output)
        assert_same_bits(pipe, list(plain))


def test_the_gradient_of_an_input_that_is_stashed_has_the_bits_of_the_plain_loop() -> None:
    torch.manual_seed(0)
    layers = [Stash("a"), Pop("a"), Pop("a"), Pop("a"), Pop("a"), linear()]
    x, y = data()
    wanting = x.clone().requires_grad_()
    plain_call(copy.deepcopy(layers), wanting, y, F.mse_loss, micro_batches=M, seed=2)
    for at, cut in enumerate(cuts(len(layers))):
        given = x.clone().requires_grad_()
        pipe = gpipe.GPipe(copy.deepcopy(layers), cut, M, remat=REMATS[at % 3], seed=2)
        F.mse_loss(pipe(given), y).backward()
        assert same_bits(given.grad, wanting.grad)


def test_a_skip_goes_straight_from_stage_to_stage() -> None:
    pipe = gpipe.GPipe(MODELS["over all"](), 6, M)
    (route,) = (route for route in pipe.program.routes if route.name == "a/5")
    assert (route.source, route.target) == (1, 5)


# Refusals.


class Bad(nn.Module):
    """Announces what it is told to, and returns what it is told to."""

    def __init__(self, stash: object, returned: object = None) -> None:
        super().__init__()
        self.stash = stash
        self.returned = returned
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> object:
        return (self.linear(x), self.returned) if self.returned is not None else self.linear(x)


def test_unknown_duplicate_and_ill_named_skips_are_refused_all_at_once() -> None:
    layers: Sequence[nn.Module] = [
        Pop("early"), Stash("twice"), Stash("twice"), Stash("idle"), Pop("twice", "ghost"), Bad(("a/b",))
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cannot be built") as caught:
        gpipe.GPipe(layers, 99, 0)
    text = str(caught.value)
    for part in (
        "layer 0 pops 'early', which no earlier layer stashes",
        "layers 1 and 2 both stash 'twice'. Use a different name for each stash",
        "layer 4 pops 'ghost', which no earlier layer stashes",
        "layer 5 stashes 'a/b', which is not a valid name",
        "partitions=99",
        "micro_batches=0",
    ):
        assert part in text


@pytest.mark.parametrize(
    "returned", [None, {}, {"b": torch.ones(1)}, {"a": 3}, {"a": torch.ones(1), "b": torch.ones(1)}, [1]], ids=str
)
@pytest.mark.parametrize("cut", [[2], [1, 1]])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_wrong_return_of_a_layer_that_stashes_is_refused_with_what_it_must_return(
    driver: str, cut: list[int], returned: object
) -> None:
    pipe = gpipe.GPipe([Bad(("a",), returned), Pop("a")], cut, M, driver=driver)
    with pytest.raises(TypeError, match=r"\[invalid-stash-result\]") as caught:
        pipe.step(*data(), F.mse_loss)
    assert "layer 0 (0: Bad)" in "\n".join(caught.value.__notes__)
