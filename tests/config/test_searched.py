"""`schedule="auto"`: what is searched for trains to the same bits, within memory, and says how near it came."""

from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.planner.search import table_search
from tests.support.jobs import automatic as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_search, "MAX_LISTED", 20_000)


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2)) for _ in range(7)]


def _trained(**options: Any) -> tuple[gpipe.GPipe, list[torch.Tensor]]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(24, 16), torch.randn(24, 16)
    costs, memory = options.pop("costs", None), options.pop("memory", inf)
    if costs is not None:
        layers, devices = _layers(), [gpipe.Device(memory, 1.0)] * 2
        how: Any = {"costs": costs, "schedule": options.pop("schedule"), "partitions": options.pop("partitions")}
        options["plan"] = gpipe.find_plan(layers, options.pop("sample", None), devices, micro_batches=6, **how)
    pipe = gpipe.GPipe(_layers(), micro_batches=6, seed=3, **options)
    losses = [pipe.step(inputs[:rows], targets[:rows], mse_loss) for rows in (24, 24, 4)]
    return pipe, [*losses, *(p.grad for p in pipe.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"costs": [3, 1, 1, 2, 1, 1, 4]},
        {"sample": torch.zeros(24, 16)},
        {"sample": torch.zeros(24, 16), "costs": "params", "memory": 40_000},
        {"driver": "lockstep"},
    ],
    ids=str,
)
def test_it_has_the_bits_of_one_rank(options: dict[str, object]) -> None:
    pipe, found = _trained(partitions=2, schedule="auto", **options)
    _, wanted = _trained(partitions=1)
    assert all(map(torch.equal, found, wanted))
    assert "searched schedule: " in pipe.summary()
    if "memory" in options:
        assert pipe.prediction.peak_bytes is not None
        assert max(pipe.prediction.peak_bytes) <= 40_000


@pytest.mark.parametrize("memory", [21_500, 24_000, 25_500])
def test_what_is_predicted_fits(memory: int) -> None:
    """Where an I and its W stand together in what was searched, a B is run, which holds more at once."""
    devices, how = [gpipe.Device(memory, 1.0)] * 2, {"schedule": "auto", "costs": "params", "micro_batches": 6}
    made = gpipe.GPipe(_layers(), plan=gpipe.find_plan(_layers(), torch.zeros(24, 16), devices, **how))  # type: ignore[arg-type]
    assert made.prediction.peak_bytes is not None
    assert max(made.prediction.peak_bytes) <= memory


def test_rank_0_searches_for_all_processes(pool: WorkerPool) -> None:
    first, other = answers(pool.run(jobs.searched, world=2))
    whole = jobs.whole()
    assert first["found"] == other["found"]
    assert first["remat"] == other["remat"]
    assert first["loss"] == other["loss"] == whole["loss"]
    assert first["gradients"] | other["gradients"] == whole["gradients"]


@pytest.mark.parametrize("built", [True, False])
def test_replicas_go_by_one_table_to_the_bits_of_one_rank(built: bool, pool: WorkerPool) -> None:
    """Two have the same rows, and halves of the same numbers add up to these."""
    found = answers(pool.run(jobs.searched_by_replicas, built, world=4))
    whole = jobs.whole(dropout=0.0)
    for each in found:
        assert (each["found"], each["remat"], each["loss"]) == (found[0]["found"], found[0]["remat"], whole["loss"])
    for one, other in (found[:2], found[2:]):
        assert one["gradients"] | other["gradients"] == whole["gradients"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"partitions": [3, 4]}, "schedule='auto' chooses the split points"),
        ({"partitions": 2, "remat": "never"}, "schedule='auto' chooses remat"),
        ({"partitions": 2, "remat": gpipe.Remat(10**6)}, "requires sample="),
        ({"partitions": 2, "remat": gpipe.Remat(10), "sample": torch.zeros(6, 16)}, "schedule='auto': No plan fits"),
    ],
)
def test_what_it_finds_is_not_given(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gpipe.GPipe(_layers(), micro_batches=6, schedule="auto", **options)  # type: ignore[arg-type]


def test_costs_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="Use larger units"):
        gpipe.find_plan(_layers(), None, 2, micro_batches=6, schedule="auto", costs=[1e308] * 7)
