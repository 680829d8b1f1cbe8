"""Replicas of a pipe: together they train as one with the mini-batches of all, and stay the same to the last bit."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe.distributed.reduce import BUCKET
from gpipe.schedule.schedules import SCHEDULES
from tests.support.jobs import data_parallel as jobs
from tests.support.jobs.training import Json
from tests.support.plain_loop import assert_same_bits
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers


def of_replicas(found: Sequence[Json], stages: int) -> Json:
    """What the stages of the first replica answer, put together; the other replicas answer the same."""
    replicas = [found[at : at + stages] for at in range(0, len(found), stages)]
    for one, other in pairwise(replicas):
        assert one == other
    return {name: value for stage in replicas[0] for name, value in stage.items()}


def assert_close(found: Mapping[str, Any], right: Mapping[str, Tensor | None], rtol: float = 1e-4) -> None:
    for name, tensor in right.items():
        if found.get(name) is None or tensor is None:
            assert found.get(name) is tensor is None, name
        else:
            torch.testing.assert_close(torch.tensor(found[name]), tensor.detach(), rtol=rtol, atol=1e-6, msg=name)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


# Laws.


UNEVEN, FOUR = [7, 3], [4, 1, 6, 2]
TRAININGS: list[tuple[int, list[int], list[Any]]] = [
    *((2, UNEVEN, [BUCKET, schedule]) for schedule in SCHEDULES),
    (2, [5, 5], [2**10]),
    (1, FOUR, [2**10]),
    (2, UNEVEN, [BUCKET, "gpipe", "v"]),
    (2, UNEVEN, [BUCKET, "gpipe", "backwards"]),
    (1, FOUR, [BUCKET, "gpipe", "loop"]),
]
"""Of how many ranks a replica is, what rows each has, and how they train."""


@pytest.mark.parametrize(("ranks", "rows", "how"), TRAININGS, ids=str)
def test_replicas_train_as_one_with_the_whole_mini_batch(
    ranks: int, rows: list[int], how: list[Any], pool: WorkerPool
) -> None:
    found = answers(pool.run(jobs.train, ranks, rows, *how))
    whole = nn.Sequential(*jobs.network())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(jobs.STEPS):
        for turn in (0, 1):
            x, y = jobs.data(2 * step + turn, sum(rows))
            loss = F.mse_loss(torch.cat([run_rows(whole, part, 4) for part in x.split(rows)]), y)
            loss.backward()
            losses.append(loss.item())
        if not step:
            right = {name: None if g is None else g.clone() for name, g in gradients(whole).items()}
            assert_close(of_replicas([answer["gradients"] for answer in found], ranks), right)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(of_replicas([answer["parameters"] for answer in found], ranks), dict(whole.named_parameters()))
    parts = [len(part) for own in x.split(rows) for part in own.tensor_split(min(4, len(own)))]
    for answer in found:
        assert answer["losses"] == found[0]["losses"]
        torch.testing.assert_close(torch.tensor(answer["losses"]), torch.tensor(losses))
        assert answer["of the last"] == found[0]["of the last"]
        together = sum(loss * n for loss, n in zip(answer["of the last"], parts, strict=True)) / sum(rows)
        assert together == pytest.approx(losses[-1])


def run_rows(whole: nn.Module, rows: Tensor, micro_batches: int) -> Tensor:
    """By micro-batches, since a layer does something else with one row."""
    return torch.cat([whole(part) for part in rows.tensor_split(min(micro_batches, len(rows)))])


def test_the_last_stage_reduces_while_the_first_has_backwards_to_do(pool: WorkerPool) -> None:
    """The last backward of the first stage waits for these reductions: otherwise the step would not end."""
    losses = answers(pool.run(jobs.overlap))
    assert losses == losses[:1] * 4


def test_a_rank_goes_on_with_another_stage_while_replicas_are_awaited_to_reduce_one(pool: WorkerPool) -> None:
    """Bug story: a rank sat in its REDUCE until the slowest replica came to it, with backwards left to do."""
    one, other = answers(pool.run(jobs.go_on, world=2))
    assert one == other
    layers = jobs.seeded(*[lambda: nn.Linear(6, 6)] * 3)
    x, y = jobs.data(0, 8)
    F.mse_loss(nn.Sequential(*layers)(x), y).backward()
    right = {f"{2 * at}.{name}": p.grad for at, layer in enumerate(layers) for name, p in layer.named_parameters()}
    assert_close(one, right)


# BatchNorm.


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_are_those_of_the_whole_mini_batch(momentum: float | None, pool: WorkerPool) -> None:
    found = of_replicas(answers(pool.run(jobs.defer, [7, 3], momentum)), 2)
    whole = nn.Sequential(*jobs.aside(momentum))
    with torch.no_grad():
        for step in (0, 1, 2):
            whole(jobs.data(step, 10)[0])
    assert_close(found, dict(whole.named_buffers()), rtol=1e-5)


def test_a_step_that_fails_anywhere_commits_statistics_nowhere(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.fail_late))
    assert all("at last" in answer["error"] and answer["same"] for answer in found), found
    whole = nn.Sequential(*jobs.aside(0.1))
    whole(jobs.data(0, 11)[0])
    right = {name.replace("1.", "2.", 1).replace("3.", "4.", 1): b for name, b in whole.named_buffers()}
    assert_close(of_replicas([answer["after"] for answer in found], 2), right)


@pytest.mark.parametrize(("remat", "way"), [("always", "step"), ("never", "step"), ("always", "call")])
def test_synchronized_norms_normalize_a_micro_batch_of_all_replicas(remat: str, way: str, pool: WorkerPool) -> None:
    rows = [6, 4]
    found = answers(pool.run(jobs.synchronize, rows, remat, way))
    whole = nn.Sequential(*jobs.normalized())
    for step in (0, 1):
        x, y = (tensor.split(rows) for tensor in jobs.data(step, sum(rows)))
        for m in (0, 1):
            part, goal = (torch.cat([t.tensor_split(2)[m] for t in parts]) for parts in (x, y))
            (F.mse_loss(whole(part), goal) * len(part) / sum(rows)).backward()
    assert_close(of_replicas([answer["gradients"] for answer in found], 2), gradients(whole))
    assert_close(of_replicas([answer["buffers"] for answer in found], 2), dict(whole.named_buffers()), rtol=1e-5)
    assert all("[replicas-uneven]" in answer["told"] for answer in found), found


# Training tools.


def test_all_ranks_skip_the_same_steps(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.scale))
    for answer in found:
        assert [scale for scale, _ in answer["found"]] == [64.0, 32.0, 32.0, 16.0, 8.0]
        assert "[gradients-not-finite]" in answer["told"]
    held = [of_replicas([answer["found"][step][1] for answer in found], 2) for step in range(5)]
    assert [one == other for one, other in pairwise(held)] == [True, False, True, True]


@pytest.mark.parametrize("stages", [2, 4])
def test_norms_of_gradients_are_those_of_all_stages_each_once(stages: int, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.clip, stages))
    assert [answer["empty"] for answer in found] == [0.0] * 4
    for at, norm_type in enumerate((2.0, float("inf"), 1.0)):
        before = of_replicas([answer["found"][at][0] for answer in found], stages)
        names = [name for name, _ in nn.Sequential(*jobs.network()).named_parameters()]
        norms = [
            torch.linalg.vector_norm(torch.tensor(before[name]), norm_type) for name in names if before.get(name)
        ]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        assert {answer["found"][at][1] for answer in found} == {total.item()}
        after = of_replicas([answer["found"][at][2] for answer in found], stages)
        factor = 0.01 / (total + 1e-6)
        assert_close(after, {name: torch.tensor(before[name]) * factor for name in names if before.get(name)})


def test_the_layer_that_makes_the_first_nan_is_named_on_all_ranks(pool: WorkerPool) -> None:
    for answer in answers(pool.run(jobs.break_down)):
        assert not torch.tensor(answer["loss"]).isfinite()
        assert "output of Root (layer 2) is not finite" in answer["told"]
        assert "rank 3, stage 1, layer 2" in answer["told"]
        assert "micro-batch 1" in answer["told"]
        assert answer["after"] == 0


@pytest.mark.parametrize("partitions", [1, [2, 2], [1, 3]], ids=str)
def test_the_layer_whose_gradient_is_not_finite_is_named(partitions: int | list[int]) -> None:
    pipe = gpipe.GPipe(jobs.roots(), partitions, 2, seed=0)
    x = torch.ones(4, 6)
    x[0, 1] = 0.0
    with (
        pytest.raises(FloatingPointError, match=r"gradient of the input of Root \(layer 2\) .* 1 of 12 values"),
        gpipe.detect_nonfinite(pipe),
    ):
        pipe.step(x, torch.ones(4, 6), F.mse_loss)
    pipe.step(torch.full((4, 6), float("nan")), torch.ones(4, 6), F.mse_loss)  # looked at no more
    assert not any(layer._forward_hooks for layer in pipe.children())


# What torch has for data parallelism.


def adam(rows: int, max_norm: float | None) -> tuple[nn.Module, list[float]]:
    """Training in one process."""
    whole = nn.Sequential(*jobs.mlp())
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.01)
    norms = []
    for step in range(jobs.STEPS):
        x, y = jobs.data(step, rows)
        F.mse_loss(whole(x), y).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return whole, norms


@pytest.fixture(scope="module")
def torchs_own() -> list[Json]:
    return answers(run_ranks(4, jobs.torchs_own))


def test_the_zero_redundancy_optimizer_spreads_its_state_over_replicas(torchs_own: list[Json]) -> None:
    found = of_replicas([answer["zero"] for answer in torchs_own], 2)
    assert_close(found, dict(adam(12, None)[0].named_parameters()), rtol=1e-3)


def test_all_ranks_skip_the_same_steps_where_some_layers_are_spread() -> None:
    """Of a DTensor beside others torch's scaler says "mixed torch.Tensor and DTensor"."""
    for answer in answers(run_ranks(2, jobs.scale_shards)):
        assert [scale for scale, *_ in answer["whole"]] == [64.0, 32.0, 32.0]
        first, skipped, last = (parameters for *_, parameters in answer["whole"])
        assert first == skipped != last
        assert answer["sharded"] == answer["whole"]
        assert [scale for scale, *_ in answer["split"]] == [scale for scale, *_ in answer["alone"]]
        for split, alone in zip(answer["split"], answer["alone"], strict=True):
            for name, weights in alone[-1].items():
                torch.testing.assert_close(torch.tensor(split[-1][name]), torch.tensor(weights), rtol=1e-4, atol=1e-6)


