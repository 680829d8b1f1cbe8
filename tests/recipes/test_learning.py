"""How learning rates rise and fall, and the moving average of weights."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.recipe import AVERAGE, Averages, cosine, exponential, inverse_root

Rate = Callable[[int, int, float], float]
RATES: dict[str, Rate] = {
    "cosine": cosine,
    "exponential": lambda step, steps, rising: exponential(step, steps / 7, 0.5, rising),
    "inverse_root": lambda step, steps, rising: inverse_root(step, rising),
}


@pytest.mark.parametrize("name", RATES)
@given(st.integers(2, 500), st.floats(0, 1))
def test_a_learning_rate_rises_in_a_line_then_falls(name: str, steps: int, warm_up: float) -> None:
    rising = int(warm_up * steps)
    rates = [RATES[name](step, steps, rising) for step in range(steps)]
    falls = [0.5 ** (step // (steps / 7)) if name == "exponential" else 1 for step in range(rising)]
    assert rates[:rising] == pytest.approx([fall * (step + 1) / rising for step, fall in enumerate(falls)])
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[rising:] == sorted(rates[rising:], reverse=True)


@given(st.integers(1, 40), st.floats(0.1, 1))
def test_exponential_decay_multiplies_after_every_so_many_steps(every: int, rate: float) -> None:
    rates = [exponential(step, every, rate, 0) for step in range(4 * every)]
    assert rates == pytest.approx([rate**times for times in range(4) for _ in range(every)])


def moved(values: list[float], decay: float) -> tuple[torch.nn.Parameter, Averages, torch.optim.Optimizer]:
    """A weight that has had these values after each step."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    averages = Averages(optimizer, decay)
    for step, value in enumerate(values):
        weight.data.fill_(value)
        weight.grad = torch.ones_like(weight)
        averages.update(step)
    return weight, averages, optimizer


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.floats(0, 0.999, exclude_min=True))
def test_an_average_is_a_weighted_mean_in_which_old_weights_count_less(values: list[float], decay: float) -> None:
    expected = values[0]
    for step, value in enumerate(values):
        kept = min(decay, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * value
    weight, averages, _ = moved(values, decay)
    with averages.applied():
        torch.testing.assert_close(weight.item(), expected, rtol=1e-9, atol=1e-9)
    assert weight.item() == values[-1]


def test_weights_come_back_as_they_were_also_after_a_failure() -> None:
    weight, averages, optimizer = moved([1 / 3, 2 / 3, 0.1], 0.9)
    average = optimizer.state[weight][AVERAGE].clone()

    def interrupted() -> None:
        with averages.applied():
            assert torch.equal(weight, average)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert weight.item() == 0.1
    assert torch.equal(optimizer.state[weight][AVERAGE], average)


def test_there_is_none_where_none_is_wanted_and_of_a_weight_in_another_process() -> None:
    weight, averages, optimizer = moved([1.0, 2.0], 0.0)
    assert not optimizer.state
    with averages.applied():
        assert weight.item() == 2.0
    here, elsewhere = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([here, elsewhere], lr=0.0)
    here.grad = torch.ones(1)  # none comes for the other
    Averages(optimizer, 0.9).update(0)
    assert set(optimizer.state) == {here}
