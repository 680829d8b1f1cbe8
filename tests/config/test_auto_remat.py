"""remat="auto" recomputes where memory demands it and as often; and a pipe by a plan does what the plan says."""

from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe.config import make_plan
from gpipe.config.agreement import memory_by_rank
from gpipe.distributed.mesh import Position
from tests.support.jobs import automatic as jobs
from tests.support.plain_loop import weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

WIDTH, ROWS = 64, 128
X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def layers() -> list[nn.Module]:
    with weights_of(3):
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]


def pipe(memory: float | list[float], **given: object) -> gpipe.GPipe:
    return pipe_by_costs(layers(), 2, 8, sample=X, costs=[1] * 6, remat=gpipe.Remat(memory=memory), seed=1, **given)


def remats(made: gpipe.GPipe) -> tuple[object, ...]:
    return made.plan.remat


class Between(nn.Module):
    """Alike blocks, between which the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + x.tanh()
        return x


def test_alike_blocks_of_a_model_are_counted_with_what_stands_between_them() -> None:
    made = pipe_by_costs(Between(), 2, 2, sample=torch.ones(4, 4), costs="params", remat=gpipe.Remat(memory=10**6))
    assert remats(made) == ("never", "never")


def test_more_memory_recomputes_less() -> None:
    found = [remats(pipe(memory)) for memory in (300_000, 340_000, 400_000, 10**6)]
    assert found[-1] == ("never", "never")
    levels = [[{"always": 0, "never": 8}.get(str(own), own) for own in each] for each in found]
    assert levels == sorted(levels)
    assert levels[0] < levels[1] < levels[-1]


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "1f1b"])
def test_what_is_predicted_fits(schedule: str) -> None:
    fitted = 0
    for memory in range(280_000, 480_000, 20_000):
        with suppress(ValueError):  # nothing fits
            peaks = pipe(memory, schedule=schedule).prediction.peak_bytes
            fitted += 1
            assert peaks is not None
            assert max(peaks) <= memory
    assert fitted >= 4


@pytest.mark.parametrize("memory", [290_000, 310_000])
def test_backwards_stay_split_where_they_do_not_fit_whole(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_plan, "unsplit_stages", lambda program, costs: frozenset(range(program.stages)))
    made = gpipe.GPipe(layers(), [2, 2, 1, 1], 8, sample=X, remat=gpipe.Remat(memory=memory), schedule="zb_v")
    assert made.prediction.peak_bytes is not None
    assert max(made.prediction.peak_bytes) <= memory


def test_each_partition_has_its_own_memory_or_that_of_the_machine_and_what_does_not_fit_is_refused() -> None:
    first, last = remats(pipe([300_000, 10**6]))
    assert last == "never" != first
    assert remats(pipe_by_costs(layers(), 2, 8, sample=X, costs=[1] * 6, remat="auto")) == ("never", "never")
    with pytest.raises(ValueError, match=r"remat=Remat\(memory=100000\): rank 0 needs .* KiB of 97.66 KiB"):
        pipe(100_000)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"remat": "auto"}, "remat='auto' requires sample="),
        ({"remat": gpipe.Remat([1, 2, 3]), "sample": X}, "memory= has length 3, but there are 2 partitions"),
        ({"remat": gpipe.Remat(0), "sample": X}, "memory=0 is invalid"),
        (
            {"remat": gpipe.Remat(cast(Any, torch.tensor(1e9))), "sample": X},
            r"memory=tensor\(1.0000e\+09\) is invalid",
        ),
    ],
)
def test_mistakes_are_told(given: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gpipe.GPipe(layers(), 2, 8, **given)  # type: ignore[arg-type]


def test_where_seconds_are_measured_a_stage_offloads_if_that_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Tanh() for _ in range(12)]) for _ in range(2)]

    found = {}
    for speed in (1.0, 1e15):
        monkeypatch.setattr(make_plan, "measure_host", lambda device, speed=speed: speed)
        with gpipe.GPipe(deep(), 2, 8, sample=X, remat=gpipe.Remat(memory=250_000)) as made:
            found[speed] = remats(made)
            assert made.prediction.peak_bytes is not None
            assert max(made.prediction.peak_bytes) <= 250_000
            made.step(X, X, F.mse_loss)
    assert "offload" in found[1e15]
    assert not {"offload", "never"} & {*found[1.0]}


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_bits_are_those_of_the_reference_loop(driver: str) -> None:
    for made in (pipe(320_000, driver=driver), planned(driver)):
        assert made.verify(X, X, F.mse_loss, against="model").equal


def planned(driver: str) -> gpipe.GPipe:
    plan = gpipe.find_plan(layers(), X, [gpipe.Device(350_000, 1e9)] * 2, micro_batches=8, partitions=2)
    made = gpipe.GPipe(layers(), plan=plan, seed=1, driver=driver)
    assert made.layers_per_partition == plan.layers_per_partition
    assert made.micro_batches == 8
    assert remats(made) == plan.remat
    return made


def test_a_plan_is_followed_as_it_is_or_refused() -> None:
    plan = gpipe.find_plan(layers(), X, [gpipe.Device()] * 2, micro_batches=8, schedule="1f1b", partitions=2)
    assert gpipe.GPipe(layers(), plan=plan).program.ranks == 2
    assert gpipe.GPipe(layers(), micro_batches=4, plan=plan).micro_batches == 4
    with pytest.raises(ValueError, match="plan= already determines partitions=, remat="):
        gpipe.GPipe(layers(), 2, plan=plan, remat="never")
    with pytest.raises(TypeError, match="plan= is a int"):
        gpipe.GPipe(layers(), plan=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plan= is for 6 layers, but the model has 5"):
        gpipe.GPipe(layers()[:5], plan=plan)
    with pytest.raises(ValueError, match=r"micro_batches=None is invalid.*\n?.*partitions=None"):
        gpipe.GPipe(layers())


def test_the_peak_of_each_partition_is_foretold_where_bytes_were_counted() -> None:
    with pipe([300_000, 10**6]) as made:
        foretold = made.prediction.peak_bytes
        assert foretold is not None
        assert all(peak <= memory for peak, memory in zip(foretold, (300_000, 10**6), strict=True))
        assert gpipe.GPipe(layers(), 2, 8, sample=X).prediction.peak_bytes is None
    plan = gpipe.find_plan(layers(), X, [gpipe.Device(memory=10**6, flops=1e9)] * 2, micro_batches=8)
    assert gpipe.GPipe(layers(), plan=plan).prediction.peak_bytes == plan.peak_bytes


def test_the_peak_of_a_verified_step_has_two_micro_batches_more_of_what_each_stage_receives() -> None:
    with pipe(10**6) as made:
        peaks, verified = made.prediction.peak_bytes, made.prediction.verified_peak_bytes
        assert peaks is not None
        assert verified is not None
        micro_batch = X.nbytes // 8
        assert verified[0] - peaks[0] == 2 * 2 * micro_batch  # inputs, and gradients of outputs
        assert verified[1] - peaks[1] == 2 * (1 + 3) * micro_batch  # targets, and what the loss check copies
        assert gpipe.GPipe(layers(), 2, 8, sample=X).prediction.verified_peak_bytes is None


# Over processes.


def assert_same(found: Any, alone: Any) -> None:
    """What a process has is what one process had."""
    assert (found["remat"], found["loss"]) == (alone["remat"], alone["loss"])
    assert found["gradients"]
    assert all(alone["gradients"][name] == gradient for name, gradient in found["gradients"].items())


def test_remat_auto_gives_the_bits_of_one_process_and_recomputes_by_the_memory_of_each(pool: WorkerPool) -> None:
    alone = jobs.by_memory(jobs.TIGHT, driver="lockstep")
    assert "never" not in alone["remat"]
    for found in answers(pool.run(jobs.auto, jobs.TIGHT, world=2)):
        assert_same(found, alone)
    for found in answers(pool.run(jobs.auto, jobs.TIGHT, world=4)):
        assert found["remat"] == alone["remat"]
    for found in answers(pool.run(jobs.auto, None, world=2)):
        assert found["remat"] == ["never", "never"]


def test_a_plan_gives_the_bits_of_the_same_plan_in_one_process(pool: WorkerPool) -> None:
    alone = jobs.by_plan(driver="lockstep")
    for found in answers(pool.run(jobs.planned, world=2)):
        assert_same(found, alone)


def test_processes_of_a_host_share_its_memory_and_the_least_replica_counts() -> None:
    def position(device: str) -> Position:
        return Position(0, 0, 2, 2, (0, 1, 2, 3), torch.device(device), 60.0)

    hosts, memory = ["a", "a", "a", "b"], [12.0, 12.0, 12.0, 8.0]
    assert memory_by_rank(position("cpu"), hosts, memory) == [4.0, 4.0]
    assert memory_by_rank(position("cuda:0"), hosts, [12.0, 12.0, 10.0, 8.0]) == [10.0, 8.0]
