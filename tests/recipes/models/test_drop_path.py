from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe.models import DropPath, amoebanet_b, amoebanet_d, drop_path_keep, set_keep
from gpipe.recipes.models.amoebanet import Cell


@given(steps=st.integers(1, 10**6), final=st.floats(0.01, 1), data=st.data())
def test_what_is_kept_falls_linearly_from_1_to_the_final_share(steps: int, final: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps))
    assert drop_path_keep(step, steps, final) == pytest.approx(1 - step / steps * (1 - final))
    assert drop_path_keep(0, steps, final) == 1
    assert drop_path_keep(steps + step, steps, final) == final


def test_shares_that_cannot_be_are_refused() -> None:
    for keep in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"keep={keep}"):
            set_keep(DropPath(), keep)


def test_a_sample_is_kept_whole_or_not_at_all_and_the_mean_stays() -> None:
    torch.manual_seed(0)
    drop_path = DropPath()
    set_keep(drop_path, 0.8)
    factors = drop_path(torch.ones(20_000, 2, 3)).flatten(1)
    assert torch.equal(factors, factors[:, :1].expand_as(factors))
    assert torch.equal(factors.unique(), torch.tensor([0, 1.25]))
    assert abs((factors > 0).double().mean().item() - 0.8) < 0.02  # 7 standard deviations


def test_nothing_is_drawn_in_evaluation_nor_where_all_is_kept() -> None:
    x = torch.ones(3, 2)
    before = torch.random.get_rng_state()
    assert DropPath()(x) is x
    quiet = DropPath().eval()
    set_keep(quiet, 0.1)
    assert quiet(x) is x
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("build", [amoebanet_d, amoebanet_b])
def test_it_falls_on_what_operations_give_but_none(build: Callable[[int, int], list[nn.Module]]) -> None:
    torch.manual_seed(0)
    cell = build(3, 16)[1]
    assert isinstance(cell, Cell)
    falls: list[Tensor] = []
    cell.drop_path.register_forward_hook(lambda module, inputs, output: falls.append(output))
    cell(torch.randn(2, 32, 8, 8))
    names = [name for pair in cell.genotype.pairs for name, _ in pair]
    assert len(falls) == 8 == sum(name != "none" for name in names)
