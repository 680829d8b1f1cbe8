"""Several runs of a pipe may be alive at once: each has the bits of the plain loop, whatever runs in between."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.jobs import runs_alive as jobs
from tests.support.plain_loop import REMATS, same_bits
from tests.support.processes.digests import Digests, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.runs_alive import ACTS, TARGET, Story, data, embedding, gradient_of, pipes, plain, state_of, tell

BETWEEN: Story = [("call", 0), ("call", 1), ("evaluate", 0), ("score", 1), ("backward", 0), ("backward", 0)]
GAN: Story = [("chain", 0), ("call", 1), ("backward", 0), ("chain", 0), ("backward", 1), ("backward", 0)]
PLACES = st.tuples(st.sampled_from(ACTS), st.integers(0, 3))


def check(story: Story, **how: Any) -> None:
    sides, references = pipes(2, **how), plain()
    found, expected = tell(story, sides), tell(story, references)
    wrong = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if not same_bits(one, other)]
    assert not wrong, f"outputs and losses {wrong} are not those of the plain loop"
    left, right = state_of(sides), state_of(references)
    assert [name for name in right if not same_bits(left[name], right[name])] == []


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_a_validation_between_a_call_and_its_backward(driver: str, remat: str) -> None:
    check(BETWEEN, driver=driver, remat=remat)


@settings(max_examples=40)
@given(
    st.lists(PLACES, min_size=3, max_size=10),
    st.sampled_from(["lockstep", "threads"]),
    st.lists(st.sampled_from(REMATS), min_size=2, max_size=2),
    st.sampled_from(["gpipe", "1f1b", "zb_h1"]),
)
def test_calls_backwards_steps_and_evaluations_in_any_order(
    story: Story, driver: str, remat: list[str], schedule: str
) -> None:
    check(story, driver=driver, remat=remat, schedule=schedule)


def stories(seed: int, many: int) -> list[Story]:
    draw = Random(seed)
    return [BETWEEN, GAN, *([(draw.choice(ACTS), draw.randrange(4)) for _ in range(8)] for _ in range(many))]


def wrong(found: Sequence[Any], expected: Sequence[tuple[list[torch.Tensor], Digests]]) -> list[str]:
    """What of the stories is not as expected, on any rank."""
    return [
        f"story {at}: {name}"
        for rank in found
        for at, ((_, left), (_, right)) in enumerate(zip(rank, expected, strict=True))
        for name, digest in left.items()
        if right[name] != digest
    ]


@pytest.mark.parametrize("remat", ["always", "never"])
def test_so_over_processes(remat: str, pool: WorkerPool) -> None:
    told = stories(1, 6)
    expected = []
    for story in told:
        references = plain()
        expected.append((tell(story, references), digests(state_of(references))))
    found = answers(pool.run(jobs.told, told, 1, remat, world=2))
    assert not wrong(found, expected)
    for rank in found:
        for (came, _), (right, _) in zip(rank, expected, strict=True):
            assert came == [tensor.double().flatten().tolist() for tensor in right]


def test_so_with_replicas(pool: WorkerPool) -> None:
    told = stories(2, 2)
    ways = [answers(pool.run(jobs.told, told, 2, remat, world=4)) for remat in ("always", "never")]
    assert ways[0] == ways[1]


def test_a_plain_layer_before_a_pipe_learns_in_every_process(pool: WorkerPool) -> None:
    (side, _), before = plain(), embedding()
    (side.call(before(data(0))) - TARGET).square().mean().backward()
    expected = [number for parameter in before.parameters() for number in gradient_of(parameter)]
    assert answers(pool.run(jobs.behind_layers, world=2)) == [expected] * 2


def test_inputs_whose_graphs_differ_are_refused_in_every_process(pool: WorkerPool) -> None:
    first, last = answers(pool.run(jobs.other_inputs, world=2))
    assert first == last
