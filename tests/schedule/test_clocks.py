"""Clocks of hosts that have nothing in common are laid side by side by what crossed between them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule.cost import StageCost
from gpipe.schedule.simulate import simulate
from gpipe.schedule.timeline import Timeline, offsets
from tests.support.programs import LAW, lowered, micro_batch_counts

K = 4


def by_rank(step: Timeline, clocks: Sequence[float]) -> list[Timeline]:
    """What each rank knows: its own spans, by its own clock."""
    return [
        Timeline(
            1,
            tuple(
                span._replace(start=span.start + clock, end=span.end + clock)
                for span in step.spans
                if span.rank == rank
            ),
            step.seconds,
        )
        for rank, clock in enumerate(clocks)
    ]


@LAW
@given(
    micro_batch_counts,
    st.lists(st.sampled_from("abc"), min_size=K, max_size=K),
    st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3),
    st.floats(0.01, 1),
)
def test_what_crosses_sets_clocks_right(m: int, hosts: list[str], ahead: list[float], send: float) -> None:
    step = simulate(lowered(K, m), [StageCost(1.0, 2.0, send=send)] * K).timeline
    clocks = [ahead["abc".index(host)] for host in hosts]
    for clock, found in zip(clocks, offsets(hosts, by_rank(step, clocks)), strict=True):
        assert abs(clocks[0] - clock - found) <= send + 4  # of stages that wait for another, not for the message


@LAW
@given(micro_batch_counts, st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2))
def test_equally_long_messages_set_them_right_to_the_last(m: int, ahead: list[float]) -> None:
    step = simulate(lowered(2, m), [StageCost(1.0, 1.0, send=0.5)] * 2).timeline
    found = offsets(["a", "b"], by_rank(step, ahead))
    assert abs(ahead[0] - ahead[1] - found[1]) < 1e-6


def test_ranks_of_one_host_are_left_as_they_are() -> None:
    step = simulate(lowered(K, 3), [StageCost(1.0, 2.0)] * K).timeline
    assert offsets(["a"] * K, by_rank(step, [7.0] * K)) == [0.0] * K
