"""Shared weights: one Parameter that several layers use, wherever they are; the same bits for every cut."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe import models
from tests.support.plain_loop import REMATS, assert_same_bits, same_bits
from tests.support.tied_layers import (
    Build,
    M,
    W,
    data,
    every_build,
    made,
    train,
    train_plainly,
    two_uses,
)


@pytest.mark.parametrize("way", ["step", "call"])
@every_build
def test_shared_weights_give_the_bits_of_the_plain_loop_for_every_cut_and_driver(build: Build, way: str) -> None:
    plain = made(build)
    count = len(plain)
    losses = []
    optimizer = torch.optim.SGD(nn.Sequential(*plain).parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in (0, 1):
        losses.append(train_plainly(plain, way, step))
        optimizer.step()
    for at, cut in enumerate([[count], [1, count - 1], [count - 1, 1], [1, 1, count - 2], [1] * count]):
        layers = made(build)
        with gpipe.GPipe(
            layers, cut, M, remat=REMATS[at % 3], driver=("threads", "lockstep")[at // 3], seed=5
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            for step in (0, 1):
                assert same_bits(train(pipe, way), losses[step])
                optimizer.step()
            assert_same_bits(pipe, plain)


@every_build
def test_shared_weights_are_those_of_plain_tied_torch_to_rounding(build: Build) -> None:
    plain = nn.Sequential(*made(build)).eval()  # no dropout, so that micro-batches do not matter
    x, y = data()
    F.mse_loss(plain(x), y).backward()
    pipe = gpipe.GPipe(made(build), len(plain), M).eval()
    train(pipe)
    for (name, p), (other, q) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        if q.grad is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("cut", [[4], [2, 2], [1, 1, 1, 1]], ids=str)
def test_ties_give_what_identity_gives(cut: list[int], remat: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.Linear(W, W)]
    pipe = gpipe.GPipe(layers, cut, M, remat=remat, seed=5, ties=[("0.weight", "3.weight")])
    plain = made(two_uses)
    assert layers[0].weight is layers[3].weight
    assert list(dict(pipe.named_parameters())) == list(dict(nn.Sequential(*plain).named_parameters()))
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)


def language_model(rows: int = 6) -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(0)
    layers = models.transformer_lm(2, model_dim=8, ffn_dim=16, heads=2, vocab=11, tied=True, dropout=0.1)
    return layers, torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))


def cross_entropy(output: object, target: object) -> Tensor:
    assert isinstance(output, Tensor)
    assert isinstance(target, Tensor)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("remat", REMATS)
def test_a_transformer_whose_head_is_its_embedding(remat: str) -> None:
    layers, x, y = language_model()
    outcomes = []
    for partitions in (1, 2, 3, 4):
        own = copy.deepcopy(layers)
        pipe = gpipe.GPipe(own, partitions, M, remat=remat, seed=5)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            found.append(pipe.step(x, y, cross_entropy))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert own[0].weight is own[-1].weight
        outcomes.append([*found, *(p.detach() for p in pipe.parameters())])
    for other in outcomes[1:]:
        assert all(same_bits(one, another) for one, another in zip(outcomes[0], other, strict=True))


# Refusals.


@pytest.mark.parametrize(
    ("ties", "texts"),
    [
        ([("0.weight", "9.weight")], ["there is no parameter '9.weight'"]),
        ([("0.wait", "1.bias.x")], ["there is no parameter '0.wait'", "there is no parameter '1.bias.x'"]),
        ([("0.weight",)], ["('0.weight',) must name two or more parameters"]),
        ([("0.weight", "2.weight")], ["of one shape, not [(3, 4), (4, 4)]"]),
        ([("0.weight", "1.bias"), ("", "0.weight")], ["of one shape", "there is no parameter ''"]),
    ],
)
def test_ties_that_cannot_be_are_refused_all_at_once(ties: list[tuple[str, ...]], texts: list[str]) -> None:
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 3)]
    with pytest.raises(ValueError, match="cannot be built") as caught:
        gpipe.GPipe(layers, 2, M, ties=ties)
    assert all(text in str(caught.value) for text in texts)
