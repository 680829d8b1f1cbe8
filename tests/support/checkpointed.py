"""Small networks with all that a checkpoint must keep, and the comparison of what two runs have."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from tests.support.plain_loop import same_bits, weights_of

M = 3
_generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(7, 4, generator=_generator), torch.randn(7, 2, generator=_generator)

Optimize = Callable[[Any], torch.optim.Optimizer]

Victim: TypeAlias = tuple[gpipe.GPipe, torch.optim.Optimizer]
"""A pipe and its optimizer, of which nothing must change."""


class Odd(nn.Module):
    """Buffers of many types, among them values that are not equal to themselves, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("small", torch.tensor([-1.0, float("nan"), float("-inf"), -0.0]).bfloat16())
        self.register_buffer("counts", torch.tensor([2**62 + 1, -3]))
        self.register_buffer("waves", torch.tensor([1 + 2j]))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.calls: dict[str, Any] = {"calls": 3, "last": (1.5, None), "most": torch.ones(2)}

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def build(seed: int = 1) -> list[nn.Module]:
    """Layers with buffers, dropout and a layer without parameters; none of the same shape next to each other."""
    with weights_of(seed):
        inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.2))
        return [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), inner, nn.GELU(), nn.Linear(5, 2)]


def build_tied(seed: int = 1) -> list[nn.Module]:
    """A weight of the first layer that two others share, over all cuts."""
    with weights_of(seed):
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)]
        layers[2].weight = layers[4].weight = layers[0].weight
        return [*layers, nn.Linear(4, 2)]


def make(layers: Sequence[nn.Module] | None = None, partitions: Any = 3, **options: Any) -> gpipe.GPipe:
    return gpipe.GPipe(layers or build(), partitions, M, **{"driver": "lockstep", "seed": 4, **options})


def fail(*args: Any) -> Any:
    raise OSError(28, "No space left on device", "path")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def train(pipe: gpipe.GPipe, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(X, Y, F.mse_loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(
    layers: list[nn.Module] | None = None, partitions: Any = 3, optimize: Optimize = adamw, steps: int = 2
) -> tuple[gpipe.GPipe, torch.optim.Optimizer]:
    pipe = make(layers, partitions)
    optimizer = optimize(pipe.parameters())
    train(pipe, optimizer, steps)
    return pipe, optimizer


def remembered(pipe: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All that a run has, by name: its state_dict, and the optimizer's state and options of each parameter."""
    found: dict[str, Any] = {**pipe.state_dict()}
    if optimizer is None:
        return found
    names = {parameter: name for name, parameter in pipe.named_parameters()}
    ties = getattr(pipe, "ties_of_names", {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = ties.get(names[parameter], names[parameter])
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found[f"{name}/options"] = options
            found[f"{name}/state"] = dict(optimizer.state[parameter]) if parameter in optimizer.state else {}
    return found


def snapshot(pipe: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), remembered(pipe, optimizer))


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of what is not the same to the last bit, or is there only once."""
    return sorted(
        name for name in found.keys() | expected.keys() if not _same(found.get(name, ...), expected.get(name, ...))
    )


def _same(one: Any, other: Any) -> bool:
    flat, others = (pytree.tree_flatten(value) for value in (one, other))
    if flat[1] != others[1]:
        return False
    return all(
        same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(flat[0], others[0], strict=True)
    )
