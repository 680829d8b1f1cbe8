"""Law 5 where it is easily forgotten: odd exceptions, several at once, other ways than a step, pipes being made."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe.distributed import linking, rendezvous
from gpipe.distributed.failures import map_status
from tests.support.endpoints import LIMIT
from tests.support.jobs.training import Json
from tests.support.plain_loop import plain_loop, squares, weights_of
from tests.support.processes.faults import FaultError
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.marks import FOLDER, mark
from tests.support.processes.outcome import answers, told_by
from tests.support.said import raised_by, said

FEATURES, MICRO_BATCHES, ROWS = 4, 3, 7
BIG = 5000
"""A length at which messages go through shared memory."""

Deed: TypeAlias = Callable[[], None]


class Guarded(nn.Linear):
    """A layer that does something before its n-th forward from now."""

    countdown = -1
    deed: Deed

    def arm(self, countdown: int, deed: Deed) -> None:
        self.countdown, self.deed = countdown, deed

    def forward(self, x: Tensor) -> Tensor:
        self.countdown -= 1
        if self.countdown == -1:
            mark()
            self.deed()
        return super().forward(x)


def build(world: int) -> list[nn.Module]:
    with weights_of(5):
        return [Guarded(FEATURES, FEATURES) for _ in range(world)]


def data(step: int, length: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = torch.randn(2, ROWS, *([length] if length else []), FEATURES, generator=generator)
    return made[0], made[1]


def pipe_of(world: int) -> gpipe.GPipe:
    return gpipe.GPipe(build(world), [1] * world, MICRO_BATCHES, seed=0, driver="process")


def own(pipe: gpipe.GPipe, rank: int) -> Guarded:
    layer = dict(pipe.named_children())[str(rank)]
    assert isinstance(layer, Guarded)
    return layer


def throw(error: BaseException) -> Deed:
    def deed() -> None:
        raise error

    return deed


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def noted() -> BaseException:
    """An exception with notes of its own, one of them no text."""
    error = FaultError(code=3)
    error.__notes__ = ["mine", 4]  # type: ignore[list-item]
    return error


ODD: dict[str, Callable[[], BaseException]] = {
    "a text of 5 MB": lambda: ValueError("x" * 5_000_000),
    "no text": MuteError,
    "a text that is not Unicode": lambda: ValueError("\udcff"),
    "its own notes": noted,
    "a group": lambda: ExceptionGroup("some", [ValueError("one"), KeyError("two")]),
    "StopIteration": lambda: StopIteration(4),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "a RemoteError of the user": lambda: gpipe.RemoteError("from elsewhere", 0),
}


def go_on(pipe: gpipe.GPipe, act: Callable[[], object]) -> Json:
    """What this rank raises in an act, and what the next step gives."""
    failed = raised_by(act)
    for layer in pipe.children():
        if isinstance(layer, Guarded):
            layer.countdown = -1  # a rank may have failed before it came to its deed
    pipe.zero_grad()
    pipe.step_number = 0
    loss = pipe.step(*data(0), squares).item()
    if failed is None:
        return {"error": "", "told": "", "loss": loss}
    try:
        text = str(failed)
    except ValueError:
        text = ""
    told = "\n".join([text[:200] + text[200:][-2000:], *map(str, getattr(failed, "__notes__", []))])
    return {"error": type(failed).__name__, "told": told, "loss": loss}


def odd_exception(rank: int, world: int, name: str) -> Json:
    pipe = pipe_of(world)
    if rank == world - 1:
        own(pipe, rank).arm(1, throw(ODD[name]()))
    return go_on(pipe, lambda: pipe.step(*data(0), squares))


WRONG: dict[str, tuple[Tensor, Tensor]] = {
    "no rows": (torch.ones(0, FEATURES), torch.ones(0, FEATURES)),
    "inputs of another dtype": (torch.ones(ROWS, FEATURES).double(), torch.ones(ROWS, FEATURES)),
    "whole numbers": (torch.ones(ROWS, FEATURES).long(), torch.ones(ROWS, FEATURES)),
    "targets of fewer rows": (torch.ones(ROWS, FEATURES), torch.ones(ROWS - 2, FEATURES)),
    "targets of more rows": (torch.ones(ROWS, FEATURES), torch.ones(ROWS + 2, FEATURES)),
}
"""Mini-batches that cannot be."""


def wrong_data(rank: int, world: int, name: str) -> Json:
    pipe = pipe_of(world)
    pipe.step(*data(1), squares)
    return go_on(pipe, lambda: pipe.step(*WRONG[name], squares))


def a_step_more(rank: int, world: int, who: int) -> None:
    pipe = pipe_of(world)
    for step in range(2 if rank == who else 1):
        pipe.step(*data(step), squares)


def all_at_once(rank: int, world: int) -> Json:
    pipe = pipe_of(world)
    own(pipe, rank).arm(1 if rank else 2, throw(FaultError(code=rank)))
    return go_on(pipe, lambda: pipe.step(*data(0), squares))


def ctrl_c(rank: int, world: int) -> Json:
    """Ctrl-C in a terminal reaches all ranks, while all of them are in a layer."""
    pipe = pipe_of(world)

    def press() -> None:
        while len(list(Path(os.environ[FOLDER]).glob("rank_*.mark"))) < world:
            time.sleep(0.001)
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        time.sleep(3600)

    own(pipe, rank).arm(world - 1 - rank, press)  # each as far ahead of the next as it can be
    return go_on(pipe, lambda: pipe.step(*data(0), squares))


def ways(rank: int, world: int, way: str, who: int) -> Json:
    """A layer raises in a forward or a backward that is not a step's."""
    pipe, (inputs, targets) = pipe_of(world), data(0)
    if rank == who:  # in the forward, or in the recompute
        own(pipe, rank).arm(MICRO_BATCHES + 1 if way == "backward" else 1, throw(FaultError(code=1)))

    def act() -> None:
        with torch.set_grad_enabled(way not in ("validation", "inference")):
            if way == "validation":
                pipe.step(inputs, targets, squares)
                return
            loss = squares(pipe(inputs, gather=True), targets)
        if loss.requires_grad:
            loss.backward()

    return go_on(pipe, act)


