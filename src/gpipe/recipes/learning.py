"""How weights are learnt, beside what torch's optimizers do: moving averages of them, and learning rates."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import cos, pi, sqrt

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

AVERAGE = "average"  # the key in an optimizer's state, with which checkpoints keep it


class Averages:
    """The moving average of the parameters of an optimizer.

    Args:
        optimizer: Over the parameters; their averages are kept in its state, and so in its checkpoints.
        decay: How much of itself an average keeps at each step; fewer at the beginning, (1 + n) / (10 + n) at
            step n, so that the first weights are soon forgotten. 0: there is no average.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer = optimizer
        self._decay = decay

    def update(self, step: int) -> None:
        """Moves the averages towards the weights after a step, counted from 0, before gradients are dropped."""
        weights = [weight for weight in self._weights() if weight.grad is not None]
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

    def _weights(self) -> list[Tensor]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

    def _swap(self) -> None:
        with torch.no_grad():
            for weight in self._weights():
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
