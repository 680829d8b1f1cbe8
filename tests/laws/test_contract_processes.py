"""What a pipe over processes promises: what each rank gives, gets and holds, and what it leaves behind."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpipe
from tests.support.jobs import contract as jobs
from tests.support.jobs.contract import INSTEAD, MICRO_BATCHES, ODD, SEED, tied
from tests.support.networks import data, network, squared, with_metrics, words
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers, told_by

WORLDS = [1, 2, 4]


def local(layers: Any = None) -> gpipe.GPipe:
    return gpipe.GPipe(layers or network(), 1, MICRO_BATCHES, seed=SEED, driver="lockstep")


# What is given, and what comes back.


@pytest.mark.parametrize("world", WORLDS)
def test_inputs_are_read_on_the_first_rank_alone_and_targets_on_the_last(world: int, pool: WorkerPool) -> None:
    pipe = local()
    x, y = data(0, 10)
    each: list[Tensor] = []
    loss, metrics = pipe.step(x, y, with_metrics, losses=each)
    losses = [one.item() for one in each]
    told = [[one["worst"].item(), one["of rows"][1], one["none"]] for one in metrics]
    with torch.no_grad():
        validation = pipe.step(x, y, F.mse_loss).item()
        pipe(x)
        everywhere = pipe(x).tolist()
    output = pipe(x)
    F.mse_loss(output, y).backward()
    norms = [float(p.grad.norm()) for p in pipe.parameters() if p.grad is not None]
    found = answers(pool.run(jobs.only_where_read, world=world))
    assert [given for given, *_ in found] == [
        [loss.item(), losses, validation, told, everywhere, output.tolist()]
    ] * world
    assert [norm for _, of_rank, *_ in found for norm in of_rank] == norms
    assert all(wants == [True, False] for _, _, wants, *_ in found)
    assert all(alone and "gather=True" in text for *_, alone, text in found)  # the output, where it is not gathered


# What each rank holds.


@pytest.mark.parametrize("world", WORLDS)
def test_parameters_are_the_ranks_own_by_their_names_in_the_whole_model(world: int, pool: WorkerPool) -> None:
    pipe = local(tied())
    pipe.step(*words(0, 9), squared)
    whole = {name: value.tolist() for name, value in pipe.state_dict().items()}
    state: dict[str, Any] = {}
    held: list[str] = []
    for named, count, own in answers(pool.run(jobs.names, world=world)):
        assert len(set(named)) == len(named) == count
        assert not state.keys() & own.keys()
        state |= own
        held += named
    assert state == whole
    assert list(dict.fromkeys(held)) == [name for name, _ in pipe.named_parameters()]
    assert held.count("0.weight") == min(world, 2)  # tied, and under its first name on both
    assert len(held) == len(set(held)) + (world > 1)


@pytest.mark.parametrize("world", WORLDS)
def test_a_recording_has_the_spans_of_all_ranks_on_every_rank(world: int, pool: WorkerPool) -> None:
    first, *others = answers(pool.run(jobs.record, world=world))
    assert len(first) == 3  # a step, a forward, a backward
    assert all(other == first for other in others)
    pipe = gpipe.GPipe(network(), world, MICRO_BATCHES, seed=SEED)
    for ranks, seconds, spans in first:
        assert ranks == world
        assert {rank for rank, *_ in spans} == set(range(world))
        assert all(0 <= start <= end for *_, start, end in spans)
        assert max(end for *_, end in spans) <= seconds
    done = sorted(action for _, action, *_ in first[0][2] if "RECEIVE" not in action)
    assert done == sorted(str(a) for row in pipe.program.table for a in row if a.kind.value in "FRB")


@pytest.mark.parametrize("world", WORLDS)
def test_a_pipe_loads_its_part_goes_on_in_copies_and_opens_again(world: int, pool: WorkerPool) -> None:
    pipe = local(network(8))
    losses = [pipe.step(*data(step, 10), F.mse_loss).item() for step in range(5)]
    for found, files in answers(pool.run(jobs.go_on, world=world)):
        assert found == losses
        assert files[-1] < files[1] + 3  # as many as it would be, if each time one stayed open


# Ranks that do not agree.


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", ODD)
def test_ranks_with_other_arguments_are_refused_on_all_ranks_by_name(name: str, odd: int, pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.differ, name, odd)
    assert all(outcome.error in ("ValueError", "RemoteError") for outcome in outcomes), told_by(outcomes)
    for outcome in outcomes:
        assert jobs.NAMED[name] in outcome.told, told_by(outcomes)
        assert f"rank {odd}" in outcome.told or outcome.rank == odd, told_by(outcomes)


def test_a_mesh_that_leaves_a_rank_out_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.mesh_without)
    assert [outcome.error for outcome in outcomes] == ["RemoteError"] * 3 + ["ValueError"]
    assert all("this process is rank 3" in outcome.told for outcome in outcomes), told_by(outcomes)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("name", INSTEAD)
def test_a_rank_that_does_something_else_is_named_and_all_can_go_on(name: str, odd: int, pool: WorkerPool) -> None:
    pipe = local()
    pipe.step(*data(0, 10), F.mse_loss)
    expected = pipe.step(*data(0, 10), F.mse_loss).item()
    found = answers(pool.run(jobs.come_apart, name, odd))
    for raised, loss in found:
        assert raised.startswith(("ValueError: ", "RemoteError: ")), found
        assert INSTEAD[name][1].format(odd=odd) in raised, found
        assert "what was called is " not in raised or "step on rank " in raised, found
        assert f"rank {odd}" in raised or odd == 0, found
        assert loss == expected


def test_backwards_in_different_orders_are_named(pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.backward_apart)
    assert all("the call that backward belongs to" in outcome.told for outcome in outcomes), told_by(outcomes)


# What is left behind, and what is open meanwhile.


def test_a_run_listens_nowhere_and_leaves_nothing_behind(tmp_path: Path, pool: WorkerPool) -> None:
    for listening, folder, memory, sockets in answers(pool.run(jobs.leave, str(tmp_path), -1)):
        assert all(address.startswith("127.") or address == "::1" for _, address, _ in listening)
        assert (folder, memory, sockets) == ([], [], [])


def test_a_run_opens_no_port_of_its_own(pool: WorkerPool) -> None:
    assert answers(pool.run(jobs.ports_opened)) == [0] * 4


@pytest.mark.parametrize("when", [1, 6], ids=["in the first step", "in a later step"])
def test_a_killed_run_leaves_nothing_behind(when: int, tmp_path: Path) -> None:
    outcomes = run_ranks(2, jobs.leave, str(tmp_path), when)
    assert outcomes[1].code == -9
    assert not outcomes[0].answered
    assert list(tmp_path.iterdir()) == []
    assert jobs.named_memory() == []


# No pickle.

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
RUNS = {"eval", "exec", "torch.load", "torch.save", "torch.jit.load", "yaml.load", "np.load", "numpy.load"}
SOURCES = sorted(Path(gpipe.__file__).parent.rglob("*.py"))


def pickles_in(source: str) -> list[str]:
    """Where a module imports a pickle, has torch use one, or runs what is read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in PICKLES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in PICKLES:
                found.append(module)
            case ast.Call(func=func) if (name := ast.unparse(func)) in RUNS:
                found.append(name)
            case ast.Attribute(attr=str(name)) | ast.Name(id=str(name)) if is_object_collective(name):
                found.append(name)
    return found


