"""What a pipe over processes promises: what each rank gives, gets and holds, and what it leaves behind."""

import ast
import copy
import gc
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import gpipe
from tests.support.networks import WIDTH, data, network, squared, tied_network, with_metrics, words
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.listening import listening_sockets
from tests.support.processes.outcome import answers, told_by
from tests.support.said import said

SEED, MICRO_BATCHES = 3, 4
Json = Any


def make(world: int, layers: Any = None, **how: Any) -> gpipe.GPipe:
    how = {"seed": SEED, "driver": "process", **how}
    return gpipe.GPipe(
        layers or network(), how.pop("partitions", world), how.pop("micro_batches", MICRO_BATCHES), **how
    )


def on(rank: int, wanted: int, value: object) -> Any:
    """The value on one rank, None on the others."""
    return value if rank == wanted else None


def only_where_read(rank: int, world: int) -> Json:
    """Inputs on the first rank only, targets on the last: losses, metrics and outputs on each; what is refused."""
    pipe = make(world)
    with torch.no_grad():
        alone = pipe(on(rank, 0, data(0, 10)[0]))
    pipe.step_number = 0
    text = said(lambda: pipe(data(0, 10)[0]))
    x, y = data(0, 10)
    x, y = on(rank, 0, x), on(rank, world - 1, y)
    each: list[Tensor] = []
    loss, metrics = pipe.step(x, y, with_metrics, losses=each)
    measured = [[one["worst"].item(), one["of rows"][1], one["none"]] for one in metrics]
    with torch.no_grad():
        validation = pipe.step(x, y, F.mse_loss)
        pipe(x)
        everywhere = pipe(x, gather=True)
    output = pipe(x, gather=True)
    wrong = F.mse_loss(output, data(9, 10)[1])  # another loss than that of the last stage, which counts
    (F.mse_loss(output, y) if rank == world - 1 else wrong).backward()
    norms = [float(p.grad.norm()) for p in pipe.parameters() if p.grad is not None]
    losses = [one.item() for one in each]
    found = [loss.item(), losses, validation.item(), measured, everywhere.tolist(), output.tolist()]
    return [found, norms, [output.requires_grad, everywhere.requires_grad], on(rank, world - 1, alone) is alone, text]


def tied() -> list[nn.Module]:
    layers = tied_network()
    layers[-1].weight = layers[0].weight
    return layers


def names(rank: int, world: int) -> Json:
    pipe = make(world, tied())
    pipe.step(*words(0, 9), squared)
    state = {name: value.tolist() for name, value in pipe.state_dict().items()}
    return [[name for name, _ in pipe.named_parameters()], len(list(pipe.parameters())), state]


def record(rank: int, world: int) -> Json:
    pipe = make(world)
    with gpipe.record(pipe) as recorder:
        pipe.step(*data(0, 10), F.mse_loss)
        F.mse_loss(pipe(data(1, 10)[0], gather=True), data(1, 10)[1]).backward()
    return [
        [
            timeline.ranks,
            timeline.seconds,
            sorted((span.rank, str(span.action), span.start, span.end) for span in timeline.spans),
        ]
        for timeline in recorder.timelines
    ]


def go_on(rank: int, world: int) -> Json:
    """Losses of a pipe that has loaded a whole state, before and after it is closed and of copies in between.

    Also the open files after each time.
    """
    torch.manual_seed(0)
    pipe, losses, files = make(world, nn.Sequential(*network(7))), [], []
    whole = nn.Sequential(*network(8)).state_dict()
    pipe.load_state_dict({name: whole[name] for name in pipe.state_dict()})
    for step in range(5):
        twins = [copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))] if step == 1 else []
        losses.append(pipe.step(*data(step, 10), F.mse_loss).item())
        assert all(twin.step(*data(step, 10), F.mse_loss).item() == losses[-1] for twin in twins)
        for twin in twins:
            twin.close()
        pipe.close()
        gc.collect()  # of jobs before
        files.append(len(os.listdir("/proc/self/fd")))
    return [losses, files]