def again_and_again(rank: int, world: int, length: int) -> Json:
    """Every step fails once, each time elsewhere, and is done again."""
    pipe = pipe_of(world)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, failed = [], 0
    for step in range(8):
        if step % world == rank:
            own(pipe, rank).arm(step % (2 * MICRO_BATCHES), throw(FaultError(code=step)))
        for _ in range(2):
            pipe.step_number = step
            optimizer.zero_grad()
            try:
                loss = pipe.step(*data(step, length), squares)
                break
            except (FaultError, gpipe.RemoteError):
                failed += 1
        losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "failed": failed}


def calls_within(rank: int, world: int, place: str) -> list[Json]:
    """Calls a pipe within a step of it; what the step raises or returns, and what the next step returns."""
    pipe, (inputs, targets) = pipe_of(world), data(0)
    ways: dict[str, Callable[[], object]] = {
        "exchange": lambda: pipe.exchange(b"n"),
        "step": lambda: pipe.step(inputs, targets, squares),
        "call": lambda: pipe(inputs, gather=True),
        "clip": lambda: pipe.clip_grad_norm_(1.0),
    }

    def within(way: Callable[[], object]) -> object:
        if place == "reduction":
            return pipe.step(inputs, targets, squares, reduction=lambda target: (way(), 1.0)[1])
        if place == "loss":
            return pipe.step(inputs, targets, lambda *given: (way(), squares(*given))[1])
        own(pipe, rank).arm(1, (lambda: (way(), None)[1]) if rank == world - 1 else lambda: None)
        return pipe.step(inputs, targets, squares)

    return [go_on(pipe, partial(within, way)) for way in ways.values()]


def other_threads_call(rank: int, world: int) -> Json:
    """Other threads call a pipe while a layer of it runs; what each is told, and what the step gives."""
    pipe, told, (inputs, targets) = pipe_of(world), list[str](), data(0)
    ways: list[Callable[[], object]] = [
        lambda: pipe.step(inputs, targets, squares),
        lambda: pipe(inputs, gather=True),
        lambda: pipe.clip_grad_norm_(1.0),
    ]

    def call() -> None:
        for way in ways:
            thread = threading.Thread(target=lambda way: told.append(said(way)), args=[way])
            thread.start()
            thread.join()

    own(pipe, rank).arm(1, call)
    return {"told": told, "loss": pipe.step(inputs, targets, squares).item()}


def two_pipes(rank: int, world: int) -> Json:
    one, other = pipe_of(world), pipe_of(world)
    before = other.step(*data(0), squares).item()
    if rank == 0:
        own(one, rank).arm(1, throw(FaultError(code=1)))
    failed = raised_by(lambda: one.step(*data(0), squares))
    other.step_number = 0
    return [type(failed).__name__, other.step(*data(0), squares).item() == before]


