"""What the network reads, what its loss counts, and what decoding asks it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data.token_batches import BEGIN, END, PAD
from gpipe.recipes.models.transformer import Head
from gpipe.recipes.recipe import Batch, Share
from gpipe.recipes.translation.corpus import Sentence
from gpipe.recipes.translation.recipe import TranslationRecipe, count_tokens
from gpipe.recipes.translation.translator import LAYOUTS
from tests.support.planned import pipe_by_costs
from tests.support.toy_language import options

each_model = pytest.mark.parametrize("model", list(LAYOUTS))
SMOOTHING = 0.1


def recipe_of(folder: Path, **changes: Any) -> TranslationRecipe:
    return TranslationRecipe(options(folder, **{"dropout": 0.0, **changes}).resolved())


def sentences_of(recipe: TranslationRecipe, count: int = 7) -> list[Sentence]:
    """Some of several lengths."""
    some = sorted(recipe.corpus.train, key=lambda one: one.lengths)[:: len(recipe.corpus.train) // count]
    assert len({len(one.source) for one in some}) > 1
    assert len({len(one.english) for one in some}) > 1
    return some


def piped(recipe: TranslationRecipe, layers: Sequence[nn.Module], **changes: Any) -> gpipe.GPipe:
    return pipe_by_costs(layers, **{"partitions": 2, "micro_batches": 3, "costs": [1.0] * len(layers), **changes})


def batch_of(recipe: TranslationRecipe, sentences: Sequence[Sentence]) -> Batch:
    return LAYOUTS[recipe.options.model].batch(sentences)


# Batches.


def filled(rows: Sequence[Tensor]) -> list[list[int]]:
    """Returns the rows of all micro-batches without padding at their ends, in ascending order."""
    lists = [row for part in rows for row in part.tolist()]
    return sorted(row[: max(at for at, word in enumerate(row) if word != PAD) + 1] for row in lists)


def test_an_encoder_decoder_reads_both_sides_padded_apart_and_a_decoder_one_row(tmp_path: Path) -> None:
    both, one_row = recipe_of(tmp_path), recipe_of(tmp_path, model="decoder")
    assert both.corpus.mini_batches(1) == one_row.corpus.mini_batches(1)
    batches = zip(both.batches(1, 0, Share()), one_row.batches(1, 0, Share()), strict=True)
    for sentences, (apart, together) in zip(both.corpus.mini_batches(1), batches, strict=True):
        sources, begun = zip(*apart.inputs, strict=True)
        assert len(sources) == min(both.options.micro_batches, len(sentences))
        assert sum(map(Tensor.numel, [*sources, *apart.targets])) <= both.options.tokens
        assert filled(sources) == sorted([*one.source, END] for one in sentences)
        assert filled(begun) == sorted([BEGIN, *one.english] for one in sentences)
        assert filled(apart.targets) == sorted([*one.english, END] for one in sentences)
        assert filled(together.inputs) == sorted([*one.source, END, BEGIN, *one.english] for one in sentences)
        not_learnt = [[PAD] * (len(one.source) + 1) for one in sentences]
        said = [[*before, *one.english, END] for before, one in zip(not_learnt, sentences, strict=True)]
        assert filled(together.targets) == sorted(said)
        words = sum(len(one.english) + 1 for one in sentences)
        assert sum(map(count_tokens, apart.targets)) == sum(map(count_tokens, together.targets)) == words


def test_replicas_read_all_sentences_once_also_where_they_are_more_than_those(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    assert any(len(some) == 1 for some in recipe.corpus.mini_batches(1))
    wholes = list(recipe.batches(1, 0, Share()))
    shares = zip(*(recipe.batches(1, 0, Share(replica, 3)) for replica in range(3)), strict=True)
    for whole, parts in zip(wholes, shares, strict=True):
        read = [targets for part in parts for targets in part.targets if count_tokens(targets)]
        assert len(read) == len(whole.targets)
        assert all(map(torch.equal, read, whole.targets))
        assert all(len(part.targets) for part in parts)


def test_an_epoch_goes_on_at_any_step_and_another_has_another_order(tmp_path: Path) -> None:
    def shapes(batches: Iterable[Batch]) -> list[list[torch.Size]]:
        return [[part.shape for part in made.targets] for made in batches]

    recipe = recipe_of(tmp_path)
    whole = list(recipe.batches(2, 0, Share()))
    assert len(whole) == recipe.steps_per_epoch
    for left, right in zip(recipe.batches(2, 4, Share()), whole[4:], strict=True):
        assert all(map(torch.equal, left.targets, right.targets))
    assert shapes(recipe.batches(1, 0, Share())) != shapes(whole)
    one, two = recipe.sample(1), recipe.sample(2)
    assert 1 <= len(two.targets) <= -(-len(one.targets) // 2)


# The loss.


@each_model
def test_padding_has_no_say(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model=model, label_smoothing=SMOOTHING)
    _, targets = batch_of(recipe, sentences_of(recipe))
    logits = torch.randn(*targets.shape, len(recipe.vocabulary), requires_grad=True)
    recipe.loss(logits, targets).backward()
    assert logits.grad is not None
    assert not logits.grad[targets == PAD].any()
    assert logits.grad[targets != PAD].any(dim=1).all()
    other = torch.where((targets == PAD)[..., None], torch.randn_like(logits), logits)
    assert torch.equal(recipe.loss(other, targets), recipe.loss(logits, targets))
    half = logits.bfloat16()  # logarithms are summed in float32
    assert torch.equal(recipe.loss(half, targets), recipe.loss(half.float(), targets))


@each_model
def test_a_step_is_plain_cross_entropy_over_all_words_of_the_mini_batch(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model=model, label_smoothing=SMOOTHING)
    inputs, targets = batch_of(recipe, sentences_of(recipe))
    torch.manual_seed(1)
    layers = recipe.layers()
    torch.manual_seed(1)
    plain = gpipe.Sequential(*recipe.layers())
    expected = F.cross_entropy(
        plain(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING
    )
    expected.backward()
    with piped(recipe, layers) as pipe:
        found = pipe.step(inputs, targets, recipe.loss, reduction=recipe.reduction)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        for own, other in zip(nn.Sequential(*layers).parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


@each_model
def test_the_likelihood_of_each_language_is_that_of_its_sentences(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model=model, label_smoothing=SMOOTHING)
    layers = recipe.layers()
    plain = gpipe.Sequential(*layers).eval()
    expected: dict[str, list[float]] = {}
    for one in recipe.corpus.validation:
        inputs, targets = batch_of(recipe, [one])
        with torch.no_grad():
            logs = plain(inputs)[0].log_softmax(dim=1)
        expected.setdefault(one.pair.language, []).extend(
            -float(logs[at, word]) for at, word in enumerate(targets[0].tolist()) if word != PAD
        )
    assert len(expected) == 2
    every = [value for some in expected.values() for value in some]
    with piped(recipe, layers) as pipe:
        pipe.eval()
        found = recipe.nlls(pipe, recipe.corpus.validation)
        assert recipe.measure(pipe)["nll"] == pytest.approx(sum(every) / len(every), rel=1e-5)
    assert found.keys() == expected.keys()
    for language, (value, words) in found.items():
        assert value == pytest.approx(sum(expected[language]), rel=1e-5)
        assert words == len(expected[language])


# Options reach the network.


@each_model
def test_options_reach_the_network(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, model=model, clip_logits=0.25, dropout=0.5)
    network = gpipe.Sequential(*recipe.layers())
    inputs, _ = batch_of(recipe, sentences_of(recipe))
    with torch.no_grad():
        assert network.train()(inputs).abs().max().item() == 0.25
        assert not torch.equal(network(inputs), network(inputs))
        assert network.eval()(inputs).abs().max().item() > 0.25
    made = []
    for scaled in (True, False):
        torch.manual_seed(0)
        made.append(recipe_of(tmp_path, model=model, layers=2, scaled_init=scaled).layers())
    smaller, usual = (layers[1].get_parameter("ffn.0.weight") for layers in made)
    torch.testing.assert_close(smaller * (2 if model == "decoder" else 2**0.5), usual)
    assert isinstance(made[0][-1], Head)
    assert made[0][-1].clip_logits is None
    networks = [nn.Sequential(*recipe_of(tmp_path, model=model, matrices=number).layers()) for number in (1, 2, 3)]
    found = [sum(weight.shape == (300, 32) for weight in network.parameters()) for network in networks]
    assert found == ([1, 1, 2] if model == "decoder" else [1, 2, 3])
