"""Same bits: losses, gradients, parameters after steps and buffers are those of the plain loop, to the last bit."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe.distributed import processes
from gpipe.features.verification.feature import Verifier
from gpipe.runtime import compiled_table
from gpipe.runtime.actions import WORK
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.context import Context
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import Kind
from gpipe.schedule.rules import linearize
from gpipe.schedule.schedules import SCHEDULES
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label, Message, ReadyEvent
from gpipe.stages.tree import replace_tensors, tensors_in
from tests.support.mixed_tasks import (
    Task,
    Way,
    check,
    generate_task,
    generate_way,
    is_statistic,
    mean_of_valid,
    run_pipe,
    run_plain,
    whole,
)  # fmt: skip
from tests.support.outcomes import Outcome, differences
from tests.support.placements import PLACEMENTS, placed
from tests.support.plain_loop import REMATS, copied
from tests.support.same_bits_stories import STORIES, maker, plain
from tests.support.split_rows import SPLITS, split

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
draws = st.randoms(use_true_random=True)  # wide, where shrinking would make them narrow


@settings(LAW, max_examples=100)  # of up to four configurations
@given(draws)
def test_any_model_in_any_way_gives_the_bits_of_k_1_and_of_the_plain_loop(draw: Random) -> None:
    task, found = check(draw)
    wrong = {way: names for way, names in found.items() if names}
    assert not wrong, f"{task.model.kinds}: {wrong}"


def check_outcome(task: Task, found: Outcome) -> None:
    assert differences(found, run_pipe(task, whole(task.model))) == []
    assert differences(found, run_plain(task), leave_out=is_statistic(task)) == []


def cut(draw: Random, stages: int, least: int = 1) -> tuple[Task, Way]:
    """A model of at least so many micro-batches, in so many stages."""
    task = generate_task(draw)
    task = replace(task, micro_batches=max(task.micro_batches, least))
    assume(not task.model.norms or min(task.rows) >= 2 * task.micro_batches)  # BatchNorm refuses a single row
    way = generate_way(draw, task.model, stages)
    assume(way is not None)
    assert way is not None
    return task, way


@pytest.mark.parametrize("name", SCHEDULES)
@settings(LAW, max_examples=12)
@given(draws, st.integers(1, 3))
def test_any_schedule_gives_the_bits_of_the_plain_loop(name: str, draw: Random, ranks: int) -> None:
    task, way = cut(draw, ranks * SCHEDULES[name].stages_per_rank, 2 * ranks if name == "dualpipe_v" else 1)
    check_outcome(task, run_pipe(task, replace(way, schedule=name)))


@pytest.mark.parametrize("name", PLACEMENTS)
@settings(LAW, max_examples=20)
@given(draws, st.integers(1, 3), st.integers(2, 3))
def test_any_placement_gives_the_bits_of_the_plain_loop(name: str, draw: Random, ranks: int, each: int) -> None:
    task, way = cut(draw, ranks * each)
    with placed(name, each):
        found = run_pipe(task, way)
    check_outcome(task, found)


@pytest.mark.parametrize("name", SPLITS)
@settings(LAW, max_examples=20)
@given(draws, st.integers(1, 3), st.integers(1, 2))
def test_backwards_in_two_parts_give_the_bits_of_the_plain_loop(
    name: str, draw: Random, ranks: int, each: int
) -> None:
    task, way = cut(draw, ranks * each)
    with split(name, each):
        found = run_pipe(task, way)
    check_outcome(task, found)


@settings(LAW, max_examples=40)
@given(draws, st.integers(0, 10_000))
def test_threads_and_any_legal_order_give_the_same_bits(draw: Random, order: int) -> None:
    task, way = cut(draw, draw.randint(1, 4))
    threads = run_pipe(task, replace(way, driver="threads"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_table, "linearize", partial(linearize, rng=Random(order)))
        assert differences(run_pipe(task, replace(way, driver="lockstep")), threads) == []


# Scripts, for any driver.


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("name", STORIES)
def test_a_script_gives_the_same_bits_however_it_is_run(name: str, driver: str, remat: str) -> None:
    story = STORIES[name]
    expected = story.run(maker(1, driver="lockstep", remat="never"))
    for partitions in (2, 4):
        assert differences(story.run(maker(partitions, driver=driver, remat=remat)), expected) == []
    if story.plain:
        assert differences(story.run(plain), expected) == []


def network() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ]  # fmt: skip


def data(rows: int = 13) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    valid = torch.arange(rows) % 3 == 0
    return torch.randn(rows, 5, generator=generator), {"y": torch.randn(rows, generator=generator), "valid": valid}


def test_weights_are_asked_for_once_a_micro_batch_before_any_forward() -> None:
    asked: list[object] = []
    losses: list[Tensor] = []

    def weight(target: object) -> int:
        assert not losses
        asked.append(target)
        return 1

    def loss_fn(output: object, target: object) -> Tensor:
        losses.append(mean_of_valid(output, target))
        return losses[-1]

    gpipe.GPipe(network(), 3, 4, seed=2).step(*data(), loss_fn, reduction=weight)
    assert len(asked) == len(losses) == 4


# Nothing reads what was freed, was used up, or was never written.


def check_again(draw: Random, surroundings: Callable[[], Iterator[None]]) -> None:
    """A model in one way, as it is and in some surroundings: the same bits."""
    task = generate_task(draw)
    way = generate_way(draw, task.model, draw.randint(2, 4)) or Way((len(task.model.layers),), ("always",), "threads")
    expected = run_pipe(task, way)
    with contextmanager(surroundings)():
        outcome = run_pipe(task, way)
    assert not differences(outcome, expected), f"{task.model.kinds} in {way}"


def poisoned_memory() -> Iterator[None]:
    """Has the C library fill freed memory with NaN, and torch fill new tensors with NaN."""
    mallopt, perturb = ctypes.CDLL(None).mallopt, -6  # M_PERTURB of malloc.h
    if not mallopt(perturb, 0xFF):
        pytest.skip("this C library cannot fill freed memory")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        mallopt(perturb, 0)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@settings(LAW, max_examples=25)
@given(draws)
def test_memory_that_is_filled_with_nan_when_taken_and_when_freed_changes_nothing(draw: Random) -> None:
    check_again(draw, poisoned_memory)


def test_the_poison_itself_works() -> None:
    for _ in poisoned_memory():
        assert torch.empty(1000).isnan().all()
        tensor = torch.ones(1000)
        address = tensor.data_ptr()
        del tensor
        assert (ctypes.c_uint32 * 1000).from_address(address)[500] == 0xFFFFFFFF


class Copies(Context):
    """Hands over copies, so that what one rank does to a tensor, no other rank can see."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        super().send(rank, label, _copy_of(message), mark)