def calls_otherwise(rank: int, world: int) -> Json:
    """One process calls as the others do not, which fails; then all call alike."""
    pipe = pipe_of(world)
    time.sleep(0.2 * (rank == 0))  # while the other begins
    failed = raised_by(lambda: pipe(data(0)[0], gather=rank > 0))
    pipe(data(0)[0], gather=True).sum().backward()
    return type(failed).__name__


def builder_dies(rank: int, world: int, who: int) -> None:
    def make() -> nn.Module:
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Linear(FEATURES, FEATURES)

    gpipe.GPipe([make] * world, [1] * world, MICRO_BATCHES, seed=0, driver="process")


def counts_messages(rank: int, world: int) -> Json:
    """The number of messages that each process sends to each other process while a pipe is made."""
    channel = rendezvous.WorldChannel
    with mock.patch.object(channel, "send", autospec=True, side_effect=channel.send) as send:
        pipe_of(world)
    return send.call_count


def not_there(rank: int, world: int, who: int) -> Json:
    return None if rank == who else [pipe_of(world).partitions]


def comes_late(rank: int, world: int, who: int) -> Json:
    """All but one wait for it in vain, twice; then all make a pipe together."""
    failed = []
    for _ in range(2):
        if rank != who:
            with mock.patch("gpipe.distributed.rendezvous.timeout_of_world", return_value=0.1):
                failed.append(str(raised_by(lambda: pipe_of(world))))
        dist.barrier()
    return [failed, [pipe_of(world).step(*data(0), squares).item() for _ in range(2)]]


def closes_early(rank: int, world: int, who: int) -> Json:
    """One closes its pipe while the others go on; then all close it, and use it again."""
    pipe = pipe_of(world)
    pipe.step(*data(1), squares)
    if rank == who:
        pipe.close()
    failed = [str(raised_by(lambda: pipe.step(*data(0), squares))) for _ in range(2) if rank != who]
    dist.barrier()
    pipe.close()
    pipe.step_number = 0
    pipe.zero_grad()
    return [failed, pipe.step(*data(0), squares).item()]


def script_fails(rank: int, world: int, who: int, when: str) -> Json:
    """The script of one fails, and its process lives on, as under Monarch. Each says what it raised."""

    def run() -> None:
        with pipe_of(world) as pipe:
            pipe.step(*data(1), squares)
            if rank == who and when == "between steps":
                raise ValueError("a bad batch")
            if rank == who and when == "ends":
                sys.exit(143)
            if rank == who and when == "in a loss":
                pipe.step(*data(0), fails)
            pipe.step(*data(0), squares)

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("a bad batch")

    try:
        run()
    except (Exception, SystemExit) as error:
        return [type(error).__name__, str(error)]
    return []


def is_dropped(rank: int, world: int, who: int) -> Json:
    """One drops its pipe, and its process lives on."""
    pipe = pipe_of(world)
    pipe.step(*data(1), squares)
    if rank == who:
        del pipe
        gc.collect()
        return None
    return str(raised_by(lambda: pipe.step(*data(0), squares)))


class Interrupted:
    """A process group in which Ctrl-C comes amid the first message: its length is sent, and the rest is not."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.recv, self.interrupts = group, group.recv, True

    def send(self, *given: Any) -> object:
        sent = self.group.send(*given)
        if self.interrupts:
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
            while sum(thread.name == "gpipe sends" for thread in threading.enumerate()) < 2:  # the report of that
                time.sleep(0.001)
        return sent


def interrupted_in_a_message(rank: int, world: int) -> str:
    if rank:
        return repr(raised_by(lambda: pipe_of(world)))
    with mock.patch.object(rendezvous, "gloo_group", return_value=Interrupted(rendezvous.gloo_group())):
        return repr(raised_by(lambda: pipe_of(world)))


def interrupted_while_linking(rank: int, world: int) -> str:
    """Ctrl-C comes to rank 0 while it looks at the others, which look for it once it has taken its folder away."""

    def look(folder: str) -> object:
        if not rank:
            raise KeyboardInterrupt
        while Path(folder).exists():
            time.sleep(0.001)
        return map_status(folder)

    with mock.patch.object(linking, "map_status", look), mock.patch.object(linking, "REPORT_SECONDS", LIMIT):
        return repr(raised_by(lambda: pipe_of(world)))


def dies_in_a_step(rank: int, world: int, who: int) -> Json:
    pipe = pipe_of(world)
    if rank == who:
        own(pipe, rank).arm(1, partial(os.kill, os.getpid(), signal.SIGKILL))
    return [str(raised_by(lambda: pipe.step(*data(0), squares))) for _ in range(3)]


def dies_in_save(rank: int, world: int, folder: str) -> None:
    pipe = gpipe.GPipe([nn.Linear(2, 2), nn.Linear(2, 2)], world, 2, driver="process")
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gpipe.save(folder, pipe)


PLACE = "micro-batch 1, rank {rank}, stage {rank}, layer {rank} ({rank}: Guarded)"


def check_went_on(found: list[Json]) -> None:
    """The step after the failure gives the plain loop's loss."""
    inputs, targets = data(0)
    loss = plain_loop(build(len(found)), inputs, targets, squares, micro_batches=MICRO_BATCHES, seed=0)
    assert [answer["loss"] for answer in found] == [loss.item()] * len(found)


