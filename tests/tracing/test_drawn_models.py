"""Tests random models with lists of modules inside their blocks: the default split accepts all of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from tests.support import drawn_models
from tests.support.drawn_models import drawn_model
from tests.support.planned import pipe_by_costs

W = 6
STEPS, M = 4, 2


class Experts(nn.Module):
    """A mixture of experts: a gate chooses experts for each row, and experts without rows do not run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(W, count)
        self.experts = nn.ModuleList(nn.Linear(W, W) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = x.clone()
        for at, expert in enumerate(self.experts):
            rows = torch.where(chosen == at)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


Batch = dict[str, Tensor]


def drawn_batch() -> Batch:
    return {"x": torch.randn(8, W)}


def assert_as_model(model: nn.Module, draw: Callable[[], Batch] = drawn_batch) -> None:
    with pipe_by_costs(model, 2, M, sample=draw(), costs="params", driver="lockstep") as pipe:
        for _ in range(STEPS):
            given = draw(), torch.randn(8, W), mse_loss
            assert pipe.verify(*given, against="model").equal
            pipe.step(*given)


class Top(nn.Module):
    """A mixture of experts with most of the parameters, after blocks or before a head."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.mixture = nn.Linear(W, W), blocks, Experts(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks.children():
            x = block(x)
        made: Tensor = self.mixture(x)
        return made


def of_other_kinds() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(W, W), "mixture": Experts(4), "last": nn.LayerNorm(W)})


@pytest.mark.parametrize(
    ("blocks", "layers"),
    [
        (lambda: nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)]), ["embed", "blocks.0", "blocks.1", "mixture"]),
        (nn.Identity, ["embed", "mixture"]),
        (of_other_kinds, ["embed", "blocks.first", "blocks.mixture", "blocks.last", "mixture"]),
    ],
)
def test_a_mixture_that_no_list_holds_is_one_block(blocks: Callable[[], nn.Module], layers: list[str]) -> None:
    torch.manual_seed(1)
    model = Top(blocks())
    assert [layer.name for layer in gpipe.layers_of(model, torch.randn(8, W))] == layers
    assert_as_model(model)


class Watched(nn.Module):
    """Calls blocks one after another, and reads values before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(x))
        return made


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(W, W) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ArithmeticError
        for block in self.blocks:
            x = block(x).tanh()
        assert x.abs().max() <= 1
        return x


def test_blocks_in_a_row_stay_apart_where_values_are_looked_at_beside_them() -> None:
    model = Watched()
    names = [layer.name for layer in gpipe.layers_of(model, torch.randn(8, W))]
    assert names[1:] == ["body.blocks.0", "body.blocks.1", "body.blocks.2", "head"]
    assert_as_model(model)


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_model_is_cut_at_its_own_blocks_and_trains_as_the_model(seed: int) -> None:
    # Lists inside of blocks were cut where these have most of the parameters: between experts, of which other steps
    # choose others, around buffers and branches. Or one list after another was made one block, never several at once.
    torch.manual_seed(seed)
    assert_as_model(drawn_model(seed), drawn_models.drawn_batch)


def test_members_of_a_sequence_that_is_not_called_itself_are_the_blocks() -> None:
    # The sequence was one block that never ran; its weights were those of several layers, rounded as tied ones are.
    model = drawn_model(12)
    assert isinstance(model, drawn_models.EncoderDecoder)
    torch.manual_seed(12)
    names = [layer.name for layer in gpipe.layers_of(model, drawn_models.drawn_batch())]
    assert set(model.outer) <= set(names)
