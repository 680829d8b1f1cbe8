"""A moving average of the weights, which is often better than the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

AVERAGE = "average"
"""The key in an optimizer's state, with which checkpoints keep it."""


class Averages:
    """The moving average of the parameters of an optimizer.

    Args:
        optimizer: Over the parameters; their averages are kept in its state, and so in its checkpoints.
        decay: How much of itself an average keeps at each step; fewer at the beginning, (1 + n) / (10 + n) at
            step n, so that the first weights are soon forgotten. 0: there is no average.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> averages = Averages(optimizer, 0.5)
    >>> for step in range(2):
    ...     weight.sum().backward()
    ...     optimizer.step(); averages.update(step); optimizer.zero_grad()
    >>> with averages.applied():
    ...     round(weight.item(), 3)
    -1.818
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer = optimizer
        self._decay = decay

    def update(self, step: int) -> None:
        """Moves the averages towards the weights after a step, counted from 0, before gradients are dropped."""
        if not self._decay:
            return
        weights = [weight for weight in self._weights() if weight.grad is not None]
        averages = [self._average(weight) for weight in weights]
        if averages:
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

    def _weights(self) -> Iterator[torch.nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _average(self, weight: torch.nn.Parameter) -> Tensor:
        state = self._optimizer.state[weight]
        if AVERAGE not in state:
            state[AVERAGE] = weight.detach().clone()
        average: Tensor = state[AVERAGE]
        return average

    def _swap(self) -> None:
        with torch.no_grad():
            for weight in self._weights():
                if (average := self._optimizer.state.get(weight, {}).get(AVERAGE)) is not None:
                    own = weight.clone()
                    weight.copy_(average)
                    average.copy_(own)
