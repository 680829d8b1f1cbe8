"""A BatchNorm of layers in several stages is rejected in training: its statistics would depend on the split."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.planned import pipe_by_costs

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(16, 4)


def twice(norm: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), norm), nn.Linear(4, 4), norm, nn.Linear(4, 4)]


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(twice(norm))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("batch_norm", ["micro", "deferred"])
@pytest.mark.parametrize("is_model", [False, True])
def test_a_batch_norm_of_two_stages_is_rejected_when_the_pipe_is_made(batch_norm: Any, is_model: bool) -> None:
    """Bug story: two threads lost statistics of each other, and processes had separate statistics."""
    norm = nn.BatchNorm1d(4)
    model: Any = Model(norm) if is_model else twice(norm)
    how: dict[str, Any] = {"sample": X} if is_model else {}
    match = r"GPipe cannot be built:\n- layer 2 .* and layer 0 .*\[batchnorm-in-several-stages\]"
    with pytest.raises(ValueError, match=match):
        pipe_by_costs(model, 2, 4, costs="params", batch_norm=batch_norm, **how)


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize(
    ("norm", "partitions"),
    [
        (nn.BatchNorm1d(4), [3, 1]),
        (nn.BatchNorm1d(4).eval(), [2, 2]),
        (nn.BatchNorm1d(4, track_running_stats=False), [2, 2]),
    ],
    ids=["one stage", "eval", "no statistics"],
)
def test_elsewhere_it_trains_as_in_the_reference_loop(norm: nn.Module, partitions: list[int], driver: str) -> None:
    with gpipe.GPipe(twice(norm), partitions, 4, driver=driver, seed=1) as pipe:
        for _ in range(2):
            assert pipe.verify(X, Y, F.mse_loss, against="model").equal
            pipe.step(X, Y, F.mse_loss)
