"""A run saved under one schedule goes on under another, with other ranks and stages, to the same bits."""

from itertools import pairwise
from pathlib import Path

import pytest

import gpipe
from gpipe.schedule.schedules import SCHEDULES
from tests.support.checkpointed import adamw, build, build_tied, differences, make, snapshot, train

RANKS = {name: 3 if schedule.stages_per_rank == 1 else 2 for name, schedule in SCHEDULES.items()} | {"dualpipe_v": 1}


@pytest.mark.parametrize(("first", "second"), list(pairwise([*SCHEDULES, "gpipe"])))
@pytest.mark.parametrize("layers", [build, build_tied])
def test_a_run_goes_on_under_another_schedule(first: str, second: str, layers: object, tmp_path: Path) -> None:
    assert callable(layers)
    whole = make(layers(), 1)
    optimizer = adamw(whole.parameters())
    losses = train(whole, optimizer, 4)

    saved = make(layers(), RANKS[first], schedule=first)
    half = adamw(saved.parameters())
    found = train(saved, half, 2)
    gpipe.save(tmp_path / "checkpoint", saved, half)

    resumed = make(layers(), RANKS[second], schedule=second)
    rest = adamw(resumed.parameters())
    gpipe.load(tmp_path / "checkpoint", resumed, rest)
    assert [*found, *train(resumed, rest, 2)] == losses
    assert not differences(snapshot(resumed, rest), snapshot(whole, optimizer))
