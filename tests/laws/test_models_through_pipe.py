"""The models of the paper and of torchgpipe's benchmarks, small, through pipes: the same bits for every cut."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe import models
from tests.support.plain_loop import assert_same_bits, squares

Tree = object


def cross_entropy(output: Tree, target: Tree) -> Tensor:
    assert isinstance(output, Tensor)
    assert isinstance(target, Tensor)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def with_auxiliary(output: Tree, target: Tree) -> Tensor:
    assert isinstance(output, tuple)
    logits, auxiliary = output
    return cross_entropy(logits, target) + 0.4 * cross_entropy(auxiliary, target)


def images(size: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(5, (rows,))


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 1, 64, 64), torch.randn(3, 1, 64, 64)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(13, (7, 6)), torch.randint(13, (7, 6))


def sentences() -> tuple[Tree, Tensor]:
    """Sources of several lengths, targets, and the words that follow."""
    source, target = torch.randint(1, 13, (5, 6)), torch.randint(1, 13, (5, 5))
    lengths = torch.arange(6, 1, -1)[:, None]
    return (source.where(torch.arange(6) < lengths, 0), target[:, :-1]), target[:, 1:]


def with_drop_path() -> list[nn.Module]:
    layers = models.amoebanet_d(3, 16, 5)
    models.set_keep(nn.ModuleList(layers), 0.6)
    return layers


@dataclass(frozen=True)
class Example:
    build: Callable[[], list[nn.Module]]
    data: Callable[[], tuple[Tree, Tensor]]
    loss_fn: Callable[[Tree, Tree], Tensor] = squares
    micro_batches: int = 2


transformer = partial(models.transformer_lm, 3, model_dim=12, ffn_dim=20, heads=2, vocab=13, dropout=0.1)
EXAMPLES = {
    "amoebanet_d, drop path": Example(with_drop_path, partial(images, 32), cross_entropy, micro_batches=2),
    "amoebanet_b, auxiliary head": Example(
        partial(models.amoebanet_b, 3, 16, 5, aux_head=True, image_size=67), partial(images, 67), with_auxiliary
    ),
    "unet": Example(partial(models.unet, 1, 2, inputs=1), pictures),
    "transformer": Example(transformer, tokens, cross_entropy, micro_batches=3),
    "transformer, tied": Example(partial(transformer, tied=True), tokens, cross_entropy, micro_batches=3),
    "translation, tied": Example(
        partial(models.transformer, 2, 20, heads=3, model_dim=12, head_dim=5, vocab=13, matrices=1, dropout=0.1),
        sentences,
        cross_entropy,
    ),
}


def made(name: str) -> tuple[Example, list[nn.Module], Tree, Tensor]:
    torch.manual_seed(0)
    example = EXAMPLES[name]
    return (example, example.build(), *example.data())


WAYS: list[tuple[int, str, str]] = [
    (1, "always", "threads"), (2, "except_last", "lockstep"), (3, "always", "threads"), (5, "never", "threads")
]  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_trains_to_the_bits_of_the_reference_loop_for_every_cut_remat_and_driver(name: str) -> None:
    example, layers, x, y = made(name)
    found = []
    for partitions, remat, driver in WAYS:
        own = copy.deepcopy(layers)
        with gpipe.GPipe(own, partitions, example.micro_batches, remat=remat, driver=driver, seed=2) as pipe:
            assert pipe.verify(x, y, example.loss_fn, against="model").equal
            for _ in range(2):
                pipe.step(x, y, example.loss_fn)
        found.append(own)
    for own in found[1:]:  # gradients of tied weights, which are not verified, too
        assert_same_bits(nn.Sequential(*own), found[0])
