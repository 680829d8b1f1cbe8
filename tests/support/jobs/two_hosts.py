"""What a rank does on one of two hosts, under torchrun: trains, until the connection is cut or a rank is killed.

    torchrun ... -m tests.support.jobs.two_hosts FOLDER FAULT TIMEOUT

A rank leaves `rank_<number>.json` in FOLDER, what it saw and how it ended, and stays until the test has seen all:
torchrun would end the others of its host with it. FAULT is `"cut"`, which the test does once the middle of a step is
reached, or the number of a rank, which kills itself there.
"""

import json
import os
import signal
import ssl
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe.distributed import linking
from gpipe.distributed.connection import TcpConnection
from tests.support.plain_loop import plain_loop, squares
from tests.support.processes.listening import Listening, family, listening_sockets
from tests.support.processes.marks import wait_for

FEATURES, ROWS, MICRO_BATCHES, SOUND_STEPS = 8, 10, 4, 3
LENGTHS = (3, 9000)  # of sequences: messages that fit the stream, and larger ones


class Middle(nn.Module):
    """Stops in the forward of the second micro-batch of the last step, until what is to happen has happened."""

    def __init__(self, folder: Path, who: int | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.who = who
        self.visits = 0

    def forward(self, x: Tensor) -> Tensor:
        self.visits += 1  # nothing is recomputed
        if self.visits == SOUND_STEPS * MICRO_BATCHES + 2:
            self.strike()
        return x

    def strike(self) -> None:
        (self.folder / "middle").touch()
        if self.who is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(self.folder / "cut")


def build(world: int, middle: nn.Module | None = None, at: int = 1) -> list[nn.Module]:
    """Layers of the same weights everywhere, `middle` in stage `at`."""
    torch.manual_seed(5)
    layers: list[nn.Module] = []
    for _ in range(world):
        layers += [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.2), nn.Tanh()), nn.Identity()]
    if middle is not None:
        layers[2 * at + 1] = middle
    return layers


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = torch.randn(2, ROWS, LENGTHS[step % len(LENGTHS)], FEATURES, generator=generator)
    return made[0], made[1]


def local_losses(world: int) -> list[float]:
    layers = build(world)
    optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), lr=0.1)
    found = []
    for step in range(SOUND_STEPS):
        loss = plain_loop(layers, *batch(step), squares, micro_batches=MICRO_BATCHES, seed=0, step=step)
        found.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return found


def watch_listeners() -> list[Sequence[Any]]:
    """Notes what this process listens on while it waits for others to connect."""
    seen: list[Sequence[Any]] = []
    accept = linking.Listener.accept

    def watched(self: Any, *given: Any) -> Any:
        seen.extend(listening_sockets([os.getpid()]))
        return accept(self, *given)

    linking.Listener.accept = watched  # type: ignore[assignment, method-assign]
    return seen


def watch_secrets() -> list[str]:
    """Notes what ranks greet each other with, and of each tensor that leaves for the other host some bytes."""
    noted: list[str] = []
    token_of, put = linking.token_of, TcpConnection.put

    def watched_token(addresses: Any) -> str:
        noted.insert(0, token := token_of(addresses))
        return token

    def watched_put(self: Any, run: int, label: Any, message: Any, sent: float) -> bool:
        noted.extend(bytes(piece[-64:-32]).hex() for piece in message.pieces() if len(piece) > 2**10)
        return put(self, run, label, message, sent)

    linking.token_of = watched_token
    TcpConnection.put = watched_put  # type: ignore[method-assign]
    return noted


def train(folder: Path, fault: str, record: dict[str, Any]) -> None:
    """Trains; the last step is one that fails."""
    world = dist.get_world_size()
    doors, record["secrets"] = watch_listeners(), watch_secrets()
    who = None if fault == "cut" else int(fault)
    layers = build(world, Middle(folder, who), who or 1)
    pipe = gpipe.GPipe(layers, [2] * world, MICRO_BATCHES, remat="never", seed=0, driver="process")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    connections = pipe._processes.linked().connections  # type: ignore[attr-defined]  # over processes
    record["connections"] = {str(peer): type(connection).__name__ for peer, connection in connections.items()}
    record["encrypted"] = {
        str(peer): isinstance(getattr(connection, "_outgoing", None), ssl.SSLSocket)
        for peer, connection in connections.items()
    }
    record["doors"] = doors
    for step in range(SOUND_STEPS + 1):
        loss = pipe.step(*batch(step), squares)
        optimizer.step()
        optimizer.zero_grad()
        record["losses"].append(float(loss))
        record["listening"] = listening_sockets(family(os.getpid()))


def meet(folder: Path) -> int:
    """Waits until all ranks have loaded what they need, since the timeout is short from then on; gives this rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_losses(world)  # an optimizer loads much of torch
    (folder / f"here_{rank}").touch()
    for other in range(world):
        wait_for(folder / f"here_{other}")
    return rank


def main(folder: str, fault: str, timeout: str) -> None:
    torch.set_num_threads(1)
    rank = meet(Path(folder))
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    record: dict[str, Any] = {"losses": [], "listening": [], "error": "", "told": ""}
    try:
        train(Path(folder), fault, record)
    except BaseException as error:
        record |= {"error": type(error).__name__, "told": str(error)}
        record["rank"] = getattr(error, "rank", None)
    part = Path(folder, f"rank_{rank}.part")
    part.write_text(json.dumps(record))
    part.rename(part.with_suffix(".json"))
    wait_for(Path(folder, "seen"))


def heard(found: Sequence[Sequence[Any]]) -> list[Listening]:
    return [Listening(*one) for one in found]


if __name__ == "__main__":
    main(*sys.argv[1:])