@pytest.mark.parametrize("name", ODD)
def test_odd_exceptions_are_told_too(name: str, pool: WorkerPool) -> None:
    found = answers(pool.run(odd_exception, name, world=2))
    kind = type(ODD[name]()).__name__
    assert [answer["error"] for answer in found] == ["RemoteError", kind]
    assert kind in found[0]["told"]
    assert all(PLACE.format(rank=1) in answer["told"] for answer in found)
    check_went_on(found)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", WRONG)
def test_data_that_cannot_be_is_refused_on_every_rank(name: str, world: int, pool: WorkerPool) -> None:
    found = answers(pool.run(wrong_data, name, world=world))
    assert all(answer["error"] for answer in found), found
    check_went_on(found)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_goes_on_alone_learns_that_the_others_have_left(who: int) -> None:
    outcomes = run_ranks(2, a_step_more, who)
    assert outcomes[1 - who].answered
    assert outcomes[who].error == "RemoteError"
    assert f"rank {1 - who}" in outcomes[who].told


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_raise_at_once_each_raise_one_error(world: int, pool: WorkerPool) -> None:
    found = answers(pool.run(all_at_once, world=world))
    assert all(answer["error"] in {"FaultError", "RemoteError"} for answer in found)
    assert all("FaultError" in answer["error"] + answer["told"] for answer in found)
    check_went_on(found)


def test_ctrl_c_on_all_ranks_ends_the_step_on_all(pool: WorkerPool) -> None:
    found = answers(pool.run(ctrl_c, world=2))
    assert all("KeyboardInterrupt" in answer["error"] + answer["told"] for answer in found)
    check_went_on(found)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("way", ["validation", "inference", "forward", "backward"])
def test_it_is_the_same_for_every_way_to_run_a_pipe(way: str, who: int, pool: WorkerPool) -> None:
    found = answers(pool.run(ways, way, who, world=2))
    assert [answer["error"] for answer in found] == [
        "FaultError" if rank == who else "RemoteError" for rank in (0, 1)
    ]
    assert all(f"in the {'recompute' if way == 'backward' else 'forward'} of" in answer["told"] for answer in found)
    assert all(PLACE.format(rank=who) in answer["told"] for answer in found)
    check_went_on(found)


@pytest.mark.parametrize("length", [0, BIG])
@pytest.mark.parametrize("world", [2, 3])
def test_a_pipe_may_fail_again_and_again(world: int, length: int, pool: WorkerPool) -> None:
    found = answers(pool.run(again_and_again, length, world=world))
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
    assert answers(pool.run(calls_otherwise, world=2)) == ["ValueError", "RemoteError"]


def test_another_threads_call_is_refused_in_that_thread_alone(pool: WorkerPool) -> None:
    """Bug story: "concurrent poll() invocation", and then the processes had come apart."""
    found = answers(pool.run(other_threads_call, world=2))
    for answer in found:
        assert len(answer["told"]) == 3
        assert all("[concurrent-calls]" in text for text in answer["told"])
    check_went_on(found)


@pytest.mark.parametrize("place", ["reduction", "loss", "a layer"])
def test_a_call_within_a_step_is_rejected_at_once(place: str, pool: WorkerPool) -> None:
    """Bug story: in a function for reduction=, the processes waited for each other until the group's timeout."""
    first, last = answers(pool.run(calls_within, place, world=2))
    for remote, found in zip(first, last, strict=True):
        assert (remote["error"], found["error"]) == ("RemoteError", "RuntimeError")
        assert "[concurrent-calls]" in found["told"]
        check_went_on([remote, found])


def test_another_pipe_of_the_same_processes_does_not_notice(pool: WorkerPool) -> None:
    found = answers(pool.run(two_pipes, world=2))
    assert found == [["FaultError", True], ["RemoteError", True]]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_while_a_pipe_is_made_is_missed(who: int) -> None:
    outcomes = run_ranks(2, builder_dies, who)
    assert outcomes[who].code == -9
    assert outcomes[1 - who].error, told_by(outcomes)


