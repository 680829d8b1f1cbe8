"""Several processes save one checkpoint: all of them, or none."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.checkpoint import writing as saving
from gpipe.checkpoint.gather import Part
from gpipe.errors import RemoteError
from tests.support.checkpointed import differences, make, remembered, trained
from tests.support.thread_ranks import RankPipe, all_well, optimizer_of, rank_pipes, run_ranks, save_in_ranks

# Several processes.


def test_all_ranks_must_be_given_the_same(tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])
    pipes[2].step_number = 7
    raised = run_ranks(lambda own: gpipe.save(tmp_path, own, background=own._processes.rank == 1), pipes)
    for error in raised:
        assert isinstance(error, ValueError)
        assert str(error) == (
            "Ranks have different values: step_number is 2 on rank 0 and 7 on rank 2; background is False on rank 0 "
            "and True on rank 1. Pass the same values on all ranks. [different-on-ranks]"
        )
    assert list(tmp_path.iterdir()) == []


def test_ranks_load_a_shared_checkpoint_from_one_folder(tmp_path: Path) -> None:
    whole = trained()[0]
    gpipe.save(tmp_path / "0", whole)
    for error in run_ranks(
        lambda own: gpipe.load(tmp_path / str(min(own._processes.rank, 1)), own), rank_pipes(whole)
    ):
        assert isinstance(error, ValueError)
        assert f"folder is '{tmp_path}/0' on rank 0 and '{tmp_path}/1' on rank 1" in str(error)


def test_an_optimizer_is_saved_of_all_ranks_or_none(tmp_path: Path) -> None:
    whole, optimizer = trained()

    def save(own: RankPipe, other: type[torch.optim.Optimizer] | None) -> None:
        mine = optimizer_of(whole, optimizer, own)
        if own._processes.rank == 1:
            mine = other(own.parameters()) if other else None  # type: ignore[call-arg]  # not the base class
        gpipe.save(tmp_path, own, mine)  # type: ignore[arg-type]

    for other in (None, torch.optim.SGD):
        text = f"optimizer is AdamW on rank 0 and {other.__name__ if other else None} on rank 1"
        for error in run_ranks(partial(save, other=other), rank_pipes(whole)):
            assert isinstance(error, ValueError)
            assert text in str(error)
    assert list(tmp_path.iterdir()) == []


def test_replicas_that_have_drifted_apart_are_told_of_when_they_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipes = rank_pipes(trained()[0], replicas=2)
    save = partial(gpipe.save, tmp_path)
    all_well(run_ranks(save, pipes))
    assert "not those of the first replica" not in caplog.text
    caplog.clear()
    with torch.no_grad():
        next(pipes[4].parameters()).add_(1)  # the second replica's second stage skipped a step, say
    all_well(run_ranks(save, pipes))
    assert "The weights of ranks [4] differ from the first replica" in caplog.text


def test_who_cannot_write_in_the_background_raises_its_own_error_though_others_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = saving.write_part

    def write_part(writing: saving.Writing) -> None:
        if writing.rank == 1:
            raise PermissionError("may not write")
        original(writing)

    def silent(told: bytes) -> list[bytes]:
        raise TimeoutError("nothing came for 20 s")

    def save(own: RankPipe) -> Any:
        under_way = gpipe.save(tmp_path, own, background=True)  # type: ignore[arg-type]
        own._processes.all_gather = silent  # type: ignore[method-assign]
        return under_way.wait()

    monkeypatch.setattr("gpipe.checkpoint.save.write_part", write_part)
    first, second, third = run_ranks(save, rank_pipes(trained()[0]))
    assert "rank 1 failed: PermissionError: may not write" in str(first)
    assert isinstance(second, PermissionError)
    assert isinstance(third, TimeoutError)


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])
    pipes[1].register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    raised = run_ranks(lambda own: gpipe.save(tmp_path, own, background=True), pipes)
    assert isinstance(raised[1], ValueError)
    for rank in (0, 2):
        assert isinstance(raised[rank], RemoteError)
        assert "rank 1 failed: ValueError: Nothing was saved:\n- wide is of torch.complex128" in str(raised[rank])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_which_nothing_comes_is_given_up_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, all_but_1 = saving.write_part, threading.Barrier(2)

    def write_part(writing: saving.Writing) -> None:
        if writing.rank != 1:
            original(writing)
            all_but_1.wait()

    monkeypatch.setattr("gpipe.checkpoint.save.write_part", write_part)
    pipes = rank_pipes(trained()[0])
    raised = run_ranks(lambda own: gpipe.save(tmp_path, own, background=True, limit=0.3).wait(), pipes)
    assert isinstance(raised[0], TimeoutError)
    assert str(raised[0]).startswith("ranks [1] wrote nothing to ")
    assert "for 0.3 seconds. Check that these processes are alive, and that all hosts share" in str(raised[0])
    assert all(isinstance(error, RemoteError) for error in raised[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as something comes: rank 0 looks every 0.7 seconds, and would give up after 0.8 without a byte more."""
    notes, now = [tmp_path / f"part_{rank}.json" for rank in range(2)], 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 0.7
        with (tmp_path / "growing").open("a") as file:
            file.write("x")
        if now > 10 * 0.8:
            notes[1].touch()

    notes[0].touch()
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    saving._await_parts(saving.Writing(0, 2, tmp_path, Part(), {}, None, None, 0.8, tuple))
    assert now > 10 * 0.8


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_dies_leaves_no_checkpoint(background: bool, tmp_path: Path) -> None:
    pipes = rank_pipes(trained()[0])

    def save(own: RankPipe) -> Any:
        if own._processes.rank == 2:
            exchange, times = own._processes.all_gather, iter([1])

            def die(told: bytes) -> list[bytes]:
                if next(times, 0):
                    return exchange(told)
                own._processes.meeting.leave()
                raise SystemExit

            own._processes.all_gather = die  # type: ignore[method-assign]
        return gpipe.save(tmp_path, own, background=background).wait()  # type: ignore[arg-type]

    raised = run_ranks(save, pipes)
    assert [type(error) for error in raised] == [RemoteError, RemoteError, SystemExit]
    if not background:  # else rank 2 had written its part, and the others may have made it whole before it died
        assert gpipe.find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("act", "agreed", "doing"),
    [
        (gpipe.save, 0, "collected values to save to {}"),
        (gpipe.save, 1, "wrote their parts to {}"),
        (gpipe.save, 2, "waited for the checkpoint in {}"),
        (gpipe.load, 0, "looked for a checkpoint in {}"),
        (gpipe.load, 1, "checked {}/step_"),
        (gpipe.load, 2, "read {}/step_"),
    ],
)
def test_of_a_rank_that_dies_all_tell_what_they_did_meanwhile(
    act: Callable[[Path, Any], object], agreed: int, doing: str, tmp_path: Path
) -> None:
    whole = trained()[0]
    pipes = rank_pipes(whole)
    if act is gpipe.load:
        gpipe.save(tmp_path, whole)

    def die_on_the_way(own: RankPipe) -> object:
        exchange, left = own._processes.all_gather, iter(range(agreed))

        def agree_or_die(told: bytes) -> list[bytes]:
            if own._processes.rank < 2 or next(left, None) is not None:
                return exchange(told)
            own._processes.meeting.leave()
            raise SystemExit

        own._processes.all_gather = agree_or_die  # type: ignore[method-assign]
        return act(tmp_path, own)

    *others, dead = run_ranks(die_on_the_way, pipes)
    assert isinstance(dead, SystemExit)
    for raised in others:
        assert isinstance(raised, RemoteError)
        assert raised.__notes__[0].startswith(f"while all ranks {doing.format(tmp_path)}")


