"""Tensors over process groups, as NCCL carries those of GPUs: here gloo does, and a CPU plays the GPU.

The same jobs as over the links, the same bits, the same failures told.
"""

from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gpipe.distributed import mesh as mesh_module
from gpipe.distributed.mesh import find_position
from gpipe.distributed.nccl import matchings
from tests.support.jobs import process_groups as jobs
from tests.support.jobs.training import MICRO_BATCHES, faulty_layer, reference
from tests.support.jobs.values import REFUSED, expected, unrefused
from tests.support.kinds.values import VALUES
from tests.support.processes.digests import digests, wrong
from tests.support.processes.faults import Fault
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers
from tests.support.same_bits_stories import STORIES, maker

pairs = st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]))


# Laws.


@given(pairs)
def test_no_process_has_two_peers_of_one_number_and_few_numbers_are_enough(pairs: set[tuple[int, int]]) -> None:
    found = matchings(pairs)
    assert found.keys() == pairs
    used = Counter((process, number) for pair, number in found.items() for process in pair)
    assert all(count == 1 for count in used.values())
    degree = max(Counter(process for pair in pairs for process in pair).values(), default=0)
    assert len(set(found.values())) <= max(0, 2 * degree - 1)


@pytest.mark.parametrize("name", STORIES)
def test_scripts_have_the_bits_of_the_local_run(name: str, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.over_wires, True, "same_bits", "tell", name, world=3))
    assert not wrong(found, digests(STORIES[name].run(maker(1, driver="lockstep", remat="never"))))


@pytest.mark.parametrize(
    ("kind", "grouped"),
    [*((kind, True) for kind in VALUES), ("nested", False), ("transposed", False), ("slices", False)],
)
def test_a_value_comes_as_it_left(kind: str, grouped: bool, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.over_wires, grouped, "values", "carry", kind, world=3))
    (made, _, _), (_, given, _) = found[0], found[-1]
    assert given == made
    assert not wrong([own for _, _, own in found], expected(kind))


def test_replicas_reduce_over_groups_to_the_same_bits(pool: WorkerPool) -> None:
    how: list[Any] = ["data_parallel", "train", 2, [7, 3]]
    assert answers(pool.run(jobs.over_wires, True, *how)) == answers(pool.run(jobs.over_wires, False, *how))


# Examples.


def test_each_activation_and_each_gradient_is_sent_once_and_goes_to_one_other(pool: WorkerPool) -> None:
    row = 24  # bytes: six numbers; there is nothing else as small
    found = answers(pool.run(jobs.count, world=3))
    assert [sent.count(row) for sent, _ in found] == [4, 8, 4]
    assert [received.count(row) for _, received in found] == [4, 8, 4]


# What goes wrong.


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1])
def test_after_a_failure_all_go_on_over_the_same_groups_with_the_same_bits(
    stage: int, phase: str, pool: WorkerPool
) -> None:
    fault = Fault("FaultError", phase, faulty_layer(stage, 2))
    how: list[Any] = ["training", "train", asdict(fault), True]
    found = answers(pool.run(jobs.over_wires, True, *how, world=2))
    right = reference(Fault("", ""))
    for rank, own in enumerate(found):
        assert own["losses"] == right["losses"]
        assert own["parameters"].items() <= right["parameters"].items()
        assert own["failure"]["error"] == ("FaultError" if rank == stage else "RemoteError")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_leaves_both_ends_in_step(kind: str, pool: WorkerPool) -> None:
    found: list[Any] = answers(pool.run(jobs.over_wires, True, "values", "refuse", kind, world=2))
    assert all(REFUSED[kind][1] in text for text, _ in found)
    assert not wrong([own for _, own in found], unrefused())


def test_a_rank_that_dies_is_named_by_all_others() -> None:
    stage = 1
    fault = Fault("SIGKILL", "forward", faulty_layer(stage, 4), micro_batch=MICRO_BATCHES - 1)
    outcomes = run_ranks(4, jobs.over_wires, True, "training", "train", asdict(fault), False)
    for outcome in outcomes:
        if outcome.rank != stage:
            assert outcome.error == "RemoteError"
            assert f"rank {stage} is gone" in outcome.told


def test_one_queue_for_all_streams_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(mesh_dim_names=("pp",), mesh=torch.arange(2), device_type="cuda")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    position, (found,) = find_position(mesh, 2, 2)
    assert position is None
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in found
    mesh.device_type = "cpu"
    monkeypatch.setattr("gpipe.distributed.mesh.timeout_of_world", lambda: 60.0)
    assert find_position(mesh, 2, 2)[1] == []


CHOICES: dict[str, tuple[dict[str, Any], int | None]] = {
    "the device of the group": ({"bound": 3, "current": 1, "LOCAL_RANK": 2}, 3),
    "the only device": ({"count": 1, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}, 0),
    "the current device": ({"current": 1, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}, 1),
    "LOCAL_RANK": ({"LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}, 2),
    "LOCAL_RANK without LOCAL_WORLD_SIZE": ({"LOCAL_RANK": 2}, 2),
    "the rank": ({"rank": 3, "world": 4}, 3),
    "a worker that owns two of four devices": ({"count": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}, None),
    "LOCAL_RANK of a device that is not visible": ({"count": 2, "LOCAL_RANK": 2}, None),
    "a rank on one of several hosts": ({"rank": 5, "world": 8}, None),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_device_is_the_one_that_was_chosen_or_ambiguous(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, expected = CHOICES[name]
    group = SimpleNamespace(bound_device_id=torch.device("cuda", settings["bound"]) if "bound" in settings else None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: settings.get("rank", 0))
    monkeypatch.setattr(dist, "get_world_size", lambda: settings.get("world", 1))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: settings.get("count", 4))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: settings.get("current", 0))
    monkeypatch.setattr(mesh_module, "timeout_of_world", lambda: 60.0)
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
        if variable in settings:
            monkeypatch.setenv(variable, str(settings[variable]))
    rank = settings.get("rank", 0)
    mesh: Any = SimpleNamespace(mesh_dim_names=("pp",), mesh=torch.tensor([rank]), device_type="cuda")
    position, wrong = find_position(mesh, 1, 1)
    if expected is None:
        assert position is None
        assert "[ambiguous-device]" in wrong[0]
    else:
        assert position is not None
        assert position.device == torch.device("cuda", expected)