ODD: Mapping[str, dict[str, Any]] = {
    "partitions": {"partitions": [1, 1, 1, 5]},
    "another K": {"partitions": 2},
    "a K that cannot be": {"partitions": 3},
    "micro_batches": {"micro_batches": 5},
    "remat": {"remat": "never"},
    "remat of one stage": {"remat": ["always", "never", "always", "always"]},
    "seed": {"seed": 4},
    "no seed": {"seed": None},
    "intra_op_threads": {"driver": gpipe.Processes(intra_op_threads=2)},
    "ties": {"ties": [("0.bias", "3.bias")]},
    "batch_norm": {"batch_norm": "deferred"},
    "a wider layer": {"layers": "wider"},
    "another activation": {"layers": "relu"},
    "a layer more": {"layers": "more"},
    "no M": {"micro_batches": 0},
}
"""What one rank gives that the others do not."""
NAMED: Mapping[str, str] = {
    **{name: f"{name} is " for name in ODD},
    "another K": "partitions is ",
    "a K that cannot be": "partitions=3 does not fit 4 processes",
    "remat of one stage": "remat is ",
    "no seed": "seed is ",
    "a wider layer": "layer 4 is ",
    "another activation": "layer 1 is ",
    "a layer more": "layers on rank",
    "no M": "micro_batches=0",
}
"""What every rank must be told."""


def forget_driver(rank: int, world: int) -> Json:
    """What a pipe without driver= says, and steps of pipes that each process has for itself, also from a plan."""
    forgotten = said(lambda: gpipe.GPipe(network(), 2, 0))
    plan = gpipe.find_plan(network(), data(0, 10)[0], 2, partitions=2, micro_batches=2, measure=True)
    losses = []
    for driver in ("threads", "lockstep"):
        with gpipe.GPipe(network(), 2, 2, seed=rank, driver=driver) as pipe:
            losses.append(pipe.step(*data(0, 10 + rank), F.mse_loss).item())
    return [forgotten, plan.partitions, losses]


def differ(rank: int, world: int, name: str, odd: int) -> None:
    how = dict(ODD[name]) if rank == odd else {}
    layers = network()
    match how.pop("layers", None):
        case "wider":
            layers[4], layers[7] = nn.Linear(9, 8), nn.Linear(8, WIDTH)
        case "relu":
            layers[1] = nn.ReLU()
        case "more":
            layers.append(nn.Identity())
    make(world, layers, **how)


def mesh_without(rank: int, world: int) -> None:
    make(world - 1, mesh=DeviceMesh("cpu", torch.arange(world - 1), mesh_dim_names=("pp",)))


# What one rank does while the others make a step.


def step_of_another_number(pipe: gpipe.GPipe, x: Tensor, y: Tensor) -> None:
    pipe.step_number += 1
    pipe.step(x, y, F.mse_loss)


INSTEAD: Mapping[str, tuple[Callable[[gpipe.GPipe, Tensor, Tensor], object], str]] = {
    "a call": (torch.no_grad()(lambda pipe, x, y: pipe(x)), "the pipe itself on rank {odd}"),
    "a call that gathers": (lambda pipe, x, y: pipe(x, gather=True), "the pipe itself on rank {odd}"),
    "a step without gradients": (
        torch.no_grad()(lambda pipe, x, y: pipe.step(x, y, F.mse_loss)),
        "whether gradients are enabled",
    ),
    "a step in evaluation": (lambda pipe, x, y: pipe.eval().step(x, y, F.mse_loss), "training mode"),
    "a step of another number": (step_of_another_number, "the step number"),
    "clipping": (lambda pipe, x, y: pipe.clip_grad_norm_(1.0), "clip_grad_norm_ on rank {odd}"),
}


