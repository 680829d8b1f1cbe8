"""Embeddings with `max_norm` scale their weight in each forward: rejected where a recompute or a stage reads it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import weights_of
from tests.support.planned import pipe_by_costs

X, Y = torch.arange(24).view(8, 3) % 5, torch.arange(8) % 4


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Head(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, max_norm=1.5)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = Head(self.embed.weight if tied else nn.Parameter(torch.ones(5, 4)))

    def forward(self, x: Tensor) -> Any:
        value = self.embed(x).mean(1)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def layers(kind: type[nn.Embedding | nn.EmbeddingBag] = nn.Embedding) -> list[nn.Module]:
    with weights_of(3):
        pooled = [] if kind is nn.EmbeddingBag else [Pooled()]
        return [kind(5, 4, max_norm=1.5), *pooled, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]


def tied() -> list[nn.Module]:
    found = layers()
    return [*found, Head(found[0].weight)]


def twice() -> list[nn.Module]:
    embed = nn.Embedding(5, 4, max_norm=1.5)
    return [embed, Pooled(), nn.Threshold(0, 1), embed, Pooled()]


SCALES = "Embedding) scales its weight in each forward pass (max_norm=1.5), and"
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a layer": (tied, {}, f"layer 0 (0: {SCALES} layer 5 (5: Head)"),
    "the same module": (twice, {}, f"layer 0 (0: {SCALES} layer 3 (3: Embedding)"),
    "ties=": (
        lambda: [*layers(), Head(nn.Parameter(torch.ones(5, 4)))],
        {"ties": [("0.weight", "5.weight")]},
        "and layer 5 (5: Head), in another stage, uses this weight too. Put both layers into one stage",
    ),
    "a model": (lambda: Model(tied=True), {"sample": X}, f"layer 0 (embed: {SCALES} layer"),
}


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("what", OTHERS)
def test_a_scaled_weight_that_another_stage_uses_is_rejected_when_the_pipe_is_made(what: str, remat: str) -> None:
    make, how, text = OTHERS[what]
    with pytest.raises(ValueError, match="GPipe cannot be built:") as refusal:
        pipe_by_costs(make(), 2, 2, costs="params", remat=remat, **how)
    assert text in str(refusal.value)
    assert "and stage 0 recomputes its forward passes (remat='always')" in str(refusal.value) or remat == "never"


@pytest.mark.parametrize("remat", ["always", "except_last", 1, ["always", "never"]], ids=str)
@pytest.mark.parametrize("make", [layers, lambda: layers(nn.EmbeddingBag), lambda: nn.Sequential(*layers())])
def test_a_scaled_weight_in_a_stage_that_recomputes_is_rejected_when_the_pipe_is_made(make: Any, remat: Any) -> None:
    with pytest.raises(
        ValueError, match=r"stage 0 recomputes its forward passes \(remat=.*Pass remat='never'"
    ) as refusal:
        gpipe.GPipe(make(), 2, 2, remat=remat)
    assert "weight.renorm_(2.0, 0, 1.5)" in str(refusal.value)


def test_of_a_model_too() -> None:
    with pytest.raises(ValueError, match=r"layer 0 \(embed: Embedding\) .*\[embedding-max-norm\]"):
        pipe_by_costs(Model(tied=False), 2, 2, sample=X, costs="params")


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("remat", ["never", "offload", ["never", "always"]], ids=str)
def test_elsewhere_it_trains_as_in_the_reference_loop(remat: Any, kind: Any, driver: str) -> None:
    with pipe_by_costs(layers(kind), 2, 4, costs="params", remat=remat, driver=driver, seed=1) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=5.0)
        for _ in range(4):
            assert pipe.verify(X, Y, F.cross_entropy, against="model").equal
            optimizer.zero_grad()
            pipe.step(X, Y, F.cross_entropy)
            optimizer.step()


def test_with_weights_on_the_host_the_message_offers_no_other_remat() -> None:
    with pytest.raises(ValueError, match=r"\(remat='always'\). Remove max_norm and call weight.renorm_") as refusal:
        gpipe.GPipe(layers(), 1, 2, schedule=gpipe.BreadthFirst(2), weights="host")
    assert "never" not in str(refusal.value)
