"""S12: what layers draw from elsewhere than torch's default generator, and all that torch draws."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.random_layers import RANDOM, WIDTH

from .blocks import Apply, network, plain
from .case import Case, Draw, kind

Source = Callable[[], float]


def sources() -> tuple[Source, ...]:
    """Numbers that differ from call to call; a clock is a counter, so that the loop can be repeated."""
    own, generator = random.Random(3), torch.Generator().manual_seed(5)
    ticks, modern, state = itertools.count(), np.random.default_rng(7), {"n": 0}

    def attribute() -> float:
        state["n"] += 1
        return float(state["n"] % 5)

    return (
        np.random.rand,
        lambda: float(np.random.randint(0, 4)),
        lambda: float(modern.normal()),
        random.random,
        lambda: own.gauss(0, 1),
        lambda: float(random.choice((0, 1, 2))),
        lambda: torch.rand((), generator=generator).item(),
        lambda: float(next(ticks) % 7),
        attribute,
    )


def uses() -> tuple[Callable[[torch.Tensor, float], torch.Tensor], ...]:
    """What a layer does with a number; the sum of its output may stay the same."""
    return (
        lambda x, n: x.roll(int(4 * n), 1),
        lambda x, n: x.roll(int(4 * n), 0),
        lambda x, n: x * (1 + 0.1 * n),
        lambda x, n: x if n < 0.7 else x.flip(1),
        lambda x, n: x + n,
        lambda x, n: x[:, torch.argsort(torch.arange(x.shape[1]) * (2 + int(3 * n)) % x.shape[1], stable=True)],
        lambda x, n: x.masked_fill(x > n, 0.0),
        lambda x, n: F.dropout(x, 0.5) if n > 0.7 else x,
        lambda x, n: x if n < 0.5 else x.detach(),
        lambda x, n: x * 1.0 if n < 0.5 else x + 0.0 * x.detach(),
    )


@kind("S12")
def s12_foreign_draws(draw: Draw) -> Case:
    """One layer draws from numpy, random, a generator of its own or a counter: right, or refused when it shows."""
    width = draw.width()
    source, use = draw.choice(sources()), draw.choice(uses())
    return foreign(draw, width, Apply(lambda x: use(x, source())))


def foreign(draw: Draw, width: int, layer: nn.Module) -> Case:
    """Right, or refused when it shows."""
    words, told = (
        (r"layer \d", r"random|draw|numpy|generator|differ|same|state"),
        (r"\[state-written-twice\]",),
    )
    return network(draw, width, [layer, nn.Linear(width, width)], before=1, refusal=words, told=told, late=True)


@kind("S12")
def s12_foreign_draw_of_weight(draw: Draw) -> Case:
    """The number chooses the weight, the path or the length: what needs gradients differs."""
    width = draw.width()
    source = draw.choice(sources())

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
            self.how = draw.randint(0, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = source()
            match self.how:
                case 0:
                    out: torch.Tensor = self.paths[int(10 * n) % 2](x)
                case 1:
                    out = self.paths[0](x) if int(10 * n) % 2 else self.paths[0](x).detach() + self.paths[1](x) * 0
                case _:
                    out = x
                    for _ in range(1 + int(2 * n)):
                        out = self.paths[0](out)
            return out

    return foreign(draw, width, Chooses())


def seeds_inside_a_fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = x + torch.rand(x.shape)
    return x + torch.rand(x.shape)


def sets_it_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    x = F.dropout(x)
    torch.set_rng_state(state)
    return F.dropout(x)


def seeds_it(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return x + torch.rand(x.shape)


@kind()
def global_generator_touched(draw: Draw) -> Case:
    """Layers seed and set torch's own generator: what they draw is keyed all the same."""
    core = [Apply(draw.choice((seeds_inside_a_fork, sets_it_back, seeds_it))) for _ in range(2)]
    return network(draw, WIDTH, core, before=1)


@kind()
def everything_random(draw: Draw) -> Case:
    """Each op that draws, under the key of its scope."""
    core = [draw.choice(list(RANDOM.values()))() for _ in range(draw.randint(1, 3))]
    return network(draw, WIDTH, [*core, plain(draw, WIDTH)], before=1)


@kind()
def ambient_generator_left_alone(draw: Draw) -> Case:
    """The caller draws between steps: as if the pipeline drew nothing."""
    seen: list[torch.Tensor] = []
    case = network(draw, WIDTH, [nn.Dropout(0.3), draw.choice(list(RANDOM.values()))()], before=1)
    case.between = lambda trainer, step: seen.append(torch.rand(2))
    case.extra = lambda: {"drawn": list(seen)}
    return case
