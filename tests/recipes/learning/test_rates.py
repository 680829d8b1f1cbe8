from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.learning import cosine, exponential, inverse_root

Rate = Callable[[int, int, float], float]
RATES: dict[str, Rate] = {
    "cosine": cosine,
    "exponential": lambda step, steps, rising: exponential(step, steps / 7, 0.5, rising),
    "inverse_root": lambda step, steps, rising: inverse_root(step, rising),
}


@pytest.mark.parametrize("name", ["cosine", "inverse_root"])
@given(st.integers(1, 500), st.floats(0, 1))
def test_the_learning_rate_rises_then_falls(name: str, steps: int, warm_up: float) -> None:
    rates = [RATES[name](step, steps, warm_up * steps) for step in range(steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("name", RATES)
@given(st.integers(2, 500), st.floats(0, 1))
def test_the_rise_is_a_line(name: str, steps: int, warm_up: float) -> None:
    rising = int(warm_up * steps)
    falls = [0.5 ** (step // (steps / 7)) if name == "exponential" else 1 for step in range(rising)]
    assert [RATES[name](step, steps, rising) for step in range(rising)] == pytest.approx(
        [fall * (step + 1) / rising for step, fall in enumerate(falls)]
    )


@given(st.integers(1, 40), st.floats(0.1, 1))
def test_exponential_decay_multiplies_after_every_so_many_steps(every: int, rate: float) -> None:
    rates = [exponential(step, every, rate, 0) for step in range(4 * every)]
    assert rates == pytest.approx([rate**times for times in range(4) for _ in range(every)])
