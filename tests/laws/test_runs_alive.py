"""Several runs of a pipe may be alive at once: each has the bits of the plain loop, whatever runs in between."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plain_loop import REMATS, same_bits
from tests.support.processes.digests import digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.runs_alive import (
    ACTS,
    TARGET,
    Story,
    behind_layers,
    data,
    embedding,
    gradient_of,
    other_inputs,
    pipes,
    plain,
    state_of,
    tell,
    tell_here,
    tell_replicas,
)

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


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_so_over_processes_and_replicas(replicas: int, remat: str, pool: WorkerPool) -> None:
    told = stories(replicas, 6 // replicas)
    found = answers(pool.run(tell_here, told, replicas, remat, world=2 * replicas))
    for at, story in enumerate(told):
        for replica, (came, state) in enumerate(tell_replicas(story, replicas)):
            right = digests(state)
            for numbers, left in (rank[at] for rank in found[2 * replica : 2 * replica + 2]):
                assert numbers == [tensor.double().flatten().tolist() for tensor in came], story
                assert [name for name, digest in left.items() if right[name] != digest] == [], story


def test_a_plain_layer_before_a_pipe_learns_in_every_process(pool: WorkerPool) -> None:
    (side, _), before = plain(), embedding()
    (side.call(before(data(0))) - TARGET).square().mean().backward()
    expected = [number for parameter in before.parameters() for number in gradient_of(parameter)]
    assert answers(pool.run(behind_layers, world=2)) == [expected] * 2


def test_inputs_whose_graphs_differ_are_refused_in_every_process(pool: WorkerPool) -> None:
    first, last = answers(pool.run(other_inputs, world=2))
    assert first == last
