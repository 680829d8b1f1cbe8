"""Law: a run that was saved, and loaded into a fresh pipe of any K, is bit for bit the run that never stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.checkpointed import build, build_tied, differences, make, remembered
from tests.support.plain_loop import same_bits
from tests.support.thread_ranks import save_in_ranks

Optimize = Callable[[Any], torch.optim.Optimizer]
ROWS = 28  # of the data, which is gone through 7 at a time, in an order of each epoch's own
DATA = torch.Generator().manual_seed(5)
INPUTS, TARGETS = torch.randn(ROWS, 4, generator=DATA), torch.randn(ROWS, 2, generator=DATA)

OPTIMIZERS: dict[str, Optimize] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


class Run:
    """A training run: all that changes from step to step, and how to save and load it."""

    def __init__(self, build: Callable[[], list[nn.Module]], optimize: Optimize, **options: Any) -> None:
        self.pipe = make(build(), **options)
        self.optimizer = optimize(self.pipe.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        self.position = 0  # mini-batches so far

    def go(self, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            epoch, place = divmod(self.position, ROWS // 7)
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
            rows = order[7 * place : 7 * place + 7]
            losses.append(self.pipe.step(INPUTS[rows], TARGETS[rows], F.mse_loss))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.position += 1
        return losses

    def extra(self) -> dict[str, Any]:
        return {"position": self.position, "scheduler": self.scheduler.state_dict()}

    def load(self, folder: Path) -> None:
        checkpoint = gpipe.load(folder, self.pipe, self.optimizer)
        self.position = checkpoint.extra["position"]
        self.scheduler.load_state_dict(checkpoint.extra["scheduler"])


@pytest.mark.parametrize("build", [build, build_tied])
@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"partitions": 3}, {"partitions": 1, "seed": None}),
        ({"partitions": 1}, {"partitions": [1, 2, 2, 1], "remat": "never", "seed": None}),
        ({"partitions": 2, "batch_norm": "deferred"}, {"partitions": 5, "batch_norm": "deferred"}),
        ({"partitions": 4, "driver": "threads"}, {"partitions": 2, "driver": "threads", "remat": "except_last"}),
        ({"partitions": 3, "schedule": "zb_h1"}, {"partitions": 1, "schedule": "dualpipe_v", "seed": None}),
        ({"partitions": 2, "schedule": "interleaved"}, {"partitions": 2, "schedule": "v_min", "seed": None}),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    build: Callable[[], list[nn.Module]], optimize: Optimize, first: Any, second: Any, tmp_path: Path
) -> None:
    run = Run(build, optimize, **first)
    before = run.go(3)
    if first["partitions"] == 4:
        save_in_ranks(tmp_path, run.pipe, run.optimizer, 2, extra=run.extra())
        expected = run.go(3)
    else:
        saving = gpipe.save(tmp_path, run.pipe, run.optimizer, extra=run.extra(), background=True)
        expected = run.go(3)  # while it is being written
        saving.wait()
    other = Run(build, optimize, **second)
    other.go(1)  # whatever it did is forgotten
    other.load(tmp_path)
    found = other.go(3)
    assert all(map(same_bits, found, expected))
    assert not any(map(same_bits, found, before))
    assert differences(remembered(other.pipe, other.optimizer), remembered(run.pipe, run.optimizer)) == []
    for each in (run, other):
        each.pipe.close()


def test_a_run_killed_twice_in_one_epoch_goes_on(tmp_path: Path) -> None:
    """Others lose their place in the data at the second resume."""
    run = Run(build, OPTIMIZERS["adam"])
    expected = run.go(7)
    losses: list[Tensor] = []
    for partitions, steps in ((3, 1), (2, 2), (4, 2), (1, 2)):
        again = Run(build, OPTIMIZERS["adam"], partitions=partitions, seed=None if losses else 4)
        if losses:
            again.load(tmp_path)
        losses += again.go(steps)
        gpipe.save(tmp_path, again.pipe, again.optimizer, extra=again.extra(), keep=1)
        again.go(1)  # lost
    assert all(map(same_bits, losses, expected))
    assert gpipe.find_checkpoint(tmp_path) == tmp_path / "step_7"


def test_a_table_that_was_searched_for_is_found_again_without_a_search(tmp_path: Path) -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(4, 4) for _ in range(8)]

    costs = [1, 3, 1, 2, 2, 1, 1, 2]
    plan = gpipe.find_plan(layers(), None, 2, micro_batches=3, schedule="auto", costs=costs)
    with gpipe.GPipe(layers(), plan=plan) as pipe:
        gpipe.save(tmp_path, pipe)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpipe.config.make_plan.search", None)
            stored = gpipe.load(tmp_path).plan
            with gpipe.GPipe(layers(), plan=stored) as again:
                assert again.program == pipe.program
                assert again.layers_per_partition == pipe.layers_per_partition
                assert again.plan.to_json() == pipe.plan.to_json()
                gpipe.save(tmp_path, again)
        assert gpipe.load(tmp_path).plan == stored


@pytest.mark.parametrize(
    "options", [{"schedule": "zb_v", "remat": "never"}, {"schedule": "interleaved"}, {"remat": 2}]
)
def test_a_checkpoint_says_what_its_pipe_was_made_of(options: dict[str, Any], tmp_path: Path) -> None:
    with gpipe.GPipe([nn.Linear(4, 4) for _ in range(4)], 2, 4, **options) as pipe:
        gpipe.save(tmp_path, pipe)
        with gpipe.GPipe([nn.Linear(4, 4) for _ in range(4)], plan=gpipe.load(tmp_path).plan) as again:
            assert again.program == pipe.program