@st.composite
def sharded_cases(draw: st.DrawFn, partitions: int) -> tuple[str, int, int, str, list[int]]:
    """A schedule, stages a rank, M, remat, and which of four layers are sharded."""
    each = draw(st.sampled_from([n for n in (1, 2, 4) if n * partitions <= 4]))
    placements = {name: schedule.placement(partitions, each) for name, schedule in SCHEDULES.items()}
    micro_batches = draw(st.integers(1, 5))
    tables = {n: SCHEDULES[n].table(at, micro_batches) for n, at in placements.items() if at is not None}
    name = draw(st.sampled_from([name for name, table in tables.items() if table is not None]))
    remat = draw(st.sampled_from(["always", "except_last", "never", "offload"]))
    return name, each, micro_batches, remat, sorted(draw(st.sets(st.integers(0, 3), min_size=1)))


@pytest.mark.parametrize(("replicas", "partitions"), [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2)])
@settings(derandomize=True, deadline=None, max_examples=1, database=None)
@given(data=st.data())
def test_whatever_is_sharded_a_step_has_the_bits_of_replicas_and_gathers_a_stage_once(
    replicas: int, partitions: int, data: st.DataObject
) -> None:
    cases = data.draw(st.lists(sharded_cases(partitions), min_size=4, max_size=4))
    for answer in answers(run_ranks(replicas * partitions, jobs.shard_some, replicas, cases)):
        for case, (whole, sharded) in zip(cases, answer, strict=True):
            assert whole == sharded, case


