"""How weights are learnt: the mini-batch, the optimizer and its learning rate over the whole training."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, pi

import torch


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum; its learning rate rises for `warm_up` of all steps and falls to 0 as a cosine."""

    batch_size: int = 128
    learning_rate: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warm_up: float = 0.15

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes the optimizer of these parameters."""
        return torch.optim.SGD(
            parameters,
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=True,
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Returns the learning rate of the step, counted from 0, of `steps` in all.

        >>> recipe = Recipe(learning_rate=1.0, warm_up=0.2)
        >>> [round(recipe.learning_rate_at(step, 10), 3) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.038]
        """
        rising = max(1.0, self.warm_up * steps)
        if step < rising:
            return self.learning_rate * min(1.0, (step + 1) / rising)
        return self.learning_rate * (1 + cos(pi * (step - rising) / (steps - rising))) / 2
