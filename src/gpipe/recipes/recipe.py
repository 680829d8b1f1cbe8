"""Defines the interface of a recipe, learning rate schedules and moving averages of weights."""

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
    """A mini-batch: the inputs of the first layer and the targets of the loss, as tensors or tuples of tensors."""

    inputs: Any
    targets: Any


@dataclass(frozen=True)
class Share:
    """The part of each mini-batch that this process reads.

    Attributes:
        replica: Index of the replica that this process belongs to.
        replicas: Number of replicas. `torch.tensor_split` divides each mini-batch among them.
        reads_inputs: Whether this process runs the first layer. Other processes need only the size of the inputs.
    """

    replica: int = 0
    replicas: int = 1
    reads_inputs: bool = True

    def of(self, rows: Tensor) -> Tensor:
        """Returns the rows of this replica."""
        return rows.tensor_split(self.replicas)[self.replica]


@dataclass(frozen=True)
class Evaluation:
    """The result of `gpipe evaluate`.

    Attributes:
        numbers: Metrics by name. For several runs, `gpipe evaluate` prints the mean of each metric.
        details: Additional entries of evaluation.json.
        text: Tables for the terminal.
    """

    numbers: Mapping[str, float]
    details: Mapping[str, Any]
    text: str


class Recipe(ABC, Generic[Options]):
    """Defines a workload: its model, data, loss, optimizer and metrics.

    Attributes:
        options: The options of the command line.
        name: Name of the recipe in `gpipe train`.
        title: Name and size of the model.
        steps_per_epoch: Number of mini-batches per epoch.
        reduction: The `reduction` argument of `GPipe.step`: how losses of micro-batches are combined.
        max_norm: Gradients are clipped to this total norm. With 0, gradients are not clipped.
        averaging: Decay of a moving average of the weights. With 0, there is no average.
        data: A fingerprint of the training data. A resumed run must use the same data.
    """

    name: ClassVar[str]
    title: str
    steps_per_epoch: int
    reduction: Any = "mean"
    max_norm: float = 0.0
    averaging: float = 0.0
    data: str = ""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Builds the layers of the model. Initial weights come from torch's random generator."""

    @abstractmethod
    def sample(self, replicas: int) -> Batch:
        """Returns a typical mini-batch of one replica, to measure layers. `replicas` is the number of replicas."""

    @abstractmethod
    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        """Yields mini-batches of an epoch (counted from 1), starting with mini-batch `first` (counted from 0)."""

    @abstractmethod
    def loss(self, output: Any, targets: Any) -> Tensor:
        """Returns the loss of a micro-batch as a zero-dimensional tensor."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Builds the optimizer."""

    @abstractmethod
    def learning_rate_at(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step, counted from 0. `steps` is the total number of steps."""

    def before_step(self, pipe: gpipe.GPipe, step: int, steps: int) -> None:
        """Changes settings of layers before a step. By default does nothing."""

    @abstractmethod
    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """Returns the metrics of an epoch by name, on validation data."""

    def model(self, layers: list[nn.Module]) -> tuple[Any, Any]:
        """Returns the model to evaluate, and a sample input for tracing.

        By default, returns the layers and no sample.
        """
        return layers, None

    @abstractmethod
    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        """Evaluates the model in detail, on data that was not used in training."""

    def fit(self, state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
        """Loads the weights of the run that `--from` names into the layers. By default, loads all weights."""
        load(state, layers)

    def write(self, run: Path) -> None:
        """Writes additional files that the model needs to the folder of the run. By default, writes no files."""


def load(state: Mapping[str, Tensor], layers: Sequence[nn.Module], new: Container[str] = ()) -> None:
    """Loads parameters and buffers into layers, except parameters and buffers with names in `new`.

    Raises:
        ValueError: If names or shapes differ. The message lists the first ten.
    """
    module = nn.Sequential(*layers)
    states = [{name: x for name, x in each.items() if name not in new} for each in (state, module.state_dict())]
    saved, built = ({name: "x".join(map(str, x.shape)) or "a number" for name, x in each.items()} for each in states)
    sizes = [(name, saved.get(name, "missing"), built.get(name, "missing")) for name in sorted({**saved, **built})]
    if different := [f"{name}: {before} in the run, {now} here" for name, before, now in sizes if before != now]:
        more = [f"and {len(different) - 10} more"] if len(different) > 10 else []
        head = "weights: the run contains a different model. Pass the options that define the model of the run."
        raise ValueError("\n".join([head, *different[:10], *more]))
    module.load_state_dict(states[0], strict=False)


AVERAGE = "average"  # Key of the average in the optimizer's state.


class Averages:
    """Moving averages of the parameters of an optimizer.

    The averages are part of the optimizer's state, so checkpoints contain them. Step n uses a decay of at most (1 +
    n) / (10 + n), so that the initial weights lose influence quickly. A decay of 0 disables averaging.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def update(self, step: int) -> None:
        """Updates the averages after a step, counted from 0. Call this method before the gradients are cleared."""
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
        """Replaces the weights by their moving averages inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for weight in self._weights:
                if (average := self._optimizer.state.get(weight, {}).get(AVERAGE)) is not None:
                    saved = weight.clone()
                    weight.copy_(average)
                    average.copy_(saved)


def linear(step: int, warm_up: float) -> float:
    """Returns the factor on the peak learning rate for a linear warm-up of `warm_up` steps. Steps count from 0."""
    return min(1.0, (step + 1) / max(1.0, warm_up))


def cosine(step: int, steps: int, warm_up: float) -> float:
    """Returns the learning rate factor: a linear warm-up, then half a cosine that reaches 0 after `steps` steps."""
    warm_up = max(1.0, warm_up)
    return linear(step, warm_up) if step < warm_up else (1 + cos(pi * (step - warm_up) / (steps - warm_up))) / 2


def exponential(step: int, every: float, rate: float, warm_up: float) -> float:
    """Returns the learning rate factor: a linear warm-up, multiplied by `rate` after every `every` steps."""
    return float(linear(step, warm_up) * rate ** (step // every))


def inverse_root(step: int, warm_up: float) -> float:
    """Returns the learning rate factor: a linear warm-up, then 1 / sqrt(step) (Vaswani et al., 2017, section 5.3)."""
    return min(linear(step, warm_up), sqrt(max(1.0, warm_up) / (step + 1)))
