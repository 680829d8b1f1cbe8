"""Tests which modules a model is split between."""

import copy
from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.tracing.parts import find_blocks
from tests.support.clock import Clock
from tests.support.handwritten import vectors
from tests.support.planned import pipe_by_costs


class Repeated(nn.Module):
    """Calls one block several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh())])
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(self.times):
            x = self.blocks[0](x)
        return self.head(x).square().mean()


class Stage(nn.Module):
    """Also returns its output before the last step, which only some stages have."""

    def __init__(self, *, steps: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.linear(x).tanh()
        return before.sin() if self.steps else before, before


class Stages(nn.Module):
    """Uses both outputs of several stages, in turn and later."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(steps=at % 2 == 0) for at in range(5)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.stages:
            x, before = stage(x)
            kept.append(before)
            x = x + 0.5 * before
        for before in kept:
            x = x + self.norm(before)
        return self.head(x).square().mean()


def check(build: Callable[[], nn.Module], *cuts: int) -> None:
    for partitions in cuts:
        with pipe_by_costs(build(), partitions, 3, sample=vectors(5)) as pipe:
            assert pipe.verify(vectors(9), against="model").equal


@pytest.mark.parametrize("build", [lambda: Repeated(3), Stages], ids=["repeated", "returned twice"])
def test_blocks_called_again_and_tensors_returned_twice_train_as_the_model(
    build: Callable[[], nn.Module],
) -> None:
    # A list of one block was none: albert, whose layers share all their weights, had to be told blocks=. A tensor in
    # two places was known by its last place alone: swinv2, whose last stage has nothing to scale down, was refused.
    assert len(find_blocks(build())) == (5 if build is Stages else 1)
    check(build, 1, 2, 4)


def test_bug_a_block_with_another_name_ahead_of_the_list_ends_a_layer_each_time() -> None:
    # By the other name it was no block: where it ended no layer began, but in the model's own random numbers one did,
    # so that dropout was refused. So it was of a sequence, whose parts under that name were blocks too.
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, others = dropped(), [dropped(), dropped()]
            self.blocks = nn.ModuleList([self.first, others[0], self.first, others[1], self.first])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    def dropped() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))

    for blocks in (None, ["blocks.0", "blocks.1", "first", "blocks.3"]):
        assert len(gpipe.layers_of(Shares(), torch.randn(4, 6), blocks=blocks)) == 6


class Inner(nn.Module):
    """Calls its blocks through `call`, which may depend on a bool that it read."""

    def __init__(self, blocks: int, times: int, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stage(steps=False) for _ in range(blocks)])
        self.times = times
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.isfinite().all() else x.nan_to_num()
        for _ in range(self.times):
            for block in self.blocks:
                x = self.call(block, x)
        return x


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(6, 6), inner, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x))).square().mean()


@pytest.mark.parametrize(
    ("inner", "layers"),
    [
        (Inner(1, 3, lambda block, x: block(x)[0]), 5),  # albert: a bool that was read made one layer of all
        (Inner(3, 1, lambda block, x: block.forward(x)[0]), 5),  # squeezebert; the whole of it was one layer
        (Inner(3, 1, lambda block, x: block.get_submodule("linear")(x).tanh()), 3),
    ],
    ids=["one block called again", "forward called", "not called"],
)
def test_blocks_that_one_module_runs_in_its_own_way(inner: Inner, layers: int) -> None:
    assert len(gpipe.layers_of(Outer(copy.deepcopy(inner)), torch.randn(6, 6))) == layers
    check(lambda: Outer(copy.deepcopy(inner)), 1, 2)


def test_what_blocks_draw_whose_forward_is_called_is_as_in_a_pipe() -> None:
    torch.manual_seed(0)
    model, x = Outer(Inner(3, 1, lambda block, x: nn.functional.dropout(block.forward(x)[0]))), torch.randn(6, 6)
    with gpipe.GPipe(copy.deepcopy(model), 2, 1, sample=x, seed=3, driver="lockstep") as pipe:
        found = pipe.step(x)
    with gpipe.layers_of(model, x).rng_scope(3, 0, 0):
        assert torch.equal(found, model(x).detach())
    assert all("forward" not in vars(module) for module in model.modules())


def test_several_lists_come_before_one_module_that_stands_alone() -> None:
    model = nn.Module()
    model.alone, model.several = (nn.ModuleList([nn.Linear(2, 2) for _ in range(count)]) for count in (1, 2))
    assert find_blocks(model) == ["several.0", "several.1"]


def test_the_seconds_of_a_layer_are_those_of_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The proof runs each block once more, on smaller numbers, and layers_of told the time of both.
    clock, slept = Clock(monkeypatch), SimpleQueue[Tensor]()

    class Sleeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.max() < 1:
                clock.sleep(1)
                slept.put(x)
            return x + 0 * super().forward(x)

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Sleeps(3, 3), Sleeps(3, 3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    layers = gpipe.layers_of(Sleeper(), torch.ones(2, 3))
    assert slept.qsize() == 2
    assert [layer.seconds for layer in layers] == [0] * len(layers)