def _copy_of(message: Message) -> Message:
    if not isinstance(message, BoundaryValue):
        return [copied(found) if isinstance(found, Tensor) else found for found in message]
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        copies[id(tensor)] = copied(tensor.detach()).requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    value = replace_tensors(message.value, copy)
    return BoundaryValue(value, [copies[id(leaf)] for leaf in message.leaves])


def poisoned_boundaries() -> Iterator[None]:
    """Fills what came from another rank with NaN, values and gradients, as soon as the backward has used it."""

    def backward(run: Run, rank: Rank, step: CompiledAction) -> None:
        cell = rank.states[step.stage, step.micro_batch]
        came = [tensor for crossing in cell.inputs for tensor in tensors_in(crossing.value)] if step.stage else []
        came += [g for gradients in rank.inbox for g in gradients if isinstance(g, Tensor)]  # type: ignore[union-attr]
        own_backward(run, rank, step)
        for tensor in came:
            with torch.no_grad():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    own_backward = WORK[Kind.BACKWARD]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Context", Copies)
        patch.setitem(WORK, Kind.BACKWARD, backward)
        patch.setattr(Verifier, "is_new", lambda *_: False)  # a replay may see values that were sent on
        yield


@settings(LAW, max_examples=25)
@given(draws)
def test_boundary_tensors_that_are_filled_with_nan_when_used_up_change_nothing(draw: Random) -> None:
    check_again(draw, poisoned_boundaries)
