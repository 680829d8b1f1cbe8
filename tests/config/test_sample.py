"""What runs on a sample leave behind: nothing in what layers and hooks keep, of whatever kind."""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.planned import pipe_by_costs

X = torch.linspace(-1, 1, 32).view(8, 4)
OF_MODULE: list[int] = []


class Meter:
    of_class: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self.calls, self.peak = 0, 0

    def update(self, x: Tensor) -> None:
        self.calls, self.peak = self.calls + 1, max(self.peak, len(x))
        Meter.of_class["calls"] += 1


class Keeps(nn.Module):
    """Keeps something of each call in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.meter = nn.Linear(4, 4), 0, Meter()
        self.listed, self.by_name, self.queue = list[Tensor](), {"calls": list[int]()}, deque[int](maxlen=64)
        self.seen, self.array, self.tensor, self.numbers = set[int](), np.zeros(2), torch.zeros(2), itertools.count()
        self.hooked: defaultdict[str, list[int]] = defaultdict(list)
        self.register_forward_hook(lambda module, given, made: self.hooked["rows"].append(len(made)))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.meter.update(x)
        self.listed.append(x.detach())
        self.by_name["calls"].append(len(x))
        self.queue.append(len(x))
        self.seen.add(len(self.seen))
        self.array += 1
        self.tensor.add_(1)
        next(self.numbers)
        OF_MODULE.append(len(x))
        made: Tensor = self.linear(x)
        return made

    def kept(self) -> list[object]:
        places: list[Any] = [self.listed, self.by_name["calls"], self.queue, self.seen, self.hooked, OF_MODULE]
        numbers = self.calls, self.meter.calls, self.meter.peak, Meter.of_class["calls"], repr(self.numbers)
        return [*map(len, places), *numbers, *self.array.tolist(), *self.tensor.tolist()]


class Net(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def of_layers(build: Any = gpipe.GPipe, **how: Any) -> Callable[[list[nn.Module]], object]:
    return lambda blocks: build(blocks, 2, 4, sample=X, **how)


def of_a_model(build: Any = gpipe.GPipe, **how: Any) -> Callable[[list[nn.Module]], object]:
    return lambda blocks: build(Net(blocks), 2, 4, sample=X, **how)


RUNS: dict[str, Callable[[list[nn.Module]], object]] = {
    "layers, measured": of_layers(),
    "layers, by a function": of_layers(pipe_by_costs, costs=lambda layer, x: float(layer(x).numel())),
    "layers, remat='auto'": of_layers(pipe_by_costs, remat="auto", costs="params"),
    "a model, measured": of_a_model(),
    "a model, costs='params'": of_a_model(pipe_by_costs, costs="params"),
    "layers_of": lambda blocks: gpipe.layers_of(Net(blocks), X),
    "find_plan": lambda blocks: gpipe.find_plan(blocks, X, 2, partitions=2, micro_batches=4, measure=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_on_a_sample_leave_nothing_behind(name: str) -> None:
    blocks = [Keeps() for _ in range(4)]
    blocks[0](X)
    before = [block.kept() for block in blocks]
    made = RUNS[name]([*blocks])
    assert [block.kept() for block in blocks] == before
    if isinstance(made, gpipe.GPipe):
        blocks[1].listed.append(X)
        made.step(X, X, F.mse_loss)
        assert blocks[1].listed[0] is X
        assert len(blocks[1].listed) > 4  # where layers find it themselves


def test_a_path_that_is_learned_in_a_step_leaves_what_one_run_leaves() -> None:
    model = Net(blocks := [Keeps() for _ in range(2)])
    pipe = pipe_by_costs(model, 2, 1, sample=X, costs="params", remat="never").eval()
    with torch.no_grad():
        pipe(X)
        first = blocks[0].kept()
        pipe(X[None].expand(2, 8, 4))  # of other dimensions
    assert (first[0], blocks[0].kept()[0]) == (1, 2)
