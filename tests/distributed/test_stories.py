"""Law 5 where it is easily forgotten: odd exceptions, several at once, other ways than a step, pipes being made."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.jobs import stories as jobs
from tests.support.jobs.stories import BIG, MICRO_BATCHES, ODD, WRONG, build, data
from tests.support.jobs.training import Json
from tests.support.plain_loop import plain_loop, squares
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers, told_by

PLACE = "micro-batch 1, rank {rank}, stage {rank}, layer {rank} ({rank}: Guarded)"


def check_went_on(found: list[Json]) -> None:
    """The step after the failure gives the plain loop's loss."""
    inputs, targets = data(0)
    loss = plain_loop(build(len(found)), inputs, targets, squares, micro_batches=MICRO_BATCHES, seed=0)
    assert [answer["loss"] for answer in found] == [loss.item()] * len(found)


@pytest.mark.parametrize("name", ODD)
def test_odd_exceptions_are_told_too(name: str, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.odd_exception, name, world=2))
    kind = type(ODD[name]()).__name__
    assert [answer["error"] for answer in found] == ["RemoteError", kind]
    assert kind in found[0]["told"]
    assert all(PLACE.format(rank=1) in answer["told"] for answer in found)
    check_went_on(found)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", WRONG)
def test_data_that_cannot_be_is_refused_on_every_rank(name: str, world: int, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.wrong_data, name, world=world))
    assert all(answer["error"] for answer in found), found
    check_went_on(found)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_goes_on_alone_learns_that_the_others_have_left(who: int) -> None:
    outcomes = run_ranks(2, jobs.a_step_more, who)
    assert outcomes[1 - who].answered
    assert outcomes[who].error == "RemoteError"
    assert f"rank {1 - who}" in outcomes[who].told


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_raise_at_once_each_raise_one_error(world: int, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.all_at_once, world=world))
    assert all(answer["error"] in {"FaultError", "RemoteError"} for answer in found)
    assert all("FaultError" in answer["error"] + answer["told"] for answer in found)
    check_went_on(found)


def test_ctrl_c_on_all_ranks_ends_the_step_on_all(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.ctrl_c, world=2))
    assert all("KeyboardInterrupt" in answer["error"] + answer["told"] for answer in found)
    check_went_on(found)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("way", ["validation", "inference", "forward", "backward"])
def test_it_is_the_same_for_every_way_to_run_a_pipe(way: str, who: int, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.ways, way, who, world=2))
    assert [answer["error"] for answer in found] == [
        "FaultError" if rank == who else "RemoteError" for rank in (0, 1)
    ]
    assert all(f"in the {'recompute' if way == 'backward' else 'forward'} of" in answer["told"] for answer in found)
    assert all(PLACE.format(rank=who) in answer["told"] for answer in found)
    check_went_on(found)


@pytest.mark.parametrize("length", [0, BIG])
@pytest.mark.parametrize("world", [2, 3])
def test_a_pipe_may_fail_again_and_again(world: int, length: int, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.again_and_again, length, world=world))
    layers, losses = build(world), []
    optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        inputs, targets = data(step, length)
        loss = plain_loop(layers, inputs, targets, squares, micro_batches=MICRO_BATCHES, seed=0, step=step)
        losses.append(loss.item())
        optimizer.step()
    assert found == [{"failed": 8, "losses": losses}] * world


def test_a_call_that_fails_in_one_process_before_it_is_counted_leaves_all_together(pool: WorkerPool) -> None:
    """Bug story: those who had counted it took the next for another call than the one who had not."""
    assert answers(pool.run(jobs.calls_otherwise, world=2)) == ["ValueError", "RemoteError"]


def test_another_threads_call_is_refused_in_that_thread_alone(pool: WorkerPool) -> None:
    """Bug story: "concurrent poll() invocation", and then the processes had come apart."""
    found = answers(pool.run(jobs.other_threads_call, world=2))
    for answer in found:
        assert len(answer["told"]) == 3
        assert all("RuntimeError: a call of this pipe is under way already" in text for text in answer["told"])
    check_went_on(found)


def test_another_pipe_of_the_same_processes_does_not_notice(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.two_pipes, world=2))
    assert found == [["FaultError", True], ["RemoteError", True]]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_while_a_pipe_is_made_is_missed(who: int) -> None:
    outcomes = run_ranks(2, jobs.builder_dies, who)
    assert outcomes[who].code == -9
    assert outcomes[1 - who].error, told_by(outcomes)


def test_a_rank_that_never_makes_a_pipe_is_missed() -> None:
    outcomes = run_ranks(2, jobs.not_there, 1)
    assert outcomes[0].error, told_by(outcomes)


@pytest.mark.parametrize("who", [0, 2])
def test_who_missed_a_pipe_that_the_others_waited_for_makes_the_next_with_them(who: int, pool: WorkerPool) -> None:
    """All counted their rendezvous for themselves, so that those two never met again.

    And the one that came late was told at once that it had said nothing for so many seconds.
    """
    found = answers(pool.run(jobs.comes_late, who, world=3))
    said = f"rank {who} said nothing for 0.1 s, the timeout of the process group"
    for rank, (failed, _) in enumerate(found):
        assert len(failed) == 2 * (rank != who)
        assert all(said in text for text in failed)
    (loss,) = {loss for _, losses in found for loss in losses}
    check_went_on([{"loss": loss}] * 3)


@pytest.mark.parametrize(
    ("job", "when"),
    [
        (jobs.interrupted_in_a_message, "before it came to build the pipe, or as it began"),
        (jobs.interrupted_while_linking, "while the processes linked up"),
    ],
)
def test_ctrl_c_while_a_pipe_is_made_is_told_as_that(job: Callable[[int, int], str], when: str) -> None:
    """The other rank was told of what gpipe never sends, or of a file that was not found."""
    first, second = answers(run_ranks(2, job))
    assert first == "KeyboardInterrupt()"
    assert second == f"RemoteError('rank 0 failed {when}: KeyboardInterrupt')"


@pytest.mark.parametrize("who", [0, 1])
def test_who_closes_its_pipe_too_early_is_named_as_that(who: int, pool: WorkerPool) -> None:
    """The others were told that it was gone, which stood beside them."""
    found = answers(pool.run(jobs.closes_early, who, world=3))
    for rank, (failed, _) in enumerate(found):
        assert failed == [f"rank {who} closed its pipe, after 1 run"] * 2 * (rank != who)
    check_went_on([{"loss": loss} for _, loss in found])


def test_who_died_in_a_step_is_said_to_have_died_there_in_all_that_follow() -> None:
    """The second call said that it had ended outside of any step."""
    first, *others = answers(run_ranks(3, jobs.dies_in_a_step, 1)[::2])[0]
    assert "rank 1 is gone; it was last seen in the forward of micro-batch 1" in first
    assert others == [first] * 2


def test_who_loses_a_rank_in_a_save_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    first, _ = run_ranks(2, jobs.dies_in_save, str(tmp_path))
    assert first.error == "RemoteError"
    assert "rank 1 is gone" in first.told
    assert not list(tmp_path.glob("step_*"))
