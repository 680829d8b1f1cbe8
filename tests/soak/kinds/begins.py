"""Wrong errors: what begins in mid-run, other threads that draw, noise in the backward, state of the backward."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from ..blocks import Apply, network, plain
from ..case import Case, Draw, kind
from ..reference import Trainer


@kind("errors")
def another_thread_draws(draw: Draw) -> Case:
    """A loader's thread draws from torch meanwhile: right, and no error."""
    width = draw.width()

    @contextlib.contextmanager
    def prefetching() -> Iterator[None]:
        ended = threading.Event()

        def prefetch() -> None:
            while not ended.is_set():
                torch.rand(3)
                time.sleep(0.0002)

        thread = threading.Thread(target=prefetch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def slowly(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return x

    slow = Apply(slowly)
    core = [slow, nn.Linear(width, width), draw.choice((nn.Dropout(0.4), nn.Tanh())), slow]
    return network(draw, width, core, outside=prefetching)


class Noise(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: int) -> torch.Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        match ctx.how:
            case 0:
                return g + 0.01 * torch.randn_like(g), None
            case 1:
                return torch.nn.functional.dropout(g, 0.3), None
            case _:
                return g * torch.bernoulli(torch.full_like(g, 0.5)), None


@kind("errors")
def noise_in_backward(draw: Draw) -> Case:
    """A layer that draws in its backward: right, told, or refused by name."""
    width, how = draw.width(), draw.randint(0, 2)
    layer = Apply(lambda x: Noise.apply(x, how))
    words = (r"layer \d", r"backward|gradient", r"draw|random|generator|noise")
    return network(draw, width, [layer, plain(draw, width)], before=1, refusal=words, told=words)


def dropouts(trainer: Trainer, p: float) -> None:
    """Sets p of every dropout."""
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p


class BeginsToDraw(nn.Module):
    """Draws from its n-th call on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x) if self.on and self.training else x


@kind("errors")
def begins_to_draw(draw: Draw) -> Case:
    """A dropout of p = 0 that is raised, a flag that is set, a mode that is switched: it just works."""
    width, how = draw.width(), draw.randint(0, 3)
    draw.steps = 3
    core: list[nn.Module] = [nn.Dropout(0.0), BeginsToDraw(), nn.Linear(width, width)]
    draw.shuffle(core)
    case = network(draw, width, core)

    def switch(trainer: Trainer, step: int) -> None:
        match how:
            case 0:
                dropouts(trainer, 0.3 * (step == 0))
            case 1:
                for module in trainer.model.modules():
                    if isinstance(module, BeginsToDraw):
                        module.on = not module.on
            case 2:
                trainer.train(step == 1)
                dropouts(trainer, 0.4)
            case _:
                next(m for m in trainer.model.modules() if isinstance(m, nn.Dropout)).p = 0.5

    if how == 2:
        case.begin = lambda trainer: trainer.train(False)
    case.between = switch
    return case


@kind("errors")
def begins_to_change_buffers(draw: Draw) -> Case:
    """A layer in eval mode at first, whose buffers change later: it just works."""
    width = draw.width()
    draw.steps, draw.rows, draw.micro_batches = 3, draw.choice((8, 11, 13)), draw.choice((1, 2, 3))
    makes: tuple[Callable[[], nn.Module], ...] = (
        lambda: parametrizations.spectral_norm(nn.Linear(width, width)),
        lambda: nn.BatchNorm1d(width),
        lambda: nn.utils.spectral_norm(nn.Linear(width, width)),
        lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, width)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
        ),
    )
    case = network(draw, width, [draw.choice(makes)(), plain(draw, width), draw.choice(makes)()])
    case.begin = lambda trainer: trainer.train(False)
    case.between = lambda trainer, step: trainer.train(step == 0)
    return case


class Delayed(torch.autograd.Function):
    """Scales by what the last backward saw, as FP8 scales do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        out = g * ctx.scale
        ctx.scale.mul_(0.9).add_(0.1 + g.abs().amax())
        return out, None


@kind("errors")
def state_of_the_backward(draw: Draw) -> Case:
    """A backward writes what a later forward reads: the named exception, told at the first step."""
    width = draw.width()

    class Scales(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Delayed.apply(x, self.scale)
            return out

    words = (r"layer \d", r"scale", r"backward")
    return network(draw, width, [Scales(), plain(draw, width)], before=1, told=words, refusal=words)


@kind("errors")
def lazy_modules(draw: Draw) -> Case:
    """Lazy modules, by a call before the first step as well: right, or refused by name with the way."""
    width = draw.width()
    layers: list[nn.Module] = [nn.LazyLinear(width), nn.Tanh(), nn.Dropout(0.2), nn.LazyLinear(width)]
    case = network(draw, width, layers)
    words = (r"lazy|uninitialized", r"dry|forward|sample|initiali|shape|materiali")

    def begin(trainer: Trainer) -> None:
        trainer.model.train()
        with torch.no_grad():
            trainer.forward(case.batches[0][0])

    if draw.maybe(0.6):
        case.begin = begin
    case.optimizer = lambda parameters: None
    case.refusal = words
    return case
