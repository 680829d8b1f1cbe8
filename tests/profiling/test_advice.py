"""What to change, told from timelines that were made on paper: each gain is what its remedy then gives."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.planner.other_processes import OtherProcesses
from gpipe.profiling.advice import Advice, RecordedSteps, advise, explain, shared_lock
from gpipe.profiling.breakdown import breakdown
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import Remat, join_backwards, place_transfers
from gpipe.schedule.partition import Partition
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import simulate
from gpipe.schedule.timeline import Span, Timeline
from tests.support.programs import LAW, lowered

M = 8


def step(layers: Sequence[float], cuts: Sequence[int], remat: Remat = "never") -> Timeline:
    """A step of layers that take so many seconds forward, and twice that backward."""
    forwards = [sum(layers[first:end]) for first, end in Partition.of_sizes(cuts, layers).bounds]
    costs = [StageCost(forward=some, backward=2 * some) for some in forwards]
    return simulate(lowered(len(cuts), M, remat), costs).timeline


def seen(
    layers: Sequence[float],
    cuts: Sequence[int],
    remat: Remat = "never",
    driver: str = "threads",
    other: dict[str, float] | None = None,
) -> RecordedSteps:
    """Three such steps, and what else took time behind each."""
    timelines = [replace(step(layers, cuts, remat), other=other or {})] * 3
    return RecordedSteps(timelines, breakdown(timelines), Partition.of_sizes(cuts, layers), driver)


def the_one(some: RecordedSteps, text: str) -> Advice:
    """The advice that says so."""
    (found,) = [advice for advice in advise(some) if text in advice.text]
    return found


def test_a_slow_stage_is_named_with_the_cuts_that_mend_it_and_what_they_give() -> None:
    slow = seen([1.0] * 6, [4, 1, 1])
    assert explain(slow).startswith("Stage 0 takes 100% longer than the mean stage. Use partitions=[2, 2, 2] instead")
    mended = step([1.0] * 6, [2, 2, 2])
    assert the_one(slow, "partitions=").gain == pytest.approx(slow.breakdown.seconds / mended.seconds)


@LAW
@given(st.lists(st.integers(1, 9), min_size=3, max_size=6), st.data())
def test_other_cuts_give_what_is_told(layers: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(layers) - 1))
    now = seen(list(map(float, layers)), [first, len(layers) - first])
    gains = [advice.gain for advice in advise(now)]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= 1.02 for gain in gains)
    for advice in advise(now):
        if "partitions=" in advice.text:
            better = advice.text.split("partitions=[")[1].split("]")[0]
            then = step(list(map(float, layers)), [int(count) for count in better.split(", ")])
            assert advice.gain == pytest.approx(now.breakdown.seconds / then.seconds, rel=1e-6)


def test_recompute_is_told_with_what_it_gives() -> None:
    always = seen([1.0, 1.0], [1, 1], "always")
    assert always.breakdown.shares["recompute"] > 0.1
    never = step([1.0, 1.0], [1, 1], "never")
    assert the_one(always, "remat='never'").gain == pytest.approx(always.breakdown.seconds / never.seconds)


def test_one_thread_for_all_ranks_is_told() -> None:
    on_time = step([1.0, 1.0], [1, 1])
    timelines = [replace(on_time, seconds=2 * on_time.seconds)]
    in_turns = RecordedSteps(timelines, breakdown(timelines), Partition.of_sizes([1, 1], [1.0, 1.0]), "lockstep")
    assert "driver='lockstep'" in explain(in_turns)


@pytest.mark.parametrize(
    ("part", "words"),
    [("data", "Loading data"), ("weight update", "The optimizer"), ("between steps", "Your code between")],
)
def test_what_takes_most_outside_of_the_pipeline_is_told(part: str, words: str) -> None:
    assert explain(seen([1.0, 1.0], [1, 1], other={part: 100.0})).startswith(words)


def test_smaller_micro_batches_are_advised_where_there_are_rows_for_them() -> None:
    slow = seen([1.0, 1.0], [1, 1])
    for asked, said in ((M, True), (2 * M, False)):  # with M=16 there were rows for 8
        texts = [advice.text for advice in advise(replace(slow, micro_batches=asked))]
        assert any("micro_batches=16" in text for text in texts) == said


@pytest.mark.parametrize("recomputes", [False, True])
def test_of_one_micro_batch_more_are_advised_unless_they_would_be_recomputed(recomputes: bool) -> None:
    timeline = simulate(lowered(2, 1, "never"), [StageCost(1.0, 2.0)] * 2).timeline
    one = RecordedSteps(
        [timeline], breakdown([timeline]), Partition.of_sizes([1, 1], [1.0, 1.0]), "threads", None, 1, recomputes
    )
    assert any("micro_batches=2" in advice.text for advice in advise(one)) != recomputes


def test_cuts_by_guess_are_told_as_such() -> None:
    slow = seen([3.0, 1.0, 1.0], [1, 1, 1])
    assert explain(slow).startswith("Stage 0 takes 80% longer")
    assert "Pass sample= to GPipe to measure" in explain(replace(slow, measured=False))
    assert not the_one(slow, "no split is better").is_free


def test_of_calls_the_gain_of_no_recompute_is_at_most_its_share() -> None:
    step_ = step([1.0, 1.0], [1, 1], "always")
    half = replace(step_, spans=tuple(span for span in step_.spans if span.action.kind is not Kind.FORWARD))
    calls = RecordedSteps(
        [half], breakdown([half]), Partition.of_sizes([1, 1], [1.0, 1.0]), "threads", recomputes=True
    )
    share = calls.breakdown.shares["recompute"]
    assert the_one(calls, "remat='never'").gain == pytest.approx(1 / (1 - share))
    assert not any("partitions=" in advice.text for advice in advise(calls))


@pytest.mark.parametrize(("driver", "named"), [("threads", False), ("process", True)])
def test_a_faster_link_is_advised_only_where_there_is_one(driver: str, named: bool) -> None:
    calm = step([1.0, 1.0], [1, 1])
    spans = []
    for span in calm.spans:
        waited = Span(
            span.rank, span.action._replace(kind=Kind.RECEIVE), 2 * span.start, 2 * span.start + span.seconds
        )
        spans += [waited, span._replace(start=waited.end, end=waited.end + span.seconds)]
    slow = [Timeline(2, tuple(spans), 2 * calm.seconds)]
    steps = RecordedSteps(slow, breakdown(slow), Partition.of_sizes([1, 1], [1.0, 1.0]), driver)
    assert steps.breakdown.shares["communication"] > 0.3
    assert any("faster link" in advice.text for advice in advise(steps)) == named
    assert any("threads of ranks start late" in advice.text for advice in advise(steps)) != named


def test_other_processes_are_named_first_where_they_took_cores_from_ranks() -> None:
    slow = seen([1.0] * 6, [4, 1, 1])
    fought = explain(replace(slow, others=OtherProcesses(cores=1.9, of=4)))
    assert fought.startswith("Other processes used 1.9 of this machine's 4 cores, so 3 ranks had to wait for cores")
    assert "without them. Stage 0 takes 100% longer" in fought
    beside = explain(replace(slow, others=OtherProcesses(cores=1.9, of=64)))
    assert beside == explain(slow) + " During the recording, other processes used 1.9 of this machine's 64 cores."
    assert explain(replace(slow, others=OtherProcesses(cores=0.1, of=2))) == explain(slow)


@pytest.mark.parametrize(
    ("busy", "used", "others", "told"),
    [
        (2.5, 1.0, OtherProcesses(0.0, 8), True),
        (2.5, 2.4, OtherProcesses(0.0, 8), False),  # they compute
        (2.5, 0.3, OtherProcesses(0.0, 8), False),  # they sleep, or wait for a device
        (2.5, 1.0, OtherProcesses(6.9, 8), False),  # they wait for cores
        (1.2, 1.0, OtherProcesses(0.0, 8), False),  # they wait for what is in the table
    ],
)
def test_the_lock_is_named_where_cores_idle_while_ranks_wait_inside_of_actions(
    busy: float, used: float, others: OtherProcesses, told: bool
) -> None:
    assert bool(shared_lock(4, busy, used, others)) == told


def of_two_stages_a_rank(layers: Sequence[float], cuts: Sequence[int]) -> RecordedSteps:
    """A step by ZB-V: the first and the last stage on rank 0."""
    forwards = [sum(layers[first:end]) for first, end in Partition.of_sizes(cuts, layers).bounds]
    program = place_transfers(join_backwards(program_of("zb_v", 2, M)))
    costs = [StageCost(forward=some, backward=2 * some) for some in forwards]
    timelines = [simulate(program, costs).timeline]
    return RecordedSteps(timelines, breakdown(timelines), Partition.of_sizes(cuts, layers), "threads")


def test_where_ranks_have_several_stages_advice_goes_by_rank() -> None:
    layers = [20.0, 20.0, 20.0, 20.0, 5.0, 5.0]
    balanced = of_two_stages_a_rank(layers, [2, 2, 1, 1])  # ranks of 45 and 45, stages of 40, 40, 5 and 5
    assert not any("longer than the mean" in advice.text for advice in advise(balanced))
    slow = of_two_stages_a_rank(layers, [1, 1, 1, 3])
    found = the_one(slow, "partitions=[2, 2, 1, 1] instead of [1, 1, 1, 3]")
    assert found.text.startswith("Rank 0 takes")
    assert found.gain == pytest.approx(slow.breakdown.seconds / balanced.breakdown.seconds)