def come_apart(rank: int, world: int, name: str, odd: int) -> Json:
    """One rank does something else than a step; what each is told, and whether all can go on after it."""
    pipe = make(world)
    x, y = data(0, 10)
    pipe.step(x, y, F.mse_loss)
    raised = said(lambda: INSTEAD[name][0](pipe, x, y) if rank == odd else pipe.step(x, y, F.mse_loss))
    pipe.train()
    pipe.step_number = 1
    return [raised, pipe.step(x, y, F.mse_loss).item()]


def backward_apart(rank: int, world: int) -> Json:
    pipe = make(world)
    (x, y), (x2, y2) = data(0, 10), data(1, 10)
    losses = [F.mse_loss(pipe(x, gather=True), y), F.mse_loss(pipe(x2, gather=True), y2)]
    losses[rank % 2].backward()
    return []


# What is left behind.


class Ends(nn.Module):
    def __init__(self, when: int) -> None:
        super().__init__()
        self.when, self.calls = when, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.when:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def leave(rank: int, world: int, folder: str, when: int) -> Json:
    """Trains in large and small messages; one rank is killed in a call, if it comes to it. What listens meanwhile."""
    tempfile.tempdir = folder
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(world - 1)] + [Ends(when)]
    pipe = make(world, layers)
    x = torch.ones(40_000, WIDTH)
    for _ in range(3):
        pipe.step(x, x, F.mse_loss)
    found = [list(one) for one in listening_sockets([os.getpid()])]
    pipe.step(x[:5], x[:5], F.mse_loss)
    return [found, os.listdir(folder), named_memory(), _listening_in(folder)]


def named_memory() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if f"gpipe-{os.getpid()}-" in path.name]


def _listening_in(folder: str) -> list[str]:
    listening = "00010000"  # the flags of a socket that accepts connections
    rows = map(str.split, Path("/proc/net/unix").read_text().splitlines())
    return [row[-1] for row in rows if row[3] == listening and row[-1].startswith(folder)]


def ports_opened(rank: int, world: int) -> Json:
    """Nothing but unix sockets links the ranks of one host, beside what torch.distributed opened."""
    before = _internet_sockets()
    pipe = make(world)
    pipe.step(*data(0, 10), F.mse_loss)
    return len(_internet_sockets() - before)


def _internet_sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    tables = [path for name in ("tcp", "tcp6", "udp", "udp6") if (path := Path(f"/proc/self/net/{name}")).exists()]
    return found & {line.split()[9] for table in tables for line in table.read_text().splitlines()[1:]}


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + 1
        return x, x[:, :1]


