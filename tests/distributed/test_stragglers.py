"""A slow rank is named once, within five steps once all is warm, and nobody else is (R14)."""

import logging
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe
from gpipe.distributed.stragglers import NOTICEABLE_SECONDS, SLOW_RATIO, WARM_UP_STEPS, WINDOW, Stragglers, ratios
from tests.support.clock import Clock, Slow
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

BUSY = 0.03


def warned(rank: int, world: int, slow: int, times: float, measured: bool, steps: int) -> list[str]:
    """What a rank warns of when all layers of the rank `slow` take so many times as long; -1 for any."""
    with pytest.MonkeyPatch.context() as patch:
        seconds, clock = BUSY * (times if rank in (slow, -1) else 1), Clock(patch)
        return warnings_of([Slow(4, seconds, clock) for _ in range(world)], measured, steps)


def warnings_of(layers: Sequence[nn.Module], measured: bool, steps: int) -> list[str]:
    """What this rank warns of while it trains layers, one a stage."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gpipe").addHandler(handler)
    sample = torch.ones(8, 4) if measured else None
    try:
        with gpipe.GPipe(
            layers, [1] * len(layers), 2, remat="never", seed=0, sample=sample, driver="process"
        ) as pipe:
            for _ in range(steps):
                pipe.step(torch.ones(16, 4), torch.ones(16, 4), nn.functional.mse_loss)
    finally:
        logging.getLogger("gpipe").removeHandler(handler)
    return found


SECONDS = st.floats(NOTICEABLE_SECONDS, 10)


def named(stragglers: Stragglers, steps: list[list[float]]) -> list[tuple[int, str]]:
    """At which step what was said."""
    return [(at, text) for at, busy in enumerate(steps, 1) for text in stragglers.record(busy)]


@given(st.lists(SECONDS, min_size=2, max_size=8), st.floats(0.01, 100))
def test_ranks_that_are_busy_in_proportion_to_their_shares_all_have_ratio_1(shares: list[float], pace: float) -> None:
    assert all(abs(ratio - 1) < 1e-9 for ratio in ratios([pace * share for share in shares], shares))


@given(st.lists(SECONDS, min_size=3, max_size=8), st.floats(SLOW_RATIO + 0.01, 100), st.integers(0, 20), st.data())
def test_whoever_becomes_slow_is_named_once_within_five_steps(
    costs: list[float], times: float, before: int, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(costs) - 1))
    busy = [cost * (times if rank == slow else 1) for rank, cost in enumerate(costs)]
    found = named(
        Stragglers(range(len(costs)), costs, 1, measured=True), [costs] * (WARM_UP_STEPS + before) + [busy] * 30
    )
    assert len(found) == 1
    ((at, text),) = found
    assert before < at - WARM_UP_STEPS <= before + WINDOW
    assert f"Rank {slow} (stage {slow}, replica 0)" in text
    assert "as long as expected from the measured costs" in text


@given(st.lists(st.lists(st.floats(1.0, 1.4), min_size=4, max_size=4), max_size=20))
def test_noise_names_nobody(steps: list[list[float]]) -> None:
    assert (
        named(Stragglers(range(2), [3.0, 1.0], 2, measured=False), [[1.0, 1.0, 1.0, 1.0]] * WARM_UP_STEPS + steps)
        == []
    )


LONG = 3 * (WARM_UP_STEPS + WINDOW)
EVEN, HICCUP = [1.0, 1.0], [1.0, 9.0]
NOBODY = {
    "two hiccups": ([1, 1], True, [EVEN] * WARM_UP_STEPS + [HICCUP, EVEN, EVEN, HICCUP, EVEN, EVEN, EVEN]),
    "one with more to do": ([1, 4], True, [[1.0, 4.0]] * LONG),
    "one with more parameters": ([1, 4], False, [HICCUP] * LONG),
    "one whose costs nobody knows": ([1, 1], False, [HICCUP] * LONG),
    "the first steps": ([1, 1], True, [HICCUP] * WARM_UP_STEPS),
    "what takes no time": ([1, 1], True, [[NOTICEABLE_SECONDS / 20, NOTICEABLE_SECONDS * 0.99]] * LONG),
    "what costs nothing": ([0, 1], True, [EVEN] * LONG),
    "one alone": ([1], True, [[1.0]] * LONG),
}


def test_nobody_is_named_without_reason() -> None:
    for name, (costs, measured, steps) in NOBODY.items():
        assert named(Stragglers(range(len(costs)), costs, 1, measured=measured), steps) == [], name
    assert named(Stragglers(range(2), [1.0, 1.0], 1, measured=True), [HICCUP] * LONG)


def test_replicas_of_the_same_layers_are_compared_whatever_these_cost() -> None:
    steps = [[1.0, 7.0, 1.0, 7.0, 1.0, 21.0]] * LONG
    ((_, text),) = named(Stragglers(range(2), [1.0, 9.0], 3, measured=False), steps)
    assert text.startswith(
        "Rank 5 (stage 1, replica 2) is slow, and the other ranks wait for it: it was busy 3.0 times "
    )
    assert "as long as needed for the same layers in other replicas, 21 s in the last step" in text
    assert text.endswith("[slow-rank]")


def test_over_processes_rank_0_names_who_takes_longer_than_its_costs_say(pool: WorkerPool) -> None:
    (text,), *others = answers(pool.run(warned, 2, 4.0, True, WARM_UP_STEPS + WINDOW))
    assert text.startswith("Rank 2 (stage 2, replica 0) is slow, and the other ranks wait for it: it was busy ")
    assert others == [[], [], []]
    for slow, times in ((-1, 1.0), (2, 4.0)):  # of which nobody knows what they should take
        assert answers(pool.run(warned, slow, times, False, WARM_UP_STEPS + WINDOW)) == [[], [], [], []]
