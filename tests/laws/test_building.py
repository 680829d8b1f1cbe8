"""Law: while a pipe is built, each block of a traced model runs four times, whatever the model.

Once to trace it, once in the model by itself, once apart, which has to give the same, and once behind that on other
rows, as the next micro-batch. Where costs are measured it runs once more, and of alike blocks each rank times one.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.tracing.layers_of import ModelLayers
from tests.families.batches import batch
from tests.families.catalogue import named
from tests.families.family import build
from tests.support.handwritten import Block, Layered, W, vectors
from tests.support.planned import pipe_by_costs

RUNS, DEPTH = 4, 12
SETTLED_LATE = {"vit"}
"""Models that change their config in the first forward: one more run shows that later forwards do not."""


class Plain(Layered):
    """Blocks one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout=0.1) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain() -> tuple[nn.Module, Any]:
    return Plain(), vectors(8)


def of_family(name: str) -> tuple[nn.Module, Any]:
    family = named(name)
    return build(family, dropout=True), batch(family)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {"plain": plain} | {
    name: partial(of_family, name) for name in ("llama", "gpt2", "bert", "t5", "vit", "opt")
}


@contextmanager
def counted(layers: ModelLayers) -> Iterator[Counter[nn.Module]]:
    """Counts the runs of each block, where the state that a building restores does not reach."""
    blocks = [layers.traced.model.get_submodule(name) for name in layers.traced.parts.blocks]
    counts, places = (ctypes.c_int * len(blocks))(), {id(block): at for at, block in enumerate(blocks)}
    runs = Counter[nn.Module]()
    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(block) for block in blocks}:

            def run(self: nn.Module, *args: Any, _forward: Any = kind.forward, **kwargs: Any) -> Any:
                counts[places[id(self)]] += 1
                return _forward(self, *args, **kwargs)

            patch.setattr(kind, "forward", run)
        yield runs
    runs.update(dict(zip(blocks, counts, strict=True)))
    assert len(runs) == len(blocks) > 1


@pytest.mark.parametrize("name", MODELS)
def test_a_block_runs_four_times_while_a_pipe_is_built(name: str) -> None:
    model, sample = MODELS[name]()
    layers = gpipe.layers_of(model, sample)
    for costs in ("params", [1.0] * len(layers)):
        with counted(layers) as runs, pipe_by_costs(model, 2, 4, sample=sample, costs=costs, seed=1):
            pass
        assert {*runs.values()} == {RUNS + (name in SETTLED_LATE)}, costs


def test_a_block_whose_costs_are_measured_runs_once_more_and_one_of_a_rank_is_timed() -> None:
    model, sample = plain()
    with counted(gpipe.layers_of(model, sample)) as runs, gpipe.GPipe(model, 2, 4, sample=sample, seed=1) as pipe:
        pass
    timed = [at for at, times in enumerate(runs.values()) if times > RUNS + 1]
    assert {*runs.values()} - {runs[block] for at, block in enumerate(runs) if at in timed} == {RUNS + 1}
    assert timed == [0, 1, W, W + 1]  # the first gives no gradient on; one has as many features as its own number
    assert len({*pipe.costs}) == 3
