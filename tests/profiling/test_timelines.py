"""The real timeline: every action once, on its rank, without the waiting; and nothing at all unless asked for."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.profiling.breakdown import breakdown
from gpipe.runtime.streams import RankStream
from gpipe.schedule.action import COMPUTE, TRANSFERS
from gpipe.schedule.timeline import Timeline
from tests.support.clock import Clock
from tests.support.plain_loop import same_bits, squares, weights_of

K, M = 3, 4
X, Y = torch.randn(6, 3), torch.randn(6, 3)
DRIVERS = pytest.mark.parametrize("driver", ["lockstep", "threads"])


def build() -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(3, 3) for _ in range(K)]


def make(**changes: Any) -> gpipe.GPipe:
    return gpipe.GPipe(build(), **{"partitions": K, "micro_batches": M, "seed": 0, **changes})


def check(timeline: Timeline) -> None:
    """What is true of every recording."""
    assert timeline.ranks == K
    assert timeline.seconds > 0
    for rank in range(K):
        own = sorted((s for s in timeline.spans if s.rank == rank), key=lambda span: (span.start, span.end))
        assert all(0 <= span.start <= span.end <= timeline.seconds for span in own)
        assert all(before.end <= after.start for before, after in pairwise(own))
    shares = breakdown([timeline]).shares
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > -1e-9 for share in shares.values())


@DRIVERS
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_a_step_gives_one_timeline_with_every_action_once_on_its_rank(remat: str, driver: str) -> None:
    with make(remat=remat, driver=driver) as pipe:
        with gpipe.record(pipe) as recording:
            for rows in (6, 2):
                pipe.step(X[:rows], Y[:rows], squares)
        first, second = recording.timelines
        for timeline in (first, second):
            check(timeline)
        found = Counter((span.rank, span.action) for span in first.spans if span.action.kind in COMPUTE)
        program = pipe.program
        assert found == Counter(
            (rank, action) for rank, row in enumerate(program.table) for action in row if action.kind in COMPUTE
        )
        assert {span.action.micro_batch for span in second.spans} == {0, 1}
        assert {span.action.kind for span in first.spans} <= COMPUTE | TRANSFERS
        assert sum(recording.breakdown().shares.values()) == pytest.approx(1)


@DRIVERS
def test_a_call_gives_one_timeline_and_its_backward_another(driver: str) -> None:
    with make(driver=driver) as pipe, gpipe.record(pipe) as recording:
        loss = squares(pipe(X), Y)
        assert len(recording.timelines) == 1
        loss.backward()
        with torch.no_grad():
            pipe(X)
    forward, backward, evaluation = recording.timelines
    kinds = [
        {str(s.action.kind) for s in t.spans if s.action.kind in COMPUTE} for t in (forward, backward, evaluation)
    ]
    assert kinds[0] == kinds[2]
    assert len(kinds[0]) == 1
    assert len(kinds[1]) == 2  # recompute and backward
    for timeline in recording.timelines:
        check(timeline)


def test_waiting_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class SlowAtFirst(nn.Linear):
        visits = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.visits % M == 0:  # when the other ranks have nothing to do
                clock.sleep(0.25)
            self.visits += 1
            return super().forward(x)

    layers = [SlowAtFirst(3, 3), *build()[1:]]
    with gpipe.GPipe(layers, K, M, remat="never") as pipe:
        pipe.step(X, Y, squares)
        with gpipe.record(pipe) as recording:
            pipe.step(X, Y, squares)
    (timeline,) = recording.timelines
    check(timeline)
    assert timeline.seconds == timeline.busy(0) == 0.25
    for rank in (1, 2):
        assert sum(span.seconds for span in timeline.spans if span.rank == rank) == 0


@DRIVERS
def test_recording_changes_no_bit_and_nothing_is_recorded_unless_asked_for(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(driver=driver) as one, make(driver=driver) as other:
        loss = one.step(X, Y, squares)
        with gpipe.record(other) as outer, gpipe.record(other) as inner:
            assert other.recorder is inner
            assert same_bits(other.step(X, Y, squares), loss)
        assert (len(outer.timelines), len(inner.timelines)) == (0, 1)
        assert all(same_bits(p.grad, q.grad) for p, q in zip(one.parameters(), other.parameters(), strict=True))
        assert other.recorder is None
        monkeypatch.delattr(RankStream, "stamp")  # no clock is read
        other.step(X, Y, squares)
        squares(other(X), Y).backward()
        assert len(inner.timelines) == 1


@DRIVERS
def test_a_run_that_fails_behind_its_last_action_is_not_recorded(driver: str) -> None:
    """Outputs that cannot be put together fail the call, inside of what tells other processes so."""

    class Means(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with gpipe.GPipe([nn.Linear(3, 3), Means()], 2, 2, driver=driver) as pipe, gpipe.record(pipe) as recording:
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=r"\[outputs-cannot-be-joined\]"):
                pipe(X)
        assert (recording.timelines, pipe.step_number) == ([], 0)


@DRIVERS
def test_a_failed_step_leaves_no_timeline_and_recording_goes_on(driver: str) -> None:
    with make(driver=driver) as pipe, gpipe.record(pipe) as recording:
        with pytest.raises(RuntimeError, match="shape"):
            pipe.step(X[:, :2], Y, squares)
        assert recording.timelines == []
        pipe.step(X, Y, squares)
        (timeline,) = recording.timelines
        check(timeline)
    with pytest.raises(ZeroDivisionError), gpipe.record(pipe):
        raise ZeroDivisionError
    assert pipe.recorder is None
