"""What a configuration is: a network with its data, what may be said of it, and how it is cut and run."""

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Observed = dict[str, object]
REMATS = ("always", "except_last", "never", "offload", "offload_inputs")
REMEDY = (
    r"\b(use|pass|give|given|stash|pop|register|wrap|write|return|set|call|make|detach|clone|keep|put|draw|declare|"
    r"instead|remat|move|hand|state|split|build|name|drop|want|meant|must|should|needs?|takes?)\b"
)


@dataclass(frozen=True)
class Setting:
    """How a network is cut and run."""

    cut: tuple[int, ...]
    micro_batches: int
    rows: int
    remat: str | tuple[str, ...]
    driver: str | None
    seed: int
    steps: int
    way: str

    def __str__(self) -> str:
        names = ("cut", "micro_batches", "rows", "remat", "driver", "seed", "steps", "way")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class Draw(random.Random):
    """The random source of one configuration; what a network's shapes depend on is drawn first."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__(f"{kind}:{number}")
        self.kind, self.number = kind, number
        self.rows = self.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13))
        self.micro_batches = self.choice((1, 2, 2, 3, 3, 4, 5, 6))
        self.steps = self.choice((1, 2, 2, 3))

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def width(self) -> int:
        return self.choice((3, 4, 5, 7, 8, 10, 13, 16, 33))

    def data(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers of `shape`, at times a slice of a data set that begins in the middle of its memory."""
        if len(shape) < 2 or self.maybe():
            return torch.randn(shape, dtype=dtype)
        offset = self.randint(1, 16)
        return torch.randn(offset + shape[0] + 2, *shape[1:], dtype=dtype)[offset : offset + shape[0]]

    def labels(self, *shape: int, classes: int) -> torch.Tensor:
        return torch.randint(classes, shape)


@dataclass
class Case:
    """One network with its data, freshly made, and what the contract says of it."""

    layers: Any  # a sequence of modules
    batches: Sequence[tuple[Any, Any]]
    loss: Callable[..., Any] = nn.functional.mse_loss
    plain: Sequence[nn.Module] | None = None  # what the loop runs, where it is not `layers`
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer | None] = lambda p: sgd(p)
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the pipe
    ways: tuple[str, ...] = ("step", "call")
    drivers: tuple[str | None, ...] = ("threads", "threads", "lockstep", "lockstep", None)
    cut: tuple[int, ...] | None = None  # where the kind needs this one
    oracle: str = "loop"  # "shared": as K=1, bit for bit, and as the loop nearly
    refusal: tuple[str, ...] | None = None  # an error is right if its text holds each of these
    errors: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)  # of these types
    late: bool = False  # it may come after the first step
    remedy: bool = True  # it must say what to do
    must_refuse: bool = False  # an error is the only right thing
    told: tuple[str, ...] | None = None  # other numbers are right if what is said holds each of these
    must_tell: bool = False
    begin: Callable[[Any], None] = lambda trainer: None
    between: Callable[[Any, int], None] = lambda trainer, step: None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimize: Callable[[int], bool] = lambda step: True  # whether the optimizer steps after this step
    extra: Callable[[], dict[str, object]] = dict  # what else must be equal


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Plain descent; of no parameters none."""
    held = list(parameters)
    return torch.optim.SGD(held, lr=0.1) if held else None


@dataclass(frozen=True)
class Kind:
    """A generator of cases, and the row of the table of promises that it belongs to."""

    name: str
    row: str
    make: Callable[[Draw], Case]

    def case(self, number: int) -> tuple[Case, Setting]:
        """The case of this number, new modules at each call, and its setting."""
        draw = Draw(self.name, number)
        torch.manual_seed(draw.randrange(2**31))
        case = self.make(draw)
        return case, draw_setting(random.Random(f"{self.name}:{number}:setting"), draw, case)


KINDS: dict[str, Kind] = {}


def kind(row: str = "") -> Callable[[Callable[[Draw], Case]], Callable[[Draw], Case]]:
    """Enters a generator into `KINDS`, perhaps as one of a row of the table of promises."""

    def enter(make: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
        KINDS[make.__name__] = Kind(make.__name__, row, make)
        return make

    return enter


def draw_setting(source: random.Random, draw: Draw, case: Case) -> Setting:
    """The rest of the configuration: what the network does not depend on."""
    layers = len(case.layers)
    partitions = min(layers, source.choice((1, 2, 2, 3, 3, 4, 5)))
    inner = sorted(source.sample(range(1, layers), partitions - 1))
    cut = case.cut or tuple(b - a for a, b in zip([0, *inner], [*inner, layers], strict=True))
    each = tuple(source.choice(REMATS) for _ in cut)
    return Setting(
        cut=cut,
        micro_batches=draw.micro_batches,
        rows=draw.rows,
        remat=each if source.random() < 0.4 else source.choice(REMATS),
        driver=source.choice(case.drivers),
        seed=source.randrange(1000),
        steps=len(case.batches),
        way=source.choice(case.ways),
    )
