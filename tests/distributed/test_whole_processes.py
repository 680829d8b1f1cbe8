"""A process has a part of the model: what belongs to the whole is right, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.jobs import whole as jobs
from tests.support.jobs.whole import LOSSES, data, network, plain
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 4), (2, 1), (4, 2)])
def test_the_loss_is_that_of_the_whole_mini_batch(world: int, stages: int, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.losses, stages, world=world))
    for name, loss_fn in LOSSES.items():
        model = nn.Sequential(*plain())
        x, y = data()
        loss = loss_fn(model(x), y)
        loss.backward()
        expected = [p.grad for p in model.parameters() if p.grad is not None]
        for replica in range(world // stages):
            ranks = found[replica * stages : (replica + 1) * stages]
            assert all(abs(of[name][0] - loss.item()) < 1e-12 for of in ranks)
            gradients = [torch.tensor(gradient, dtype=torch.float64) for of in ranks for gradient in of[name][1]]
            assert all(torch.allclose(one, other, rtol=1e-11) for one, other in zip(gradients, expected, strict=True))


def test_a_loss_that_leaves_labels_out_is_reported_where_targets_are_read(pool: WorkerPool) -> None:
    first, last = answers(pool.run(jobs.ignored, world=2))
    assert first == []
    assert len(last) == 1


def test_the_norm_of_a_part_is_refused_with_the_pipes_own(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.norms, world=2))
    model = nn.Sequential(*plain())
    x, y = data()
    LOSSES["entropy"](model(x), y).backward()
    norm = float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))
    for told, own in found:
        assert all("[partial-norm]" in text for text in told), told
        assert abs(own - norm) < 1e-10
    ((told, own),) = answers(pool.run(jobs.norms, world=1))
    assert all(float(text.removeprefix("tensor(").partition(",")[0]) > 0 for text in told)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layer", "the repr of 2.1 is 'Dropout(p=0.1, inplace=False)' on rank 0 and 'Dropout(p=0.5, inplace=False)'"),
        ("seed", "pipe.seed is 5 on rank "),
        ("autocast", "bfloat16"),
        ("max_norm", "Ranks have different values: max_norm is 0.1 on rank 0 and 0.5 on rank "),
        ("norm_type", "Ranks have different values: norm_type is 2.0 on rank 0 and 1.0 on rank "),
    ],
)
def test_what_would_be_silently_wrong_on_one_rank_is_refused_on_all(
    name: str, text: str, world: int, pool: WorkerPool
) -> None:
    for outcome in pool.run(jobs.apart, name, world=world):
        assert text in outcome.text, str(outcome)


def test_an_optimizer_that_puts_all_parameters_together_is_refused_those_of_a_part(pool: WorkerPool) -> None:
    for told in answers(pool.run(jobs.lbfgs, 2, world=2)):
        assert all("[partial-lbfgs]" in text for text in told), told
    for told in answers(pool.run(jobs.lbfgs, 1, world=2)):  # replicas have all of them
        assert all(text.startswith("tensor(") for text in told), told


def by_loop(name: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights after training by the reference loop: three micro-batches, one after the other.

    As documented, the gradient of a tied weight is the sum over micro-batches of one layer, then of the other.
    """
    model: Any = nn.Sequential(*jobs.matrices())
    optimizer = jobs.OPTIMIZERS[name](model.parameters())
    tied, other = model[0].weight, nn.Parameter(model[0].weight.detach().clone())
    model[4].weight = other
    for step in range(steps):
        for x, y in zip(*(part.chunk(3) for part in jobs.rows(0, 1, step)), strict=True):
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
        tied.grad += other.grad
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            other.copy_(tied)
    return dict(model.state_dict())


@pytest.mark.parametrize("name", jobs.OPTIMIZERS)
def test_optimizers_of_whole_matrices_leave_the_bits_of_the_loop_also_after_a_checkpoint_at_another_k(
    name: str, pool: WorkerPool, tmp_path: Path
) -> None:
    expected = {2: by_loop(name, 2), 4: by_loop(name, 4)}
    for first, stages in ((0, 2), (2, 3)):
        found = answers(pool.run(jobs.whole_matrices, stages, name, str(tmp_path), first, world=stages))
        together = {key: torch.tensor(weight) for of in found for key, weight in of.items()}
        assert together.keys() == expected[first + 2].keys()
        for key, weight in expected[first + 2].items():
            assert torch.equal(together[key], weight), (first, key)


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_replicas_of_a_pipe_leave_the_bits_of_replicas_of_one_stage(
    name: str, pool: WorkerPool, tmp_path: Path
) -> None:
    alone = answers(pool.run(jobs.whole_matrices, 1, name, str(tmp_path / "alone"), world=2))
    found = answers(pool.run(jobs.whole_matrices, 2, name, str(tmp_path / "pipe"), world=4))
    assert alone[0] == alone[1] == found[0] | found[1] == found[2] | found[3]


def test_optimizers_of_whole_matrices_are_refused_weights_that_are_sharded(pool: WorkerPool) -> None:
    text = "needs whole matrices, but 1 of its 2 weights are sharded, such as one of shape (6, 6)"
    for refused, unchanged, *others in answers(pool.run(jobs.sharded_matrices, world=2)):
        for told, name in zip(refused, ("Muon", "Adafactor", "Adafactor"), strict=True):
            assert f"ValueError: {name} {text}" in told
            assert "[sharded-whole-matrix]" in told
        assert unchanged
        assert others == ["None"] * 4


def test_layers_of_other_stages_keep_no_weights_that_would_grow_stale(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.released, world=2))
    names = sorted(nn.Sequential(*network()).state_dict())
    for of in found:
        assert of["gone"]
        assert sorted([*of["gone"], *of["own"]]) == names
        model, _, single = of["told"]
        assert "[remote-parameter]" in model
        assert "has no values" in single
        assert "[layer-without-values]" in of["again"]
    assert "[remote-parameter]" in "".join(of["told"][1] for of in found)


def test_who_asks_for_gradients_of_other_stages_is_told_whose_they_are(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.asked, world=2))
    for of in found:
        for text in of["told"]:
            assert "[remote-parameter]" in text
            assert "Use pipe.parameters(), pipe.zero_grad() or pipe.clip_grad_norm_" in text
        assert of["kinds"] == ["Parameter", "Tensor"]
        assert of["loss"] == found[0]["loss"]
    assert sum(of["grads"] for of in found) == len(list(nn.Sequential(*network()).parameters()))


def test_what_an_own_layer_shares_stays(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.shared, world=3))
    assert found == [[[False], [True, True], [False]], [[True], [False, False], [True]], found[0]]


def test_a_refused_pipe_leaves_the_modules_as_they_are(pool: WorkerPool) -> None:
    assert not any(flag for of in answers(pool.run(jobs.refused, world=2)) for flag in of)


def test_layers_are_found_by_their_place_among_all(pool: WorkerPool) -> None:
    (first, held), (last, _) = answers(pool.run(jobs.places, world=2))
    assert held == sum("in another process" not in text for text in first)
    assert all(
        ("in another process" in one) != ("in another process" in other)
        for one, other in zip(first, last, strict=True)
    )


def test_tracebacks_are_short_in_all_processes(pool: WorkerPool) -> None:
    heard, raised = pool.run(jobs.broken, world=2)
    assert (heard.error, raised.error) == ("RemoteError", "ValueError")
    for outcome in (heard, raised):
        ours = [line for line in outcome.text.splitlines() if "/src/gpipe/" in line and "File" in line]
        assert len(ours) == 1, outcome.text
        assert "in step" in ours[0]
        assert "layer 3 (3: Breaks)" in outcome.text
