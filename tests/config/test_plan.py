"""A plan is plain data: it goes through JSON, into checkpoints and to other pipes, and says how it was made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipe
from gpipe.schedule.schedules.by_name import program_of
from tests.support.planned import pipe_by_costs

X = torch.linspace(-1, 1, 96).view(24, 4)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(8)]


WAYS: dict[str, dict[str, Any]] = {
    "by parameters": {},
    "timed": {"sample": X},
    "within memory": {"sample": X, "remat": gpipe.Remat(memory=10**6)},
    "offloaded": {"sample": X, "remat": ["offload", "always"]},
    "interleaved": {"schedule": gpipe.Interleaved(4), "remat": 1},
    "split": {"schedule": "zb_v", "sample": X, "remat": "never"},
    "a program": {"schedule": program_of("v_half", 2, 6)},
    "a function": {"schedule": lambda ranks, m: program_of("1f1b", ranks, m)},
    "searched": {"schedule": "auto", "sample": X},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_in_json_makes_the_same_pipe(way: str, tmp_path: Path) -> None:
    with gpipe.GPipe(layers(), 2, 6, seed=1, **WAYS[way]) as pipe:
        text = json.dumps(pipe.plan.to_json(), allow_nan=False)
        gpipe.save(tmp_path, pipe)
        for plan in (gpipe.Plan.from_json(json.loads(text)), gpipe.load(tmp_path).plan, pipe.plan):
            with gpipe.GPipe(layers(), plan=plan, seed=1) as again:
                assert again.program == pipe.program
                assert again.plan.to_json() == pipe.plan.to_json()
                assert again.prediction.timeline == pipe.prediction.timeline
                assert again.prediction.peak_bytes == pipe.prediction.peak_bytes
                assert again.prediction.unit == pipe.prediction.unit
        assert str(pipe.plan.shape) in pipe.plan.explain()
        assert pipe.plan.program.only([*gpipe_kinds(pipe)]) == pipe.program.only([*gpipe_kinds(pipe)])


def gpipe_kinds(pipe: gpipe.GPipe) -> set[Any]:
    return {action.kind for action in pipe.program.actions}


@pytest.mark.parametrize(
    "change",
    [
        {"layers_per_partition": [3, 3]},
        {"costs": [[1.0]]},
        {"table": ["row 0F0 what"]},
        {"rank_of": None},
        {"remat": 3},
        {"work": [1.0]},
        {"devices": [[1]]},
    ],
    ids=str,
)
def test_json_of_another_form_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stored is not a plan"):
        gpipe.Plan.from_json({**gpipe.GPipe(layers(), 2, 6).plan.to_json(), **change})
    with pytest.raises(ValueError, match="stored is not a plan"):
        gpipe.Plan.from_json({})


def test_a_plan_says_how_its_costs_were_obtained() -> None:
    def found(**how: Any) -> str:
        return pipe_by_costs(layers(), 2, 6, **how).plan.costs_by

    assert found(costs=[1] * 8) == "numbers"
    assert found(costs=None) == found(costs="params") == "params"
    assert found(costs=lambda layer, x: 1.0, sample=X) == "function"
    assert found(costs="flops", sample=X) == "flops"
    assert found(costs=None, sample=X) == found(costs="time", sample=X) == "time"
    devices = [gpipe.Device(flops=1e9)] * 2
    assert gpipe.find_plan(layers(), X, devices).costs_by == "operations"
    assert gpipe.find_plan(layers(), None, 2, micro_batches=6, costs=[1] * 8).costs_by == "numbers"
    for how in ({}, {"costs": [1] * 8, "micro_batches": 6}):
        with pytest.raises(ValueError, match="remat='never' requires balance="):
            gpipe.find_plan(layers(), X, 2, remat="never", **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="measure=True cannot be combined with costs="):
        gpipe.find_plan(layers(), X, 2, micro_batches=6, costs=[1] * 8, measure=True)


def test_a_search_by_costs_takes_devices_by_their_speed() -> None:
    slow_first = [gpipe.Device(flops=1e9), gpipe.Device(flops=3e9)]
    plan = gpipe.find_plan(layers(), None, slow_first, partitions=2, micro_batches=6, costs=[1] * 8, schedule="gpipe")
    assert plan.layers_per_partition == (2, 6)


def test_each_table_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(ranks: int, micro_batches: int) -> Any:
        made.append((ranks, micro_batches))
        return program_of("1f1b", ranks, micro_batches)

    pipe = gpipe.GPipe(layers(), 2, 6, schedule=make)
    pipe.step(X, X, nn.functional.mse_loss)
    pipe.summary()
    tables = [size for size in made if size != (2, 6)]
    assert len(tables) == len(set(tables))


def test_a_function_with_the_name_of_a_schedule_is_no_schedule_by_name() -> None:
    def gpipe_(ranks: int, micro_batches: int) -> Any:
        return program_of("1f1b", ranks, micro_batches)

    gpipe_.__qualname__ = "gpipe"
    pipe = gpipe.GPipe(layers(), 2, 6, schedule=gpipe_)
    again = gpipe.GPipe(layers(), plan=pipe.plan)
    assert again.program == pipe.program