def test_replicas_that_use_different_layers_of_a_sharded_stage_are_refused() -> None:
    """Torch would add up the gradient of one to that of another, where their sizes are the same."""
    for answer in answers(run_ranks(2, jobs.shard_unlike)):
        assert "[sharded-weights-unused]" in answer["told"]
        assert answer["after"] == ["0.positive.weight", "0.positive.bias", "1.weight", "1.bias"]
        assert "[replicas-uneven]" in answer["fewer"]


@pytest.mark.parametrize("at", [0, 1], ids=["pipeline", "replicas"])
def test_a_layer_may_be_spread_over_ranks_of_its_own(at: int, torchs_own: list[Json]) -> None:
    found = [answer["split"][at] for answer in torchs_own]
    whole, norms = adam(12, 0.05)
    held = {name: value for answer in found for name, value in answer["parameters"].items()}
    assert_close(held, dict(whole.named_parameters()), rtol=1e-3)
    for answer in found:
        assert answer["seed"] == found[0]["seed"]  # drawn once: what the ranks of a layer have in common stays so
        torch.testing.assert_close(answer["norms"], norms, rtol=1e-4, atol=0)


def test_synchronized_norms_are_refused_where_they_cannot_be_and_plain_ones_without_replicas() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    with pytest.raises(ValueError, match=r"\[batch-norm-not-replaceable\]"):
        gpipe.GPipe([Own(2)], 1, 1, batch_norm="synchronized")
    layers, plain = jobs.normalized(), jobs.normalized()
    for made, batch_norm in ((layers, "synchronized"), (plain, "micro")):
        pipe = gpipe.GPipe(made, [3, 4], 2, seed=0, batch_norm=batch_norm)  # type: ignore[arg-type]  # one of its words
        pipe.step(*jobs.data(0, 10), F.mse_loss)
    assert_same_bits(nn.Sequential(*layers), plain)