def is_object_collective(name: str) -> bool:
    return any(part in name for part in ("_object", "object_list")) and hasattr(torch.distributed, name)


def test_nothing_is_pickled_by_us_or_for_us() -> None:
    found = {f"{path.parent.name}/{path.name}": pickles_in(path.read_text()) for path in SOURCES}
    assert found.pop("planner/measure.py") == [
        "pickle"
    ]  # what is only compared, of layers that are alike, is never read
    # the optimizer's state as Trainer writes and reads it: of tensors and plain values alone
    assert found.pop("integrations/whole_checkpoints.py") == ["torch.save", "torch.load"]
    # what a replica that comes back is given by the others, with `weights_only`: of a job's own processes
    assert found.pop("distributed/survivors.py") == ["torch.save", "torch.load"]
    assert not any(found.values()), found


def test_the_look_for_pickles_itself_works() -> None:
    assert pickles_in("import pickle") == ["pickle"]
    assert pickles_in("from pickle import dumps") == ["pickle"]
    assert pickles_in("torch.load(x); torch.save(x); torch.nn.load(x)") == ["torch.load", "torch.save"]
    collectives = ["all_gather_object", "broadcast_object_list", "send_object_list", "gather_object"]
    assert pickles_in("; ".join(f"dist.{name}()" for name in collectives)) == collectives


def test_what_shares_memory_with_something_else_that_crosses_is_not_changed_in_place(pool: WorkerPool) -> None:
    """Bug story: over processes they arrive apart, and the other one kept its old numbers, silently."""
    assert all(
        "shares its memory with another one" in text for text in answers(pool.run(jobs.views_changed, world=2))
    )
