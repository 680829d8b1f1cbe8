"""Same bits over models that mix everything a layer may do."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpipe.distributed import processes
from gpipe.runtime.actions import WORK
from gpipe.runtime.context import Context
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.steps import CompiledAction
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label, Message, ReadyEvent
from gpipe.stages.tree import replace_tensors, tensors_in
from tests.support.mixed_tasks import Way, check, generate_task, generate_way, run_pipe
from tests.support.outcomes import differences
from tests.support.plain_loop import copied

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
draws = st.randoms(use_true_random=True)


@settings(LAW, max_examples=35)  # of up to four configurations
@given(draws)
def test_models_that_mix_everything_give_the_bits_of_k_1_and_of_the_plain_loop(draw: Random) -> None:
    task, found = check(draw)
    wrong = {way: names for way, names in found.items() if names}
    assert not wrong, f"{task.model.kinds}: {wrong}"


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
        cell = rank.saved[step.stage, step.micro_batch]
        came = [tensor for crossing in cell.given for tensor in tensors_in(crossing.value)] if step.stage else []
        came += [g for gradients in rank.taken for g in gradients if isinstance(g, Tensor)]  # type: ignore[union-attr]
        own_backward(run, rank, step)
        for tensor in came:
            with torch.no_grad():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    own_backward = WORK[Kind.BACKWARD]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Context", Copies)
        patch.setitem(WORK, Kind.BACKWARD, backward)
        yield


@settings(LAW, max_examples=25)
@given(draws)
def test_boundary_tensors_that_are_filled_with_nan_when_used_up_change_nothing(draw: Random) -> None:
    check_again(draw, poisoned_boundaries)
