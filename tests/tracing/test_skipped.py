"""Tests that runs of a stage, which share placeholders for results of earlier stages, do not influence each other."""

import pytest
import torch
from torch import Tensor, nn

import gpipe

WIDTH, ROWS = 8, 2


class Blocks(nn.Module):
    """Four blocks. `between` runs on the result of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x

    def between(self, x: Tensor) -> Tensor:
        return x


class StoresAttribute(Blocks):
    def between(self, x: Tensor) -> Tensor:
        seen = hasattr(x, "mark")
        x.mark = True  # type: ignore[attr-defined]  # an attribute of this test
        return -x if seen else x


class RequiresGrad(Blocks):
    """The first blocks are frozen. `between` changes their results after it has used them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:3].requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return -x
        doubled = x * 2
        x.requires_grad_()
        return doubled


class Returns(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"x": super().forward(x)}


class EmptiesResult(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returns(WIDTH, WIDTH) for _ in range(4))

    def between(self, x: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return x.pop("x")


class ReadsRows(Blocks):
    """The last block runs on a number that the forward reads from the result of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        rows = len(x)
        for block in self.blocks[1:]:
            x = block(x) / rows
        return x


@pytest.mark.parametrize("kind", [StoresAttribute, RequiresGrad, EmptiesResult])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_micro_batches_are_independent(kind: type[Blocks], stages: int) -> None:
    torch.manual_seed(0)
    model = kind()
    pipe = gpipe.GPipe(model, stages, 3, sample=torch.randn(ROWS, WIDTH), driver="lockstep")
    for _ in range(2):
        batch = torch.randn(3 * ROWS, WIDTH)
        expected = torch.cat([model(part) for part in batch.split(ROWS)])
        assert torch.equal(pipe(batch), expected)


def test_each_size_of_micro_batch_has_its_layout() -> None:
    torch.manual_seed(0)
    model = ReadsRows()
    pipe = gpipe.GPipe(model, 4, 2, sample=torch.randn(ROWS, WIDTH), driver="lockstep")
    for rows in (2, 3, 2, 4, 3):
        batch = torch.randn(2 * rows, WIDTH)
        expected = torch.cat([model(part) for part in batch.split(rows)])
        assert torch.equal(pipe(batch), expected)
