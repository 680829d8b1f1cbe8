"""Tests that a pipe follows changes of the Python state that a traced model reads, between and within runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import weights_of
from tests.support.planned import pipe_by_costs

W, M, SEED = 8, 4, 3
FACTOR = 1.0
COUNTS = {"calls": 0}


def glue(x: Tensor) -> Tensor:
    return x * 1.25


def counting_from(start: float) -> Callable[[], float]:
    def value() -> float:
        return start

    return value


class Net(nn.Module):
    """Blocks, with code in between that reads Python state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, W)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(W, W), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(W, 20)
        self.offset = nn.Buffer(torch.linspace(0, 1, W))
        self.scale, self.config, self.skips = 1.0, SimpleNamespace(shift=0.0, late=False), 4
        self.closure = counting_from(0.5)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        weights = mask.cumsum(-1) / 7
        if not bool(mask.all()):
            weights = weights.masked_fill(mask == 0, -1.0)
        for at, block in enumerate(self.blocks):
            if at >= self.skips:
                continue
            x = glue(block(x)) * self.scale + self.config.shift + self.closure() * FACTOR
            if self.training and at == 1:
                x = x + weights[..., None] * self.offset
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(step: int, *, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    if padded:
        mask[5:, 3:] = 0
    return {"ids": ids, "mask": mask, "labels": ids.roll(1, 1)}


def made(net: nn.Module, **settings: Any) -> gpipe.GPipe:
    settings = {"partitions": 2, "schedule": "1f1b", "remat": "never", "costs": "params", **settings}
    return pipe_by_costs(net, micro_batches=M, sample=batch(0), seed=SEED, **settings)


class Verified:
    """A pipe that verifies each step against the current state of its model."""

    def __init__(self, make: Callable[[], nn.Module] = Net, **settings: Any) -> None:
        with weights_of(2):
            self.net: Any = make()
        self.pipe = made(self.net, **settings)

    def step(self, given: dict[str, Tensor] | None = None) -> None:
        given = batch(self.pipe.step_number) if given is None else given
        assert self.pipe.verify(given, against="model").equal
        self.pipe.step(given)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda net: setattr(net, "scale", 0.5),
    "the config": lambda net: setattr(net.config, "shift", 0.25),
    "a closure": lambda net: setattr(net, "closure", counting_from(-2.0)),
    "a buffer": lambda net: net.offset.mul_(3),
    "another buffer": lambda net: setattr(net, "offset", nn.Buffer(torch.ones(W))),
    "a weight": lambda net: net.blocks[1][0].weight.data.mul_(0.5),
    "frozen": lambda net: net.embed.requires_grad_(False),
    "a hook": lambda net: net.blocks[2].register_forward_hook(lambda module, given, made: made * 2),
    "a patched method": lambda net: setattr(
        net.blocks[1][0], "forward", MethodType(lambda self, x: F.linear(x, self.weight), net.blocks[1][0])
    ),
    "a module inside of a block": lambda net: net.blocks[3].__setitem__(2, nn.Sigmoid()),
    "a block in evaluation": lambda net: net.blocks[1].eval(),
    "all in evaluation": lambda net: net.eval(),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("remat", ["always", "never"])
def test_what_changes_behind_the_third_step_is_followed(what: str, remat: str) -> None:
    trained = Verified(remat=remat)
    for _ in range(3):
        trained.step()
    CHANGES[what](trained.net)
    for _ in range(2):
        trained.step()


@pytest.mark.parametrize(("name", "value"), [("FACTOR", -1.0), ("glue", torch.sin)])
def test_a_global_that_changes_is_followed(name: str, value: object) -> None:
    trained = Verified()
    for _ in range(3):
        trained.step()
    refused = pytest.raises(ValueError, match=r"\[branch-on-value\]") if name == "glue" else nullcontext()
    with mock.patch(f"{__name__}.{name}", value), refused:
        trained.step()


def test_a_dropped_block_and_a_replaced_one_are_refused() -> None:
    trained = Verified()
    for _ in range(3):
        trained.step()
    trained.net.skips = 3
    with pytest.raises(ValueError, match=r"\[branch-on-value\]"):
        trained.pipe.step(batch(0))
    trained.net.skips = 4
    trained.net.blocks[1] = nn.Linear(W, W)
    with pytest.raises(ValueError, match=r"\[module-replaced\]"):
        trained.pipe.step(batch(0))


def test_a_number_read_from_inputs_leads_each_micro_batch_where_it_says() -> None:
    trained = Verified()
    for at in range(4):
        trained.step(batch(at, padded=at % 2 == 1))  # two micro-batches of four are padded


class Ragged(Net):
    """Returns as many columns as its largest id, which code between blocks reads."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(W, W)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.inner(x)[:, : 2 + int(ids.max()) % 3]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(W, W), self.Cut(), nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.blocks[1](self.blocks[0](self.embed(ids)), ids)
        x = x * x.shape[1] + torch.arange(x.shape[1])[:, None]
        x = self.blocks[3](self.blocks[2](x).tanh() / x.shape[1])
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, : x.shape[1]].flatten()), "logits": logits}


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("remat", ["always", "never"])
def test_an_operation_that_gives_another_shape_leads_python_elsewhere_from_there_on(
    partitions: int, remat: str
) -> None:
    trained = Verified(Ragged, partitions=partitions, remat=remat)
    for _ in range(4):
        trained.step()


class Hands(Net):
    """Before it calls a block, stores a tensor where the block reads it."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(W, W)
            self.mask: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.mask[..., None]

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.Looks()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.blocks[2].mask = ids % 3 + 1
        return super().forward(ids, mask, labels)


HALVES = False


@contextmanager
def halving() -> Iterator[None]:
    global HALVES
    HALVES = True
    yield
    HALVES = False


class Flagged(Net):
    """Sets a global around a block, which reads it."""

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (0.5 if HALVES else 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.Looks(W, W)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with halving():
            return super().forward(ids, mask, labels)


@pytest.mark.parametrize("make", [Hands, Flagged])
@pytest.mark.parametrize("remat", ["always", "never"])
def test_what_the_forward_puts_where_blocks_look_is_there(make: type[Net], remat: str) -> None:
    trained = Verified(make, remat=remat, driver="lockstep")  # threads would each put theirs there
    for at in range(4):
        trained.step(batch(at, padded=at > 1))


class Casts(Net):
    """Computes a table outside the surrounding autocast, and a block without gradients."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", enabled=False):
            table = mask.float() @ mask.float().mT
        x = self.embed(ids)
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x) + (table @ table).mean() * 1e-3
        logits = self.head(x).float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("remat", ["always", "never"])
def test_modes_that_the_forward_sets_are_set_again(casts: bool, remat: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        trained = Verified(Casts, remat=remat)
        for _ in range(3):
            trained.step()


def test_a_hook_that_is_there_from_the_start_is_called_once_a_micro_batch() -> None:
    trained = Verified()
    calls = []
    trained.net.blocks[0].register_forward_hook(lambda *_: calls.append(0))
    trained.step()
    trained.step()
    assert len(calls) == 2 * M
