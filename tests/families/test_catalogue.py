"""The families build, train, and do the same twice: what others try on them rests on that.

Here they are the dozen and one of each task; the others by `make families`.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tests.families.catalogue import DOZEN, DRAWING, FAMILIES, NOT_BUILT, Family, Task, batch, build
from tests.families.family import config_of, model_of
from tests.families.tiny import configs_in

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
def test_a_family_drops_only_where_it_is_told_to_and_keeps_no_cache(family: Family) -> None:
    model = build(family, dropout=False)
    state = torch.get_rng_state()
    model(**batch(family)).loss.backward()
    assert model.training
    assert torch.equal(torch.get_rng_state(), state) == (family.name not in DRAWING)

    config = config_of(family, dropout=True)
    assert all(0 <= one.p <= 0.1 for one in build(family, dropout=True).modules() if isinstance(one, nn.Dropout))
    assert not any(getattr(part, "use_cache", False) for part in configs_in(config))


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
