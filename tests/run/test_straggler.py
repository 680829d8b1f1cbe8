"""A slow rank is named once, within five steps, and nobody else is (R14)."""

from hypothesis import given
from hypothesis import strategies as st

from gpipe.run.straggler import SLOW, WINDOW, Stragglers, ratios

SECONDS = st.floats(0.01, 10)


def named(stragglers: Stragglers, steps: list[list[float]]) -> list[tuple[int, str]]:
    """At which step what was said."""
    return [(at, text) for at, busy in enumerate(steps, 1) for text in stragglers.note(busy)]


@given(st.lists(SECONDS, min_size=2, max_size=8), st.floats(0.01, 100))
def test_ranks_that_are_busy_in_proportion_to_their_shares_all_have_ratio_1(shares: list[float], pace: float) -> None:
    assert all(abs(ratio - 1) < 1e-9 for ratio in ratios([pace * share for share in shares], shares))


@given(st.lists(SECONDS, min_size=3, max_size=8), st.floats(SLOW + 0.01, 100), st.integers(0, 20), st.data())
def test_whoever_becomes_slow_is_named_once_within_five_steps(
    costs: list[float], times: float, before: int, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(costs) - 1))
    busy = [cost * (times if rank == slow else 1) for rank, cost in enumerate(costs)]
    found = named(Stragglers(costs, 1, measured=True), [costs] * before + [busy] * 30)
    assert len(found) == 1
    ((at, text),) = found
    assert before < at <= before + WINDOW
    assert f"rank {slow} (stage {slow}, replica 0)" in text
    assert "times its share by the measured costs" in text


@given(st.lists(st.lists(st.floats(1.0, 1.4), min_size=4, max_size=4), max_size=20))
def test_noise_names_nobody(steps: list[list[float]]) -> None:
    assert named(Stragglers([3.0, 1.0], 2, measured=False), [[1.0, 1.0, 1.0, 1.0]] * 3 + steps) == []


def test_two_hiccups_name_nobody() -> None:
    hiccup = [1.0, 9.0]
    assert named(Stragglers([1, 1], 1, measured=True), [hiccup, [1, 1], [1, 1], hiccup, [1, 1], [1, 1], [1, 1]]) == []


def test_a_partition_that_was_measured_to_cost_more_is_not_slow() -> None:
    steps = [[1.0, 4.0]] * 5
    assert named(Stragglers([1.0, 4.0], 1, measured=True), steps) == []
    ((_, text),) = named(Stragglers([1.0, 4.0], 1, measured=False), steps)
    assert text == (
        "rank 1 (stage 1, replica 0) is slow, and the others wait for it: it was busy 4.0 times the median of the "
        "other ranks, 4 s in the last step; something else may use its device, or its partition has too much to do: "
        "sample= balances by measured time"
    )


def test_the_rank_of_a_replica_is_told_by_stage() -> None:
    ((_, text),) = named(Stragglers([1.0, 1.0], 2, measured=False), [[1.0, 1.0, 1.0, 3.0]] * 5)
    assert "rank 3 (stage 1, replica 1)" in text


def test_what_takes_no_time_is_not_slow() -> None:
    assert named(Stragglers([1.0, 1.0], 1, measured=True), [[1e-4, 1e-3]] * 9) == []
    assert named(Stragglers([0.0, 1.0], 1, measured=True), [[1.0, 1.0]] * 9) == []
    assert named(Stragglers([1.0], 1, measured=True), [[1.0]] * 9) == []
