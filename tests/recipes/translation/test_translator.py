"""Translating a word at a time: what the search over the whole forward finds, by one run of a layer for each word."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data.token_batches import BEGIN, END, PAD, padded
from gpipe.recipes.translation.recipe import TranslationRecipe
from gpipe.recipes.translation.translator import LAYOUTS, Cache, EncoderDecoder, Network, beam, greedy, limit_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.toy_language import options


def recipe_of(folder: Path, **changes: Any) -> TranslationRecipe:
    return TranslationRecipe(options(folder, **{"layers": 2, "sentences": 4, **changes}).resolved())


def layers_of(recipe: TranslationRecipe) -> list[nn.Module]:
    """Untrained layers that say something else of each sentence, and come to an END at times."""
    torch.manual_seed(6)
    layers = recipe.layers()
    with torch.no_grad():
        for name, weight in nn.Sequential(*layers).named_parameters():
            if name.endswith("weight") and weight.dim() > 1 and len(weight) < len(recipe.vocabulary):
                weight.mul_(2)
        layers[-1].get_parameter("bias")[END] += 1.6
    return layers


def sources_of(recipe: TranslationRecipe) -> list[list[int]]:
    return [one.source for one in recipe.corpus.test]


def piped(recipe: TranslationRecipe, **how: Any) -> gpipe.GPipe:
    model, sample = recipe.model(layers_of(recipe))
    how = {"partitions": 2, "micro_batches": 3, "costs": "params", **how}
    return pipe_by_costs(model, sample=sample, **how).eval()


def translated(recipe: TranslationRecipe, width: int, **how: Any) -> list[list[int]]:
    with piped(recipe, **how) as pipe:
        return recipe.translate(pipe, sources_of(recipe), width)


def translate(
    rank: int, world: int, folder: str, model: str, matrices: int, widths: list[int]
) -> list[list[list[int]]]:
    """What a rank gets: of one micro-batch, whose masks are too large to be told at first, and of three."""
    recipe = recipe_of(Path(folder), model=model, matrices=matrices)
    return [translated(recipe, width, partitions=world, micro_batches=width, driver="process") for width in widths]


each_model = pytest.mark.parametrize("model", list(LAYOUTS))
each_number_of_matrices = pytest.mark.parametrize("matrices", [1, 3])
WIDTHS = [1, 3]


def over_all_words(recipe: TranslationRecipe) -> Network:
    """The network as it is trained, which is given all words again each time."""
    plain = gpipe.Sequential(*layers_of(recipe)).eval()

    def one_row(words: Tensor, begun: Tensor) -> Tensor:
        places = (words != PAD).sum(dim=1)[:, None] + torch.arange(begun.shape[1])
        rows = F.pad(words, (0, begun.shape[1]), value=PAD).scatter(1, places, begun)
        logits: Tensor = plain(rows)
        return logits[torch.arange(len(rows)), places[:, -1]][:, None]

    return one_row if recipe.options.model == "decoder" else lambda words, begun: plain((words, begun))


def searched(recipe: TranslationRecipe, width: int) -> list[list[int]]:
    """What is found over the whole forward; it would tell wrong rows and wrong words."""
    network, sources = over_all_words(recipe), sources_of(recipe)
    found = greedy(network, sources) if width == 1 else beam(network, sources, width)
    assert len({*map(tuple, found)}) > len(found) / 2
    assert any(len(one) + 1 < limit_of(source) for one, source in zip(found, sources, strict=True))
    return found


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
@pytest.mark.parametrize("width", WIDTHS)
@each_number_of_matrices
@each_model
def test_a_pipe_finds_what_the_search_over_the_whole_forward_finds(
    model: str, matrices: int, width: int, driver: str, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, model=model, matrices=matrices)
    assert translated(recipe, width, driver=driver) == searched(recipe, width)


@each_number_of_matrices
@each_model
def test_so_do_processes(model: str, matrices: int, tmp_path: Path, pool: WorkerPool) -> None:
    recipe = recipe_of(tmp_path, model=model, matrices=matrices)
    expected = [searched(recipe, width) for width in WIDTHS]
    for found in answers(pool.run(translate, str(tmp_path), model, matrices, WIDTHS, world=2)):
        assert found == expected


@each_model
def test_each_layer_runs_once_for_each_new_word_of_rows_that_go_on(model: str, tmp_path: Path) -> None:
    recipe, calls = recipe_of(tmp_path, model=model), dict[str, Counter[tuple[int, int]]]()

    def count(name: str, layer: Any, given: tuple[Tensor, ...]) -> None:
        calls[name][given[0].shape[0], given[0].shape[1]] += 1

    sources = sources_of(recipe)
    with piped(recipe, micro_batches=1) as pipe:
        found = recipe.translate(pipe, sources, 1)  # in which it learns the way
        layers = {
            name: layer for name, layer in pipe.named_modules() if type(layer).__name__.endswith(("Layer", "Block"))
        }
        for name, layer in layers.items():
            calls[name] = Counter()
            layer.register_forward_pre_hook(partial(count, name))
        assert recipe.translate(pipe, sources, 1) == found
    said = [min(len(one) + 1, limit_of(source)) for one, source in zip(found, sources, strict=True)]
    rows = Counter((sum(words > at for words in said), 1) for at in range(1, max(said)))
    longest = max(map(len, sources)) + 1
    encoder, decoder = Counter({(len(said), longest): 1}), rows + Counter({(len(said), 1): 1})
    if model == "decoder":
        decoder = rows + Counter({(len(said), longest + 1): 1})
    assert len(rows) > 2
    assert len(calls) == 4
    for name, some in calls.items():
        assert some == (encoder if type(layers[name]).__name__ == "EncoderLayer" else decoder), name


@each_model
def test_what_is_asked_word_by_word_is_what_training_teaches(model: str, tmp_path: Path) -> None:
    """The logits after a beginning are those at its end in a whole sentence, whatever is beside it in the batch."""
    recipe = recipe_of(tmp_path, model=model)
    translator, _ = recipe.model(layers_of(recipe))
    assert isinstance(translator, EncoderDecoder)
    translator.eval()
    sentences = recipe.corpus.test
    words, cache = padded([[*one.source, END] for one in sentences]), Cache(2 * len(translator.layers))
    with torch.no_grad():
        whole = translator(translator.batch(sentences).inputs)
        for length in range(min(len(one.english) for one in sentences) + 1):
            begun = torch.tensor([[BEGIN, *one.english[:length]] for one in sentences])
            cache.reorder(words, begun)
            asked = translator.next_logits(words, begun, cache)[:, -1]
            assert cache.get_seq_length() == length + 1
            for row, one in enumerate(sentences):
                at = length + (len(one.source) + 1 if model == "decoder" else 0)
                torch.testing.assert_close(asked[row], whole[row, at], rtol=1e-4, atol=1e-4)