def test_all_ranks_hear_what_the_first_one_finds(tmp_path: Path) -> None:
    pipes = rank_pipes(make())

    find = partial(gpipe.find_checkpoint, tmp_path)
    assert all_well(run_ranks(find, pipes)) == [None] * 3
    path = gpipe.save(tmp_path, make()).wait()
    assert all_well(run_ranks(find, pipes)) == [path] * 3
    (tmp_path / "latest").write_text("x")
    assert all(isinstance(error, gpipe.CheckpointError) for error in run_ranks(find, pipes))


def test_a_stage_without_parameters_has_no_optimizer(tmp_path: Path) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)]
    pipe, optimizer = trained(layers, [1, 1, 1])
    save_in_ranks(tmp_path, pipe, optimizer)
    whole = make([nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)], [1, 1, 1])
    other = torch.optim.AdamW(whole.parameters())

    def load(own: RankPipe) -> dict[str, Any]:
        mine = optimizer_of(whole, other, own)
        assert (mine is None) == (own._processes.rank == 1)
        gpipe.load(tmp_path, own, mine)
        return remembered(own, mine)

    found = [pair for own in all_well(run_ranks(load, rank_pipes(whole))) for pair in own.items()]
    assert differences(dict(found), remembered(pipe, optimizer)) == []