class Fills(nn.Module):
    """Writes into the second of what it is given, and reads the first."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        both[1].masked_fill_(both[1] > 0, 0.0)
        return both[0] * 1


def views_changed(rank: int, world: int) -> Json:
    """What a pipe says of a layer that changes one of two tensors of one memory, from a rank before it."""
    layers = [nn.Linear(3, 3), Views(), Fills(), nn.Linear(3, 3)]
    with gpipe.GPipe(layers, [2, 2], MICRO_BATCHES, driver="process", seed=SEED) as pipe:
        try:
            pipe.step(torch.randn(8, 3), torch.randn(8, 3), F.mse_loss)
        except RuntimeError as error:
            return str(error)
    return "nothing"


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
    found = answers(pool.run(only_where_read, world=world))
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
    for named, count, own in answers(pool.run(names, world=world)):
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
    first, *others = answers(pool.run(record, world=world))
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
    for found, files in answers(pool.run(go_on, world=world)):
        assert found == losses
        assert files[-1] < files[1] + 3  # as many as it would be, if each time one stayed open


# Ranks that do not agree.


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", ODD)
def test_ranks_with_other_arguments_are_refused_on_all_ranks_by_name(name: str, odd: int, pool: WorkerPool) -> None:
    outcomes = pool.run(differ, name, odd)
    assert all(outcome.error in ("ValueError", "RemoteError") for outcome in outcomes), told_by(outcomes)
    for outcome in outcomes:
        assert NAMED[name] in outcome.told, told_by(outcomes)
        assert f"rank {odd}" in outcome.told or outcome.rank == odd, told_by(outcomes)


def test_a_pipe_in_several_processes_needs_a_driver(pool: WorkerPool) -> None:
    """Bug story: without driver='process' each process trained a copy of its own, and nothing said so."""
    found = answers(pool.run(forget_driver, world=2))
    for rank, (forgotten, partitions, losses) in enumerate(found):
        assert "driver= is missing, but torch.distributed has 2 processes. Pass driver='process'" in forgotten
        assert "micro_batches=0 is invalid" in forgotten
        assert partitions == 2
        with gpipe.GPipe(network(), 2, 2, seed=rank) as pipe:
            assert losses == [pipe.step(*data(0, 10 + rank), F.mse_loss).item()] * 2


def test_a_mesh_that_leaves_a_rank_out_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    outcomes = pool.run(mesh_without)
    assert [outcome.error for outcome in outcomes] == ["RemoteError"] * 3 + ["ValueError"]
    assert all("this process is rank 3" in outcome.told for outcome in outcomes), told_by(outcomes)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("name", INSTEAD)
def test_a_rank_that_does_something_else_is_named_and_all_can_go_on(name: str, odd: int, pool: WorkerPool) -> None:
    pipe = local()
    pipe.step(*data(0, 10), F.mse_loss)
    expected = pipe.step(*data(0, 10), F.mse_loss).item()
    found = answers(pool.run(come_apart, name, odd))
    for raised, loss in found:
        assert raised.startswith(("ValueError: ", "RemoteError: ")), found
        assert INSTEAD[name][1].format(odd=odd) in raised, found
        assert "the called function is " not in raised or "step on rank " in raised, found
        assert f"rank {odd}" in raised or odd == 0, found
        assert loss == expected


def test_backwards_in_different_orders_are_named(pool: WorkerPool) -> None:
    outcomes = pool.run(backward_apart)
    assert all("the call that backward belongs to" in outcome.told for outcome in outcomes), told_by(outcomes)


# What is left behind, and what is open meanwhile.


def test_a_run_listens_nowhere_and_leaves_nothing_behind(tmp_path: Path, pool: WorkerPool) -> None:
    for listening, folder, memory, sockets in answers(pool.run(leave, str(tmp_path), -1)):
        assert all(address.startswith("127.") or address == "::1" for _, address, _ in listening)
        assert (folder, memory, sockets) == ([], [], [])


def test_a_run_opens_no_port_of_its_own(pool: WorkerPool) -> None:
    assert answers(pool.run(ports_opened)) == [0] * 4


@pytest.mark.parametrize("when", [1, 6], ids=["in the first step", "in a later step"])
def test_a_killed_run_leaves_nothing_behind(when: int, tmp_path: Path) -> None:
    outcomes = run_ranks(2, leave, str(tmp_path), when)
    assert outcomes[1].code == -9
    assert not outcomes[0].answered
    assert list(tmp_path.iterdir()) == []
    assert named_memory() == []


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
    assert found.pop("distributed/elastic.py") == ["torch.save", "torch.load"]
    # texts and numbers that trl gathers in the same way, of a job's own processes
    assert found.pop("integrations/trl.py") == ["gather_object"]
    assert not any(found.values()), found


def test_the_look_for_pickles_itself_works() -> None:
    assert pickles_in("import pickle") == ["pickle"]
    assert pickles_in("from pickle import dumps") == ["pickle"]
    assert pickles_in("torch.load(x); torch.save(x); torch.nn.load(x)") == ["torch.load", "torch.save"]
    collectives = ["all_gather_object", "broadcast_object_list", "send_object_list", "gather_object"]
    assert pickles_in("; ".join(f"dist.{name}()" for name in collectives)) == collectives


def test_what_shares_memory_with_something_else_that_crosses_is_not_changed_in_place(pool: WorkerPool) -> None:
    """Bug story: over processes they arrive apart, and the other one kept its old numbers, silently."""
    assert all("[shared-input-changed-in-place]" in text for text in answers(pool.run(views_changed, world=2)))
