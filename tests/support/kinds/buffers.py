"""S7: buffers that a forward changes, seen or unseen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.ao.quantization as quantization
from torch import nn

from .blocks import network
from .case import Case, Draw, kind

Write = Callable[["Counter", torch.Tensor], object]


class Counter(nn.Module):
    """Counts something in a buffer; perhaps its output depends on the count."""

    n: torch.Tensor
    other: torch.Tensor

    def __init__(self, width: int, write: Write, used: bool, begins: int) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(width))
        self.register_buffer("other", torch.zeros(2, 2), persistent=False)
        self.write, self.used, self.begins = write, used, begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * (1 + 0.01 * self.n.detach().clone()) if self.used else x
        if self.training and int(self.other[0, 0]) >= self.begins:
            self.write(self, (x.detach() > 0.5).sum(0).float())
        if self.begins:
            self.other.data[0, 0] += 1
        return out


def through_assignment(counter: Counter, made: torch.Tensor) -> None:
    counter.n = counter.n + made


def through_two(counter: Counter, made: torch.Tensor) -> None:
    counter.n.data.add_(made)
    counter.other[1].add_(made.sum())


def through_set(counter: Counter, made: torch.Tensor) -> None:
    counter.n.data = counter.n.data + made


SEEN: tuple[Write, ...] = (
    through_assignment,
    torch.no_grad()(lambda counter, made: counter.n.add_(made)),
    lambda counter, made: torch.add(counter.n, made, out=counter.n),
    lambda counter, made: counter._buffers.update(n=counter.n + made),
)
UNSEEN: tuple[Write, ...] = (
    through_two,
    through_set,
    lambda counter, made: np.add(counter.n.numpy(), made.numpy(), out=counter.n.numpy()),
    lambda counter, made: torch.frombuffer(counter.n.numpy(), dtype=torch.float32).data.add_(made),
    lambda counter, made: counter.n.detach()[1:].data.add_(made[1:]),
    lambda counter, made: counter.n.data.copy_(0.9 * counter.n + made),
    lambda counter, made: torch._foreach_add_([counter.n.data], [made]),
)


def counting(draw: Draw, writes: tuple[Write, ...], begins: int) -> Case:
    """A network with counters; in the first micro-batch there may be nothing to count."""
    width = draw.width()
    core = [Counter(width, draw.choice(writes), draw.maybe(0.4), begins) for _ in range(draw.randint(1, 2))]
    case = network(draw, width, core, refusal=(r"layer \d", r"\bn\b|buffer"))
    if draw.maybe():
        for x, _ in case.batches[: draw.randint(1, 2)]:
            x[: max(1, draw.rows // 2)] = 0
    return case


@kind("S7")
def s7_unseen_writes(draw: Draw) -> Case:
    """Writes that bump no version: through .data, numpy, storages."""
    return counting(draw, UNSEEN, 0)


@kind("S7")
def s7_begins_later(draw: Draw) -> Case:
    """Counters that do not change at first: not in the first micro-batches, or not in the first step."""
    case = counting(draw, (*UNSEEN, *SEEN), draw.randint(1, 4))
    case.late = True
    return case


@kind("S7")
def s7_seen_writes(draw: Draw) -> Case:
    """Writes that can be seen: once."""
    case = counting(draw, SEEN, 0)
    case.refusal = None
    return case


class Resizing(nn.Module):
    """A buffer that grows, shrinks, begins as None, changes its dtype or its storage."""

    cache: Any

    def __init__(self, width: int, how: int) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("cache", None if how == 0 else torch.zeros(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = x.detach().mean(0, keepdim=True)
        match self.how:
            case 0:
                self.cache = row if self.cache is None else 0.5 * (self.cache + row)
            case 1:
                self.cache = torch.cat([self.cache, row])[-4:]
            case 2:
                self.cache.resize_(len(self.cache) + 1, row.shape[1])
                self.cache[-1].copy_(row[0])
            case 3:
                self.cache = row.double() + self.cache
            case _:
                self.cache.set_(torch.cat([self.cache, row])[-3:].clone())
        return x + self.cache.float().mean(0)


@kind("S7")
def s7_resized_buffers(draw: Draw) -> Case:
    width = draw.width()
    layer = Resizing(width, draw.randint(0, 4))
    return network(draw, width, layer, refusal=(r"layer \d", "cache|buffer"))


@kind("S7")
def s7_observers(draw: Draw) -> Case:
    """Observers of quantization-aware training, fused and not."""
    width = draw.width()
    moving = quantization.MovingAverageMinMaxObserver
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
    options: tuple[Callable[[], nn.Module], ...] = (
        lambda: quantization.FusedMovingAvgObsFakeQuantize(observer=moving, quant_min=0, quant_max=255),
        lambda: quantization.FakeQuantize(observer=moving, quant_min=0, quant_max=255),
        lambda: quantization.FusedMovingAvgObsFakeQuantize(
            observer=moving, quant_min=-128, quant_max=127, **symmetric
        ),
        lambda: quantization.MinMaxObserver(),
        lambda: quantization.HistogramObserver(bins=16),
    )
    core = [draw.choice(options)(), nn.Linear(width, width), draw.choice(options)()]
    return network(draw, width, core, refusal=(r"layer \d", "buffer|observer|min_val|scale|zero_point|histogram"))
