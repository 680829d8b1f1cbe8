"""Tests that a model over several processes trains bitwise like a pipe in one process.

The model may be created on the meta device, and be larger than the memory of a process. Replicas agree with one pipe
over all micro-batches up to rounding, because each replica sums the gradients of its own micro-batches first.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import model_replicas, too_big
from tests.support.jobs import models as jobs
from tests.support.jobs.models import batches, piped, stepped, trained
from tests.support.open_models import TIED, model_of
from tests.support.plain_loop import weights_of
from tests.support.processes.digests import Digests, digest, digests
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"schedule": "1f1b", "remat": "never"}),
    "gpipe": (3, {}),
    "four": (4, {"schedule": "1f1b"}),
    "interleaved": (2, {"schedule": "interleaved", "remat": "never"}),
    "zb_v": (2, {"schedule": "zb_v"}),
    "dualpipe_v": (2, {"schedule": "dualpipe_v", "remat": "never"}),
}


@cache
def alone(name: str) -> tuple[Digests, Digests]:
    """Returns the results of one process."""
    with piped(model_of(name), name, 1, driver="lockstep") as pipe:
        found = digests(trained(pipe, name))
        return found, {key: digest(value) for key, value in pipe.state_dict().items()}


CASES = {
    "llama": ("1f1b", "interleaved"),
    "gpt2": ("gpipe", "zb_v"),
    "t5": ("four", "dualpipe_v"),
    "bert": ("four", "1f1b"),
    "vipllava": ("four",),
    "unet": ("gpipe", "interleaved", "dualpipe_v"),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in CASES.items() for way in ways])
def test_the_bits_of_one_process(name: str, way: str, pool: WorkerPool) -> None:
    world, how = WAYS[way]
    expected, whole = alone(name)
    ranks = answers(pool.run(jobs.train, name, how, world=world))
    wrong = [
        f"{what} on rank {rank} is {one}, not {expected.get(what)}"
        for rank, (found, _) in enumerate(ranks)
        for what, one in found.items()
        if one != expected.get(what)
    ]
    assert not wrong, "\n".join(wrong)
    assert not expected.keys() - {what for found, _ in ranks for what in found}
    assert {key: one for _, state in ranks for key, one in state.items()} == whole
    held = [key for _, state in ranks for key in state]
    twice = {key for key in held if held.count(key) > 1}
    assert name in TIED or not twice, twice


@cache
def alone_from_meta(name: str) -> Digests:
    """Returns the results of one process, for a model that was created on the meta device."""
    with piped(model_of(name, "meta"), name, 1, driver="lockstep") as pipe:
        return digests(stepped(pipe, batches(name)))


@pytest.mark.parametrize(
    ("name", "world"), [("llama", 4), ("gpt2", 4), ("mixtral", 2), ("experts", 2), ("t5", 4), ("vit", 2)]
)
def test_a_model_without_values_gets_them(name: str, world: int, pool: WorkerPool) -> None:
    expected = alone_from_meta(name)
    ranks = answers(pool.run(jobs.train_from_meta, name, {"schedule": "1f1b"}, world=world))
    for found, others in ranks:
        assert not [what for what, one in found.items() if expected.get(what) != one]
        assert not others
    assert expected.keys() == {what for found, _ in ranks for what in found}


@pytest.mark.parametrize(
    ("name", "ready_made", "schedule"),
    [("llama", False, "gpipe"), ("llama", True, "1f1b"), ("bert", False, "1f1b"), ("vit", False, "gpipe")],
)
def test_replicas_share_the_loss_as_their_micro_batches_do(
    name: str, ready_made: bool, schedule: str, pool: WorkerPool
) -> None:
    whole = model_replicas.alone(name, ready_made=ready_made)
    expected = {what: value for what, value in whole.items() if value is not None}
    first, second, *others = answers(pool.run(model_replicas.train, name, ready_made, schedule, world=4))
    assert [first, second] == others
    assert expected.keys() == {*first, *second}
    for what, value in expected.items():
        found = torch.tensor((first if what in first else second)[what])
        assert (found - value).abs().max() <= 2e-6 * value.abs().max().clamp(min=1e-3), what


def test_a_replica_without_labels_that_count_has_no_say(pool: WorkerPool) -> None:
    told = answers(pool.run(model_replicas.uncounted, world=4))
    assert all("[all-labels-ignored]" in error for error in told)


TOO_BIG_WORLD = 4


def test_a_model_too_big_for_one_process_trains_over_four() -> None:
    # In fresh processes: what earlier jobs have freed counts as what a process has, and would be given to this one.
    found = answers(run_ranks(TOO_BIG_WORLD, too_big.train, ""))
    assert all(of["losses"] == found[0]["losses"] for of in found)
    first, *_, last = found[0]["losses"]
    assert last < first
    whole = too_big.STATE * sum(one["own"] for one in found)
    assert all(of["own"] * too_big.STATE * too_big.SHARE < whole for of in found)
    (outcome,) = run_ranks(1, too_big.train, "")
    assert outcome.error in ("MemoryError", "RuntimeError")
    assert "allocate" in outcome.told


def test_each_process_reads_its_own_weights(tmp_path: Path) -> None:
    with weights_of(3):
        whole = too_big.model("cpu")
    whole.save_pretrained(tmp_path, max_shard_size="30MB")  # type: ignore[operator]  # transformers' own
    assert len(list(tmp_path.glob("*.safetensors"))) > TOO_BIG_WORLD
    found = answers(run_ranks(TOO_BIG_WORLD, too_big.train, str(tmp_path)))
    loss = whole(**too_big.batch()).loss.detach()
    assert abs(found[0]["losses"][0] - float(loss)) < 1e-4
