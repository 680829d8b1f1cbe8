"""The processes that train together, as torchrun says, and how they meet."""

import json
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public all the same

from gpipe.distributed.network import interface_of

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher sets, torchrun or another
TIMEOUT = timedelta(minutes=5)  # of a message; a step takes seconds
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """One process among those that train together; rank 0 writes files and talks.

    `launched` is whether a launcher started them, `restarts` how often torchrun has done so anew after a failure.
    """

    rank: int = 0
    size: int = 1
    launched: bool = False
    one_host: bool = True
    restarts: int = 0


def find_world(environment: Mapping[str, str]) -> World:
    """Reads from the environment what a launcher said of this process."""
    if any(name not in environment for name in LAUNCHED):
        return World()
    size = environment["WORLD_SIZE"]
    return World(
        int(environment["RANK"]),
        int(size),
        launched=True,
        one_host=environment.get("LOCAL_WORLD_SIZE") == size,
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


@contextmanager
def joined(world: World) -> Iterator[None]:
    """Joins the processes into a group, and leaves it in the end; on one host nothing listens but on loopback."""
    if not world.launched:
        yield
        return
    if world.rank:  # rank 0 talks, of all but errors
        logging.getLogger("gpipe").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    named = "" if world.one_host else os.environ.get("GPIPE_INTERFACE")
    if interface := named or interface_of(LOOPBACK if world.one_host else os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = (
        f"cpu:gloo,{kind.type}:{dist.Backend.default_device_backend_map.get(kind.type, 'gloo')}" if kind else "gloo"
    )
    # torchrun's meeting place still knows the addresses of processes that it has replaced
    store = PrefixStore(f"gpipe/{world.restarts}", _enter(world))
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_first(world: World, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, in every process: something that JSON can say."""
    text = b"" if world.rank else json.dumps(make()).encode()
    if not world.launched:
        return json.loads(text)
    size = torch.tensor(len(text))
    dist.broadcast(size, 0)
    sent = torch.zeros(int(size), dtype=torch.uint8) if world.rank else torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(sent, 0)
    return json.loads(bytes(sent.tolist()))


def _enter(world: World) -> TCPStore:
    """Enters the meeting place, which torchrun keeps or else rank 0; on one host, no other can enter rank 0's."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if hosted or not world.one_host:
        return TCPStore(address, port, world.size, not (hosted or world.rank), TIMEOUT)
    listener = None if world.rank else socket.create_server((LOOPBACK, port)).detach()
    return TCPStore(LOOPBACK, port, world.size, not world.rank, TIMEOUT, master_listen_fd=listener)
