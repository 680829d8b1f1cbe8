"""Tests that Trainer trains over several processes as in one process, and over replicas like its own replicas."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trained import MIDDLE, apart
from tests.support.jobs import trainer as jobs
from tests.support.jobs.trainer import saved
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

CASES: dict[str, tuple[int, int, str, str, dict[str, Any]]] = {
    "two processes": (2, 2, "llama", "plain", {"pipe": {"schedule": "1f1b"}}),
    "three processes": (3, 3, "deberta-v2", "plain", {}),
    "two replicas": (4, 2, "gpt2", "plain", {"include_num_input_tokens_seen": "all"}),
    "two replicas of one process": (2, 1, "llama", "plain", {}),
    "adapters": (2, 2, "llama", "lora", {"label_smoothing_factor": 0.1}),
    "in bf16": (2, 2, "llama", "bf16", {}),
    "a loss of one's own": (2, 2, "llama", "plain", {"loss": "own"}),
    "a loss of one's own in two replicas": (4, 2, "llama", "plain", {"loss": "own"}),
    "a batch whose loss is no number": (2, 2, "llama", "plain", {"loss": "spoilt", "max_grad_norm": 0.0}),
    "no number in one of two replicas": (4, 2, "llama", "plain", {"loss": "spoilt", "max_grad_norm": 0.0}),
    "no number, and not filtered": (2, 2, "llama", "plain", {"loss": "spoilt", "logging_nan_inf_filter": False}),
    "packed": (3, 3, "llama", "plain", {"packed": True, "pipe": {"schedule": "1f1b"}}),
    "packed in two replicas": (4, 2, "llama", "plain", {"packed": True}),
    "pictures": (2, 2, "vit", "plain", {"max_grad_norm": 0.01}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_over_processes_trainer_leaves_the_same(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    world, partitions, family, mode, how = CASES[name]
    how = {"eval_strategy": "steps", "eval_steps": 2, **how}
    found = answers(pool.run(jobs.train, partitions, family, mode, str(tmp_path), how, world=world))
    plain = {key: value for key, value in how.items() if key != "pipe"}
    folder = tmp_path / "by itself"
    expected = answers(pool.run(jobs.train, 0, family, mode, str(folder), plain, world=world // partitions))
    assert found == [expected[0]] * world
    assert apart(saved(found[0], tmp_path), saved(expected[0], folder)) == 0.0


@pytest.mark.parametrize(("begun", "begins"), [(2, 2), (1, 0)], ids=["begun by a pipe", "begun by Trainer itself"])
def test_a_training_goes_on_with_other_numbers_of_processes(
    begun: int, begins: int, pool: WorkerPool, tmp_path: Path
) -> None:
    resume = f"{tmp_path}/first/checkpoint-{MIDDLE}"
    answers(pool.run(jobs.train, begins, "llama", "plain", f"{tmp_path}/first", {}, world=begun))
    outcomes, predictions = [], []
    for world, partitions in ((3, 3), (1, 2), (1, 0)):  # processes, threads, and Trainer by itself
        folder = tmp_path / f"{world} {partitions}"
        told = answers(pool.run(jobs.train, partitions, "llama", "plain", str(folder), {}, resume, world=world))
        predictions.append(told[0][1])
        outcomes.append(saved(told[0], folder))
    assert all(apart(found, outcomes[2]) == 0.0 for found in outcomes)
    assert predictions[:2] == predictions[2:] * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("begun", "begins"), [(4, 2), (2, 0)], ids=["begun by a pipe", "begun by Trainer itself"])
def test_replicas_go_on_where_replicas_were(begun: int, begins: int, pool: WorkerPool, tmp_path: Path) -> None:
    how, resume = {"per_device_train_batch_size": 1}, f"{tmp_path}/first/checkpoint-{MIDDLE}"
    answers(pool.run(jobs.train, begins, "llama", "lora", f"{tmp_path}/first", how, world=begun))
    outcomes = []
    for world, partitions in ((4, 2), (2, 1), (2, 0)):
        folder = tmp_path / f"{world} {partitions}"
        told = answers(pool.run(jobs.train, partitions, "llama", "lora", str(folder), how, resume, world=world))
        outcomes.append(saved(told[0], folder))
    assert all(apart(found, outcomes[2]) == 0.0 for found in outcomes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world", "partitions"), [(2, 2), (3, 3), (4, 2)])
def test_callbacks_and_logs_are_trainers_and_the_rows_of_a_step_those_of_all_replicas(
    world: int, partitions: int, pool: WorkerPool, tmp_path: Path
) -> None:
    found = answers(pool.run(jobs.watch, partitions, str(tmp_path / "piped"), world=world))
    replicas = world // partitions
    (seen, log, rows), *_ = answers(pool.run(jobs.watch, 0, str(tmp_path / "plain"), world=replicas))[0]
    assert [one[0] for one in found] == [[seen, log, rows]] * world
    assert rows == 2 * 4 * replicas
    assert sum(name == "on_step_end" for name, *_ in seen) == seen[-1][1] >= 2
    for _, steps, shares in found:
        assert steps == [[at, 1] for at in range(1, seen[-1][1] + 1)]
        assert shares == pytest.approx([1.0] * len(steps))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world", "partitions"), [(2, 2), (4, 2)])
def test_evaluation_may_come_first_and_labels_may_lack(
    world: int, partitions: int, pool: WorkerPool, tmp_path: Path
) -> None:
    """Trainer's own replicas train apart if they have evaluated before, so it is held to some that have not."""
    found = answers(pool.run(jobs.predict, partitions, str(tmp_path / "piped"), True, world=world))
    expected, trained = (
        answers(pool.run(jobs.predict, 0, str(tmp_path / "plain"), first, world=world // partitions))
        for first in (True, False)
    )
    assert found == [[expected[0][0], trained[0][1]]] * world


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["plain", "lora"])
def test_the_best_weights_come_back_into_all_partitions(mode: str, pool: WorkerPool, tmp_path: Path) -> None:
    found = answers(pool.run(jobs.best, 2, mode, str(tmp_path / "piped"), world=2))
    assert found == answers(pool.run(jobs.best, 0, mode, str(tmp_path / "plain"), world=1)) * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world", "partitions"), [(2, 2), (4, 2)])
def test_sequences_are_generated(world: int, partitions: int, pool: WorkerPool, tmp_path: Path) -> None:
    found = answers(pool.run(jobs.generate, partitions, str(tmp_path / "piped"), world=world))
    expected = answers(pool.run(jobs.generate, 0, str(tmp_path / "plain"), world=world // partitions))
    assert found == [expected[0]] * world


def test_dropout_is_the_same_over_processes(pool: WorkerPool, tmp_path: Path) -> None:
    told = [
        answers(pool.run(jobs.drop, partitions, str(tmp_path / str(world)), world=world))[0]
        for world, partitions in ((1, 2), (2, 2), (3, 3))
    ]
    assert told == told[:1] * 3


@pytest.mark.parametrize(
    ("partitions", "how", "text"),
    [
        (3, {}, "not divisible by partitions=3"),
        (2, {"pipe": {"driver": "threads"}}, "supports one process"),
        (2, {"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        (2, {"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ],
)
def test_what_cannot_be_over_processes_is_refused(
    partitions: int, how: dict[str, Any], text: str, pool: WorkerPool, tmp_path: Path
) -> None:
    assert all(text in said for said in answers(pool.run(jobs.refuse, str(tmp_path), partitions, how, world=2)))


def test_processes_of_a_replica_that_read_other_rows_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    told = answers(pool.run(jobs.read_apart, str(tmp_path), world=2))
    assert all("[different-batches-in-replica]" in one for one in told)


def test_a_loss_that_gathers_is_refused_and_nobody_waits(pool: WorkerPool, tmp_path: Path) -> None:
    told = answers(pool.run(jobs.gather_in_loss, str(tmp_path), world=2))
    assert all("[gather-in-compute-loss]" in one for one in told)