# Replicas that are not alike.


def test_replicas_may_be_made_and_asked_in_other_words(pool: WorkerPool) -> None:
    assert answers(pool.run(jobs.begin_alike, world=2)) == [3, 3]
    one, other = answers(pool.run(jobs.step_alike, world=2))
    assert one == other


@pytest.mark.parametrize(
    ("spoiled", "layer"),
    [("1.running_var", "layer 1 (1: BatchNorm1d)"), ("2.weight", "layer 2 (2: Linear)"), ("2.bias", "layer 2")],
)
@pytest.mark.parametrize("world", [2, 4])  # one replica, whose other ranks have the layers when they begin, and two
def test_ranks_that_begin_with_other_weights_are_refused_by_all(
    world: int, spoiled: str, layer: str, pool: WorkerPool
) -> None:
    """Bug story: a model that was loaded on rank 0 alone was trained half of it; tied weights began apart."""
    for outcome in pool.run(jobs.begin_apart, spoiled, world=world):
        assert layer in outcome.text, str(outcome)
        assert "[weights-differ-between-processes]" in outcome.text
        assert "layer 0" not in outcome.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reduction", "reduction is 'mean' on rank 0 and 'sum' on rank 1"),
        ("function", "reduction is 'mean' on rank 0 and 'weights of the targets' on rank 1"),
        ("loss", "reduction is 'mean' on rank 0 and 'sum' on rank 1"),
        ("scale", "scale is 1.0 on rank 0 and 2.0 on rank 1"),
        ("scaler", "scale is 1.0 on rank 0 and 64.0 on rank 1"),
    ],
)
def test_replicas_that_average_or_scale_differently_are_refused_by_all(
    name: str, text: str, pool: WorkerPool
) -> None:
    for outcome in pool.run(jobs.step_apart, name, world=2):
        assert text in outcome.text, str(outcome)


def test_torchs_own_scaler_is_refused_over_processes(pool: WorkerPool) -> None:
    for outcome in pool.run(jobs.scale_by_torchs, world=2):
        assert "[scaler-per-process]" in outcome.text, str(outcome)
