"""Jobs on what a pipe over processes promises: what each rank gives, gets and holds, and what it leaves behind."""

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import gpipe
from tests.support.networks import WIDTH, data, network, squared, tied_network, with_metrics, words
from tests.support.processes.listening import listening_sockets
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
    "intra_op_threads": {"intra_op_threads": 2},
    "ties": {"ties": [("0.bias", "3.bias")]},
    "deferred_batch_norm": {"deferred_batch_norm": True},
    "a wider layer": {"layers": "wider"},
    "another activation": {"layers": "relu"},
    "a layer more": {"layers": "more"},
    "no M": {"micro_batches": 0},
}
"""What one rank gives that the others do not."""
NAMED: Mapping[str, str] = {
    **{name: f"{name} is " for name in ODD},
    "another K": "partitions is ",
    "a K that cannot be": "partitions=3 over 4 processes",
    "remat of one stage": "remat is ",
    "no seed": "seed is ",
    "a wider layer": "layer 4 is ",
    "another activation": "layer 1 is ",
    "a layer more": "layers on rank",
    "no M": "micro_batches=0",
}
"""What every rank must be told."""


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
