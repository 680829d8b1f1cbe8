"""The shape of a recipe: what is particular to a workload; and how learning rates and averages of weights go."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi, sqrt
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import gpipe
from gpipe.recipes.options.training import TrainOptions

Options = TypeVar("Options", bound=TrainOptions)


class Batch(NamedTuple):
    """A mini-batch: what the first layer reads, and what the loss compares with; tensors, or tuples of them."""

    inputs: Any
    targets: Any


@dataclass(frozen=True)
class Share:
    """Which part of each mini-batch this process reads, of `replicas`, as `torch.tensor_split` makes them.

    `reads_inputs` is whether the first layer is here; elsewhere only the size of inputs matters.
    """

    replica: int = 0
    replicas: int = 1
    reads_inputs: bool = True

    def of(self, rows: Tensor) -> Tensor:
        return rows.tensor_split(self.replicas)[self.replica]


@dataclass(frozen=True)
class Evaluation:
    """What `gpipe evaluate` found: numbers, of several runs averaged, what else evaluation.json has, and tables."""

    numbers: Mapping[str, float]
    details: Mapping[str, Any]
    text: str


class Recipe(ABC, Generic[Options]):
    """A workload: its network, data, loss, way of learning, and how well it does."""

    name: ClassVar[str]  # as `gpipe train` calls it
    title: str  # the network and its size
    steps_per_epoch: int  # how many mini-batches the training data are
    reduction: Any = "mean"  # how losses of micro-batches make one, as `GPipe.step` takes it
    largest_norm: float = 0.0  # to which norm gradients are scaled down; 0: they are not
    averaging: float = 0.0  # how much of itself a moving average of the weights keeps at each step; 0: there is none
    data: str = ""  # identifies the training data, so that no run goes on with others

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Builds the network; its weights come from torch's generator."""

    @abstractmethod
    def sample(self, replicas: int) -> Batch:
        """A typical mini-batch of one of so many replicas, to measure layers by."""

    @abstractmethod
    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        """Makes the mini-batches of an epoch, counted from 1, from the one numbered `first`, counted from 0."""

    @abstractmethod
    def loss(self, output: Any, targets: Any) -> Tensor:
        """The loss of a micro-batch, 0-dim, to be lessened."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Makes the optimizer of these parameters."""

    @abstractmethod
    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of `steps` in all."""

    def before_step(self, pipe: gpipe.GPipe, step: int, steps: int) -> None:
        """Changes what layers do over the training; by default nothing."""

    @abstractmethod
    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """How well the network does after an epoch, on data held out for that; by name."""

    def model(self, layers: list[nn.Module]) -> tuple[Any, Any]:
        """What is evaluated, and a sample for it if it is a model: by default the layers, which need none."""
        return layers, None

    @abstractmethod
    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        """How well the network does, at length, on data that no training has seen."""

    def fit(self, state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
        """Gives layers the weights of another run that this one starts from, by name; by default all of them."""
        load(state, layers)

    def write(self, run: Path) -> None:
        """Writes what else must be kept to use the network, to the folder of the run; by default nothing."""


def load(state: Mapping[str, Tensor], layers: Sequence[nn.Module], new: Container[str] = ()) -> None:
    """Gives layers weights and buffers by name, all but the `new` ones; a ValueError names those that do not fit."""
    plain = nn.Sequential(*layers)
    states = ({name: value for name, value in one.items() if name not in new} for one in (state, plain.state_dict()))
    there, here = ({name: "x".join(map(str, v.shape)) or "a number" for name, v in one.items()} for one in states)
    sizes = [(name, there.get(name, "missing"), here.get(name, "missing")) for name in sorted({**there, **here})]
    if odd := [f"{name}: {before} in the run, {now} here" for name, before, now in sizes if before != now]:
        more = [f"and {len(odd) - 10} more"] if len(odd) > 10 else []
        raise ValueError("\n".join(["the run has trained another network: give its options", *odd[:10], *more]))
    plain.load_state_dict({name: state[name] for name in there}, strict=False)


AVERAGE = "average"  # the key in an optimizer's state, with which checkpoints keep it


class Averages:
    """The moving averages of the parameters of an optimizer, kept in its state, and so in its checkpoints.

    An average keeps a share of `decay` of itself at each step, fewer at the beginning, (1 + n) / (10 + n) at step n,
    so that the first weights are soon forgotten. 0: there is no average.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def update(self, step: int) -> None:
        """Moves the averages towards the weights after a step, counted from 0, before gradients are dropped."""
        weights = [weight for weight in self._weights if weight.grad is not None]
        if self._decay and weights:
            states = [self._optimizer.state[weight] for weight in weights]
            for weight, state in zip(weights, states, strict=True):
                if AVERAGE not in state:
                    state[AVERAGE] = weight.detach().clone()
            averages = [state[AVERAGE] for state in states]
            decay = min(self._decay, (1 + step) / (10 + step))
            get_ema_multi_avg_fn(decay)(averages, [weight.detach() for weight in weights], torch.tensor(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lets the averages be the weights, and the weights be themselves again in the end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for weight in self._weights:
                if (average := self._optimizer.state.get(weight, {}).get(AVERAGE)) is not None:
                    own = weight.clone()
                    weight.copy_(average)
                    average.copy_(own)


def rise(step: int, rising: float) -> float:
    """The share of the largest learning rate in a step, counted from 0, of `rising` steps of warming up."""
    return min(1.0, (step + 1) / max(1.0, rising))


def cosine(step: int, steps: int, rising: float) -> float:
    """Rises, then falls as half a cosine to 0 at the end of `steps`."""
    rising = max(1.0, rising)
    return rise(step, rising) if step < rising else (1 + cos(pi * (step - rising) / (steps - rising))) / 2


def exponential(step: int, every: float, rate: float, rising: float) -> float:
    """Rises, while it is multiplied by `rate` after every `every` steps."""
    return float(rise(step, rising) * rate ** (step // every))


def inverse_root(step: int, rising: float) -> float:
    """Rises, then falls as the inverse root of the step, as Vaswani et al. (2017, section 5.3) have it."""
    return min(rise(step, rising), sqrt(max(1.0, rising) / (step + 1)))
