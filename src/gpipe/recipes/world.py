"""Finds the processes that train together, from the environment variables of torchrun, and connects them."""

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
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # These are public.

from gpipe.distributed.network import interface_of

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # Set by torchrun and other launchers.
TIMEOUT = timedelta(minutes=5)  # Timeout of the process group. A step takes seconds.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """Describes this process among the processes that train together. Rank 0 writes files and prints.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        launched: Whether a launcher started the processes.
        one_host: Whether all processes run on this host.
        restarts: Number of times that torchrun has restarted the processes after a failure.
    """

    rank: int = 0
    size: int = 1
    launched: bool = False
    one_host: bool = True
    restarts: int = 0


def find_world(environment: Mapping[str, str]) -> World:
    """Reads this process's rank and the number of processes from environment variables."""
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
    """Creates the default process group inside the context. On one host, it uses only the loopback interface."""
    if not world.launched:
        yield
        return
    if world.rank:  # Only rank 0 prints warnings. Other ranks print only errors.
        logging.getLogger("gpipe").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    chosen = "" if world.one_host else os.environ.get("GPIPE_INTERFACE")
    if interface := chosen or interface_of(LOOPBACK if world.one_host else os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = (
        f"cpu:gloo,{kind.type}:{dist.Backend.default_device_backend_map.get(kind.type, 'gloo')}" if kind else "gloo"
    )
    # torchrun keeps its store across restarts, so the store still contains addresses of processes that have ended.
    store = PrefixStore(f"gpipe/{world.restarts}", _connect_store(world))
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def broadcast_from_first(world: World, make: Callable[[], Any]) -> Any:
    """Calls `make` on rank 0, and returns its result, which must be JSON-serializable, in every process."""
    text = b"" if world.rank else json.dumps(make()).encode()
    if not world.launched:
        return json.loads(text)
    size = torch.tensor(len(text))
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8) if world.rank else torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return json.loads(bytes(data.tolist()))


def _connect_store(world: World) -> TCPStore:
    """Connects to the store of torchrun, or of rank 0. On one host, rank 0's store does not accept remote clients."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if hosted or not world.one_host:
        return TCPStore(address, port, world.size, not (hosted or world.rank), TIMEOUT)
    listener = None if world.rank else socket.create_server((LOOPBACK, port)).detach()
    return TCPStore(LOOPBACK, port, world.size, not world.rank, TIMEOUT, master_listen_fd=listener)
