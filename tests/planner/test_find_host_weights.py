"""Plans with weights on the host: a pipe follows them bitwise, and wrong arguments are rejected."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.planner.search.plan import Plan
from tests.support.plain_loop import Loop, assert_same_bits, same_bits, weights_of


def layers() -> list[nn.Module]:
    with weights_of(1):
        return [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]


def test_a_pipe_follows_the_plan_bitwise() -> None:
    x, bytes_of_a_layer = torch.randn(8, 32), 4 * 32 * 33
    small = [gpipe.Device(memory=8 * bytes_of_a_layer, flops=1e9, host=1e9)]
    plan = gpipe.find_plan(layers(), x, small, micro_batches=4)
    assert plan.resident is not None
    pipe, loop = gpipe.GPipe(layers(), plan=Plan.from_json(plan.to_json()), seed=0), Loop(layers(), 4, 0)
    for _ in range(2):
        assert same_bits(pipe.step(x, x, mse_loss), loop.step(x, x, mse_loss))
    assert_same_bits(pipe, [*loop])
    assert pipe.prediction.peak_bytes == plan.peak_bytes
    assert pipe.prediction.timeline.seconds == pytest.approx(plan.seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "disk"}, "weights='disk' is unknown"),
        ({"weights": "host", "schedule": "1f1b"}, "does not support schedule='1f1b'"),
        ({"host_memory": 0}, "host_memory=0 is not positive"),
        ({"weights": "host", "balance": "minmax"}, "cannot be combined with balance= or costs="),
    ],
)
def test_wrong_arguments_are_rejected(options: dict[str, object], message: str) -> None:
    find: Callable[..., Plan] = gpipe.find_plan
    with pytest.raises(ValueError, match=message):
        find(layers(), torch.randn(8, 32), [gpipe.Device(host=1e9)], **options)
