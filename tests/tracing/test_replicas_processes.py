"""Replicas of a model with unlike mini-batches do what one pipe does that is given the micro-batches of both.

They do so but for rounding: each adds up the gradients of its own micro-batches first.
"""

import pytest
import torch

from tests.support.jobs import model_replicas as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


@pytest.mark.parametrize(
    ("name", "ready_made", "schedule"),
    [("llama", False, "gpipe"), ("llama", True, "1f1b"), ("bert", False, "1f1b"), ("vit", False, "gpipe")],
)
def test_replicas_share_the_loss_as_their_micro_batches_do(
    name: str, ready_made: bool, schedule: str, pool: WorkerPool
) -> None:
    expected = {what: value for what, value in jobs.alone(name, ready_made=ready_made).items() if value is not None}
    first, second, *others = answers(pool.run(jobs.train, name, ready_made, schedule, world=4))
    assert [first, second] == others
    assert expected.keys() == {*first, *second}
    for what, value in expected.items():
        found = torch.tensor((first if what in first else second)[what])
        assert (found - value).abs().max() <= 2e-6 * value.abs().max().clamp(min=1e-3), what


def test_a_replica_without_labels_that_count_has_no_say(pool: WorkerPool) -> None:
    assert all("no label of the mini-batch counts" in told for told in answers(pool.run(jobs.uncounted, world=4)))
