"""Models with a forward of their own, tiny: families of transformers, and a U-Net with BatchNorm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.families.catalogue import batch, named
from tests.families.family import Family, config_of
from tests.support.plain_loop import weights_of

UNET, EXPERTS = "unet", "experts"
TIED = frozenset({"gpt2", "t5", "bert", UNET})  # the U-Net scales each skip by an element of one parameter
"""Models in which several layers use one parameter."""


class Norms(nn.Module):
    """A block of a U-Net: a convolution and a BatchNorm, and some dropout."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(given, made, 3, padding=1)
        self.norm = nn.BatchNorm1d(made)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.dropout(F.silu(self.norm(self.conv(x)) + time[:, None, None]))


class UNet(nn.Module):
    """Goes down and up again, with what went down brought in on the way; its loss is a mean over all."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, width, 1)
        self.down = nn.ModuleList([Norms(width, width) for _ in range(depth)])
        self.middle = Norms(width, width)
        self.up = nn.ModuleList([Norms(2 * width, width) for _ in range(depth)])
        self.last = nn.Conv1d(width, 2, 1)
        self.gain = nn.Parameter(torch.empty(depth))
        self.shift: Tensor
        self.register_buffer("shift", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(1)
            self.shift.fill_(0.5)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        held = []
        value = self.first(x)
        for block in self.down:
            value = block(value, time)
            held.append(value)
            value = F.avg_pool1d(value, 2)
        value = self.middle(value, time)
        for at, block in enumerate(self.up):
            value = torch.cat([F.interpolate(value, scale_factor=2.0), held.pop() * self.gain[at]], 1)
            value = block(value, time)
        output = self.last(value - self.shift)
        return {"output": output} if labels is None else {"loss": F.mse_loss(output, labels), "output": output}


def family_of(name: str) -> Family:
    """The family of that name, or Mixtral with the auxiliary loss of its experts."""
    if name != EXPERTS:
        return named(name)
    found = named("mixtral")
    return replace(found, config={**found.config, "output_router_logits": True, "router_aux_loss_coef": 1.0})


def model_of(name: str, device: str = "cpu") -> nn.Module:
    """A model of that name in training mode, with dropout."""
    with weights_of(0), torch.device(device):
        if name == UNET:
            return UNet()
        import transformers

        family = family_of(name)
        auto: Any = getattr(transformers, family.task.value)
        made: nn.Module = auto.from_config(config_of(family, dropout=True))
        return made.train()


def batch_of(name: str, seed: int = 1, rows: int = 8, length: int = 12) -> dict[str, Tensor]:
    """What a model of that name is trained on; of words, rows lack some at their end, and labels too."""
    if name != UNET:
        return batch(family_of(name), rows, length, seed)
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(2, rows, 2, 16, generator=generator)
    return {"x": x, "time": torch.rand(rows, generator=generator), "labels": labels}


def without_labels(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in given.items() if name != "labels"}
