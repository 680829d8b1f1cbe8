"""Ready-made micro-batches over processes: the same bits, whoever reads them, and whatever each replica has."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import ready_made as jobs
from tests.support.jobs.data_parallel import normalized
from tests.support.jobs.ready_made import MOST, SEED, SIZES, data, loss_of
from tests.support.networks import network
from tests.support.plain_loop import Loop, one_thread, squares
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


def forwards(layers: Sequence[nn.Module], replica: int, step: int) -> list[Any]:
    """The output of each micro-batch of a replica, keyed behind those of the replicas before it."""
    outputs: list[Any] = Loop(layers, MOST, SEED, step=step, first=replica * MOST)(data(SIZES[replica], replica))
    return outputs


def losses(layers: Sequence[nn.Module], replica: int, step: int) -> Tensor:
    """The losses of a replica, each weighted by its elements; after all backwards if there is grad."""
    positions = [[rows * length for rows, length in sizes] for sizes in SIZES]
    shares = [count / sum(map(sum, positions)) for count in positions[replica]]
    outputs, targets = forwards(layers, replica, step), data(SIZES[replica], 2 + replica)
    found = [squares(output, target) for output, target in zip(outputs, targets, strict=True)]
    for loss, share in zip(found, shares, strict=True):
        if torch.is_grad_enabled():
            loss.backward(torch.full_like(loss, share))
    return torch.stack([loss.detach() * share for loss, share in zip(found, shares, strict=True)])


def sums(replicas: Sequence[Sequence[nn.Module]]) -> dict[str, Any]:
    both = [dict(nn.Sequential(*layers).named_parameters()) for layers in replicas]
    return {name: (p.grad + both[1][name].grad).tolist() for name, p in both[0].items()}  # type: ignore[operator]  # there are


def added(found: Tensor) -> Tensor:
    first, *others = found
    return sum(others, start=first)


@pytest.mark.parametrize(
    "how", [{}, {"schedule": "1f1b", "remat": "never"}, {"schedule": "zb_h1", "remat": "except_last"}]
)
def test_replicas_of_other_rows_and_lengths_have_the_bits_of_the_plain_loop(
    how: dict[str, Any], pool: WorkerPool
) -> None:
    found = answers(pool.run(jobs.train, how, world=4))
    with one_thread():
        trained, called = ([network(), network()] for _ in range(2))
        loss = sum(added(losses(layers, replica, 0)) for replica, layers in enumerate(trained))
        with torch.no_grad():
            validated = sum(added(losses(layers, replica, 1)) for replica, layers in enumerate(trained))
        made = [forwards(layers, replica, 3) for replica, layers in enumerate(called)]
        for replica, outputs in enumerate(made):
            loss_of(replica, outputs).backward()
        evaluated = [[out.tolist() for out in forwards(trained[0], replica, 2)] for replica in (0, 1)]
    for rank, answer in enumerate(found):
        assert answer["loss"] == loss.item()  # type: ignore[union-attr]  # a tensor
        assert answer["validated"] == validated.item()  # type: ignore[union-attr]
        assert answer["evaluated"] == (evaluated[rank // 2] if rank % 2 else None)
        assert answer["outputs"] == [out.tolist() for out in made[rank // 2]]
    for key, replicas in {"gradients": trained, "later": called}.items():
        for replica in (0, 1):
            held = {name: g for answer in found[2 * replica :][:2] for name, g in answer[key].items()}
            assert held == sums(replicas)


def test_a_replica_that_leaves_out_an_output_does_not_keep_the_others_waiting_for_their_norms(
    pool: WorkerPool,
) -> None:
    rows = [[3, 2], [2, 4]]
    found = answers(pool.run(jobs.normalize, rows, world=4))
    inputs = [data([[n] for n in some], replica) for replica, some in enumerate(rows)]
    whole = nn.Sequential(*normalized())
    outputs = [
        whole(torch.cat(both)).split([rows[0][m], rows[1][m]]) for m, both in enumerate(zip(*inputs, strict=True))
    ]
    sum((loss_of(replica, [out[replica] for out in outputs]) for replica in (0, 1)), torch.zeros(())).backward()
    held = {name: g for answer in found[:2] for name, g in answer.items()}
    right = dict(whole.named_parameters())
    assert held.keys() == right.keys()
    for name, p in right.items():
        torch.testing.assert_close(torch.tensor(held[name]), p.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert found[2:] == found[:2]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([2, None], "gpipe.MicroBatches, but targets are not"),
        ([None, 3], "gpipe.MicroBatches, but inputs are not"),
        ([3, 2], "inputs has 3 and targets has 2 micro-batches"),
    ],
)
def test_targets_that_do_not_fit_are_named_on_every_rank(
    counts: list[int | None], text: str, pool: WorkerPool
) -> None:
    found: list[Any] = answers(pool.run(jobs.mistake, counts, world=2))
    assert [told.partition(": ")[0] for told, _ in found] == ["RemoteError", "ValueError"]
    assert all(text in told and "[micro-batches-mixed]" in told and next_one for told, next_one in found)
