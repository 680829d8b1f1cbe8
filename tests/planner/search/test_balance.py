"""The partitioner against all cuts there are, counted in fractions; then examples, then what it refuses."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from gpipe.planner.search import balance as balance_module
from gpipe.planner.search.balance import partition
from gpipe.schedule.partition import Balance, Memory, Partition

BALANCES: tuple[Balance, ...] = ("variance", "minmax")


@pytest.fixture(autouse=True, scope="module")
def few_at_once() -> Iterator[None]:
    """Stages of so few layers begin in several of the parts in which a table of many layers is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance_module, "_FIRSTS_AT_ONCE", 3)
        yield


@dataclass(frozen=True)
class Question:
    """The arguments of `partition`, and its definition, written as plainly as possible."""

    costs: list[float]
    stages: int
    speeds: list[float] | None
    transfers: list[float] | None
    memory: Memory | None

    def ask(self, balance: Balance) -> Partition:
        return partition(
            self.costs,
            self.stages,
            balance=balance,
            speeds=self.speeds,
            transfers=self.transfers,
            memory=self.memory,
        )

    def answers(self) -> Iterator[tuple[int, ...]]:
        """All cuts that fit."""
        count = len(self.costs)
        for inner in combinations(range(1, count), self.stages - 1):
            places = (0, *inner, count)
            if all(self.fits(k, *places[k : k + 2]) for k in range(self.stages)):
                yield tuple(end - first for first, end in pairwise(places))

    def fits(self, stage: int, first: int, end: int) -> bool:
        memory = self.memory
        if memory is None:
            return True
        limit = memory.limits if isinstance(memory.limits, int | float) else memory.limits[stage]
        in_flight = memory.in_flight if isinstance(memory.in_flight, int | float) else memory.in_flight[stage]
        need = sum(memory.state[first:end]) + sum(memory.activations[first:end]) + in_flight * memory.boundary[first]
        return need <= limit

    def seconds(self, layers: Sequence[int]) -> list[Fraction]:
        costs = self.costs if any(self.costs) or any(self.transfers or []) else [1.0] * len(self.costs)
        speeds = self.speeds or [1.0] * self.stages
        transfers = [0.0, *(self.transfers or [0.0] * (len(costs) - 1)), 0.0]
        ends = [sum(layers[: k + 1]) for k in range(len(layers))]
        return [
            sum(map(Fraction, costs[end - own : end])) / Fraction(speed)
            + Fraction(transfers[end - own])
            + Fraction(transfers[end])
            for own, end, speed in zip(layers, ends, speeds, strict=True)
        ]

    def mean(self) -> Fraction:
        costs = self.costs if any(self.costs) or any(self.transfers or []) else [1.0] * len(self.costs)
        return sum(map(Fraction, costs), Fraction(0)) / sum(map(Fraction, self.speeds or [1.0] * self.stages))

    def value(self, layers: Sequence[int], balance: Balance) -> tuple[Fraction, ...]:
        """What is minimized, most important first."""
        seconds, mean = self.seconds(layers), self.mean()
        variance = sum(((own - mean) ** 2 for own in seconds), Fraction(0))
        return (max(seconds), variance) if balance == "minmax" else (variance,)

    def best(self, balance: Balance) -> tuple[int, ...] | None:
        """The best of all cuts; of ties, the one with the largest first stages."""
        return min(self.answers(), key=lambda own: (self.value(own, balance), [-n for n in own]), default=None)


@st.composite
def questions(draw: st.DrawFn, numbers: st.SearchStrategy[float], most: int = 8) -> Question:
    count = draw(st.integers(1, most))
    stages = draw(st.integers(1, min(count, 5)))

    def rows(entries: st.SearchStrategy[float], length: int) -> st.SearchStrategy[list[float]]:
        return st.lists(entries, min_size=length, max_size=length)

    bytes_ = rows(st.integers(0, 9), count)
    memories = st.builds(
        Memory,
        bytes_,
        bytes_,
        bytes_,
        st.one_of(st.integers(8, 60), rows(st.one_of(st.integers(8, 60), st.just(math.inf)), stages)),
        st.one_of(st.integers(1, 3), rows(st.integers(1, 3), stages)),
    )
    return Question(
        draw(rows(numbers, count)),
        stages,
        draw(st.none() | rows(st.sampled_from([1.0, 2.0, 0.5, 3.0]), stages)),
        draw(st.none() | rows(numbers, count - 1)),
        draw(st.none() | memories),
    )


@pytest.mark.parametrize("balance", BALANCES)
@settings(max_examples=250, deadline=None)
@for_all(question=questions(st.integers(0, 12)))
def test_no_cuts_are_better_and_ties_go_to_large_first_stages(balance: Balance, question: Question) -> None:
    best = question.best(balance)
    if best is None:
        with pytest.raises(ValueError, match=r"\[(nothing-fits|layer-too-large)\]"):
            question.ask(balance)
    else:
        assert question.ask(balance).layers == best