@pytest.mark.parametrize("world", [2, 4])
def test_a_pipe_is_made_with_few_messages(world: int, pool: WorkerPool) -> None:
    assert answers(pool.run(counts_messages, world=world)) == [6] * world


def test_a_rank_that_never_makes_a_pipe_is_missed() -> None:
    outcomes = run_ranks(2, not_there, 1)
    assert outcomes[0].error, told_by(outcomes)


@pytest.mark.parametrize("who", [0, 2])
def test_who_missed_a_pipe_that_the_others_waited_for_makes_the_next_with_them(who: int, pool: WorkerPool) -> None:
    """All counted their rendezvous for themselves, so that those two never met again.

    And the one that came late was told at once that it had said nothing for so many seconds.
    """
    found = answers(pool.run(comes_late, who, world=3))
    said = f"rank {who}: no message for 0.1 s, the timeout of the process group"
    for rank, (failed, _) in enumerate(found):
        assert len(failed) == 2 * (rank != who)
        assert all(said in text for text in failed)
    (loss,) = {loss for _, losses in found for loss in losses}
    check_went_on([{"loss": loss}] * 3)


@pytest.mark.parametrize(
    ("job", "when"),
    [
        (interrupted_in_a_message, "before it called GPipe(...), or at the beginning of that call"),
        (interrupted_while_linking, "while the processes connected"),
    ],
)
def test_ctrl_c_while_a_pipe_is_made_is_told_as_that(job: Callable[[int, int], str], when: str) -> None:
    """The other rank was told of what gpipe never sends, or of a file that was not found."""
    first, second = answers(run_ranks(2, job))
    assert first == "KeyboardInterrupt()"
    assert second == f"RemoteError('rank 0 failed {when}: KeyboardInterrupt')"


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    ("when", "own", "others"),
    [
        ("between steps", ["ValueError", "a bad batch"], "rank {} failed outside any step, after 1 run: ValueError"),
        ("in a loss", ["ValueError", "a bad batch"], "rank {} failed: ValueError: a bad batch"),
        (
            "ends",
            ["SystemExit", "143"],
            "rank {} closed its pipe, after 1 run (steps, calls, saves, checks). Its script raised SystemExit: 143",
        ),
    ],
)
def test_who_ends_a_block_with_an_error_tells_the_others(
    when: str, own: list[str], others: str, who: int, pool: WorkerPool
) -> None:
    """They waited for as long as the process lived, or the timeout of the process group."""
    who = 2 if when == "in a loss" else who  # which only the last stage calls
    found = answers(pool.run(script_fails, who, when, world=3))
    assert found[who] == own
    for rank, (kind, text) in enumerate(found):
        if rank != who:
            assert kind == "RemoteError"
            assert text.startswith(others.format(who))


@pytest.mark.parametrize("who", [0, 2])
def test_who_drops_its_pipe_is_named_as_that(who: int, pool: WorkerPool) -> None:
    found = answers(pool.run(is_dropped, who, world=3))
    said = (
        f"rank {who} dropped its pipe without closing it, after 1 run (steps, calls, saves, checks). "
        "Use `with gpipe.GPipe(...) as pipe:`."
    )
    assert found == [None if rank == who else said for rank in range(3)]


@pytest.mark.parametrize("who", [0, 1])
def test_who_closes_its_pipe_too_early_is_named_as_that(who: int, pool: WorkerPool) -> None:
    """The others were told that it was gone, which stood beside them."""
    found = answers(pool.run(closes_early, who, world=3))
    for rank, (failed, _) in enumerate(found):
        assert failed == [f"rank {who} closed its pipe, after 1 run (steps, calls, saves, checks)."] * 2 * (
            rank != who
        )
    check_went_on([{"loss": loss} for _, loss in found])


def test_who_died_in_a_step_is_said_to_have_died_there_in_all_that_follow() -> None:
    """The second call said that it had ended outside of any step."""
    first, *others = answers(run_ranks(3, dies_in_a_step, 1)[::2])[0]
    assert "rank 1 is gone: it was last seen in the forward of micro-batch 1" in first
    assert others == [first] * 2


def test_who_loses_a_rank_in_a_save_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    first, _ = run_ranks(2, dies_in_save, str(tmp_path))
    assert first.error == "RemoteError"
    assert "rank 1 is gone" in first.told
    assert not list(tmp_path.glob("step_*"))
