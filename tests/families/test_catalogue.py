"""The families build, train, and do the same twice: what others try on them rests on that.

Here they are the dozen and one of each task; the others by `make families`.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tests.families.catalogue import DOZEN, DRAWING, FAMILIES, NOT_BUILT, Family, Task, batch, build, named
from tests.families.family import config_of, model_of
from tests.families.tiny import SIZES, configs_in, tiny_config

CHOSEN = {*DOZEN, *{family.task: family.name for family in FAMILIES}.values()}
CASES = [
    pytest.param(family, id=family.name, marks=[] if family.name in CHOSEN else pytest.mark.families)
    for family in FAMILIES
]
families = pytest.mark.parametrize("family", CASES)


def trained(family: Family, *, dropout: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one step, and the gradients."""
    model = build(family, dropout=dropout)
    torch.manual_seed(7)
    loss = model(**batch(family)).loss
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@families
def test_a_family_trains_to_the_same_bits_twice(family: Family) -> None:
    (loss, gradients), (again, gradients_again) = trained(family), trained(family)

    assert torch.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert any(gradient.any() for gradient in gradients.values())
    assert torch.equal(loss, again)
    assert gradients.keys() == gradients_again.keys()
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


@families
def test_a_family_draws_nothing_without_dropout(family: Family) -> None:
    model = build(family, dropout=False)
    state = torch.get_rng_state()
    model(**batch(family)).loss.backward()

    assert model.training
    assert torch.equal(torch.get_rng_state(), state) == (family.name not in DRAWING)


@families
def test_every_dropout_of_a_family_is_set_and_no_cache_is_kept(family: Family) -> None:
    config = config_of(family, dropout=True)
    dropouts = [module.p for module in build(family, dropout=True).modules() if isinstance(module, nn.Dropout)]

    assert all(0 <= p <= 0.1 for p in dropouts)
    assert all(not getattr(part, "use_cache", False) for part in configs_in(config))


def test_rows_of_words_have_different_lengths_and_no_labels_where_they_are_padded() -> None:
    words = batch(named("bert"), rows=6, length=9)

    assert words["attention_mask"].sum(1).tolist() == [9, 8, 7, 6, 9, 8]
    assert torch.equal(words["labels"] == -100, words["attention_mask"] == 0)
    assert all(torch.equal(value, words[name]) for name, value in batch(named("bert"), rows=6, length=9).items())
    assert not torch.equal(batch(named("bert"), rows=6, length=9, seed=2)["input_ids"], words["input_ids"])


def test_there_are_many_families_of_every_task() -> None:
    names = {family.name for family in FAMILIES}

    assert len(names) == len(FAMILIES) >= 110
    assert set(DOZEN) <= names
    assert not names & NOT_BUILT.keys()
    assert {family.task for family in FAMILIES} == set(Task)


@pytest.mark.families
def test_each_family_has_a_model_of_its_own() -> None:
    models = Counter(model_of(family) for family in FAMILIES)

    assert models.most_common(1)[0][1] == 1, models


def test_what_an_entry_says_comes_before_the_sizes_of_all() -> None:
    config = tiny_config("llama", {"num_hidden_layers": 5}, dropout=True)

    assert (config.num_hidden_layers, config.hidden_size) == (5, SIZES["hidden_size"])
    assert (config.attention_dropout, config.use_cache) == (0.1, False)