@pytest.mark.parametrize("balance", BALANCES)
@settings(max_examples=150, deadline=None)
@for_all(question=questions(st.one_of(st.floats(0, 1e6), st.floats(0, 1e-6), st.floats(0.9, 1.1))))
def test_no_cuts_are_better_whatever_the_numbers(balance: Balance, question: Question) -> None:
    best = question.best(balance)
    if best is not None:
        found = question.ask(balance)
        assert all(question.fits(stage, *ends) for stage, ends in enumerate(found.bounds))
        assert found.seconds == pytest.approx([float(own) for own in given_seconds(question, found)], rel=1e-14)
        got, least = question.value(found.layers, balance)[0], question.value(best, balance)[0]
        power, slack = (1.0, 0.0) if balance == "minmax" else (0.5, 1e-11 * float(question.mean()))
        assert float(got) ** power <= float(least) ** power * (1 + 1e-11) + slack


def given_seconds(question: Question, found: Partition) -> list[Fraction]:
    zero = not any(question.costs) and not any(question.transfers or [])
    return [Fraction(0)] * question.stages if zero else question.seconds(found.layers)


def test_many_equal_layers_are_cut_as_evenly_as_can_be() -> None:
    """Sums that are off by their last bits would shuffle the sizes."""
    assert partition([0.7065] * 1000, 64).layers == (16,) * 40 + (15,) * 24


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("cost", [5, 0, 0.1, 1e-320, 1e300])
@pytest.mark.parametrize(("count", "layers"), [((8, 3), (3, 3, 2)), ((11, 4), (3, 3, 3, 2)), ((3, 3), (1, 1, 1))])
def test_equal_costs(balance: Balance, cost: float, count: tuple[int, int], layers: tuple[int, ...]) -> None:
    assert partition([cost] * count[0], count[1], balance=balance).layers == layers


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("at", [0, 7, 19])
def test_one_giant_layer_stands_alone_and_in_the_way(balance: Balance, at: int) -> None:
    costs = [1.0] * 20
    costs[at] = 100.0
    found = partition(costs, 4, balance=balance)
    assert found.layers[[first for first, _ in found.bounds].index(at)] == 1
    assert (found.obstacle, found.gap, max(found.seconds)) == (at, 0, 100)
    assert partition([*costs[:4], 50], 2, balance=balance).obstacle in (0, 4)  # with too few stages too
    assert (
        partition([2, 2, 4], 2, balance=balance).obstacle is Partition.of_sizes([1, 3], [1, 1, 1, 1]).obstacle is None
    )


@pytest.mark.parametrize("power", [-900, -300, 300, 900])
@pytest.mark.parametrize("balance", BALANCES)
def test_the_unit_does_not_matter(balance: Balance, power: int) -> None:
    assert partition([0, 0, 5e-324, 5e-324], 2, transfers=[0, 0, 0.5]).seconds == (0, 1e-323)
    costs, transfers = [3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3], [1.0, 0, 2, 0, 1, 3, 0, 2, 1]
    scaled = [2.0**power * cost for cost in costs], [2.0**power * transfer for transfer in transfers]
    plain = partition(costs, 4, balance=balance, transfers=transfers)
    assert partition(scaled[0], 4, balance=balance, transfers=scaled[1]).layers == plain.layers


def test_layers_given() -> None:
    found = Partition.of_sizes((2, 3, 1), [1, 2, 3, 4, 5, 6])
    assert (found.cuts, found.bounds, found.seconds) == ((2, 5), ((0, 2), (2, 5), (5, 6)), (3, 12, 6))
    assert found == Partition.of_sizes([2, 3, 1], [1.0, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match=r"partitions\[1\] is 0.*\n.*6 layers in total.*all 7"):
        Partition.of_sizes([2, 0, 4], [1] * 7)


def test_a_layer_too_big_for_any_device_is_named() -> None:
    memory = Memory(state=[1, 8000, 1], boundary=[1, 1, 1], activations=[1, 500, 1], limits=[4000, 5000])
    with pytest.raises(ValueError, match=r"layer 1 needs 8,500 bytes, .* 5,000.*\[layer-too-large\]"):
        partition([1, 1, 1], 2, memory=memory)


@pytest.mark.parametrize("balance", BALANCES)
def test_what_would_fit_is_said(balance: Balance) -> None:
    memory = Memory(state=[10] * 6, boundary=[0] * 6, activations=[0] * 6, limits=[24, 20])
    with pytest.raises(ValueError, match=r"stage 1 \(layers 3 to 5\) needs 30 bytes, 1\.5 times .* 20\."):
        partition([1] * 6, 2, balance=balance, memory=memory)


def test_all_mistakes_are_told_at_once() -> None:
    nan, inf = math.nan, math.inf
    memory = Memory([1, -1, 1], [1, 1], [0, 0, 0], limits=[5, nan], in_flight=-1)
    with pytest.raises(ValueError, match="invalid for 3 layers") as caught:
        partition([1, nan, -inf], 4, balance="best", speeds=[1, 0], transfers=[inf, 1], memory=memory)  # type: ignore[arg-type]
    told = " ".join(text.split()[0] for text in str(caught.value).splitlines())
    of_memory = "memory.state[1] memory.boundary memory.limits memory.limits[1] memory.in_flight[0]"
    assert told == f"balance='best' partitions=4 costs[1] speeds speeds[1] transfers[0] {of_memory}"


def test_no_stage_may_be_empty_and_no_number_too_large() -> None:
    for stages in (-1, 0, 3):
        with pytest.raises(ValueError, match=f"^partitions={stages} is invalid for 2 layers"):
            partition([1, 1], stages)
    with pytest.raises(ValueError, match="partitions=1 is invalid for 0 layers"):
        partition([], 1)
    with pytest.raises(ValueError, match="Use larger units"):
        partition([1e308, 1e308], 1)
