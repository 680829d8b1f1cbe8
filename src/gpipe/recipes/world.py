"""Finds the processes that train together in the environment variables of their launcher, and connects them."""

import json
import logging
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # These are public.

from gpipe.distributed.launch_variables import missing_variables
from gpipe.distributed.launcher import accept_store
from gpipe.distributed.network import interface_of

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # Set by torchrun and other launchers.
TIMEOUT = timedelta(minutes=5)  # Timeout of the process group. A step takes seconds.
LOOPBACK = "127.0.0.1"
LIFE = "gpipe/life"  # the key under which rank 0 publishes the processes
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class World:
    """Describes the processes that train together, and the rank of this process. Only rank 0 writes files and prints.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        launched: Whether a launcher started the processes.
        one_host: Whether all processes run on this host.
        restarts: Number of times that torchrun has restarted the processes, as far as this process knows.
    """

    rank: int = 0
    size: int = 1
    launched: bool = False
    one_host: bool = True
    restarts: int = 0


def find_world(environment: Mapping[str, str]) -> World:
    """Reads this process's rank and the number of processes from environment variables.

    Raises:
        ValueError: If srun or mpirun started the processes, and the name of the first host is not known.
    """
    environment = {**environment, **missing_variables(environment)}
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
def joined(world: World) -> Iterator[World]:
    """Creates the default process group inside the context. On one host, the group uses only the loopback interface.

    Yields:
        The world, with a number of restarts on which all processes agree.
    """
    if not world.launched:
        yield world
        return
    if world.rank:  # Only rank 0 prints warnings. Other ranks print only errors.
        logging.getLogger("gpipe").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    os.environ.update(missing_variables(os.environ))
    chosen = "" if world.one_host else os.environ.get("GPIPE_INTERFACE")
    if interface := chosen or interface_of(LOOPBACK if world.one_host else os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = (
        f"cpu:gloo,{kind.type}:{dist.Backend.default_device_backend_map.get(kind.type, 'gloo')}" if kind else "gloo"
    )
    store = _connect_store(world)
    prefix, restarts = agree_on_life(store, world)
    dist.init_process_group(
        backend, store=PrefixStore(prefix, store), rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )
    accept_store()
    try:
        yield replace(world, restarts=restarts)
    finally:
        dist.destroy_process_group()


def agree_on_life(store: Store, world: World) -> tuple[str, int]:
    """Agrees with the other processes on a prefix for the keys of a store, and on the number of restarts.

    torchrun keeps its store across restarts, so the store may contain the keys of processes that have ended. The
    number of restarts cannot distinguish these keys, because each agent of torchrun counts its own restarts.
    Therefore each process writes a random name, and rank 0 publishes the names. A process that does not find its own
    name waits, because the names belong to processes before the restart. Rank 0 publishes names again until all
    processes have found their names.

    Returns:
        The prefix, which processes before the restart have not used, and the number of restarts.
    """
    own, until = f"{secrets.token_hex(8)} {world.restarts}", time.monotonic() + TIMEOUT.total_seconds()
    keys = [f"gpipe/process/{rank}" for rank in range(world.size)]
    published: dict[str, Any] = {"names": [], "restarts": -1}
    if not world.rank and store.check([LIFE]):
        published = json.loads(store.get(LIFE))
    earlier = published["restarts"] + 1
    store.set(keys[world.rank], own)
    if world.rank:
        while own not in published["names"]:
            if time.monotonic() > until:
                raise TimeoutError(f"Rank 0 did not start within {TIMEOUT.total_seconds():g} s. Read its log.")
            time.sleep(POLL_SECONDS)
            if store.check([LIFE]):
                published = json.loads(store.get(LIFE))
        prefix = f"gpipe/{published['names'][0]}"
        store.add(f"{prefix}/found", 1)
        return prefix, int(store.get(f"{prefix}/restarts"))
    prefix = f"gpipe/{own}"
    store.wait(keys, TIMEOUT)
    while True:
        names = [name.decode() for name in store.multi_get(keys)]
        restarts = max(earlier, *(int(name.split()[1]) for name in names))
        if names != published["names"]:
            published = {"names": names, "restarts": restarts}
            store.set(LIFE, json.dumps(published))
        if store.add(f"{prefix}/found", 0) == world.size - 1:
            store.set(f"{prefix}/restarts", str(restarts))
            return prefix, restarts
        if time.monotonic() > until:
            raise TimeoutError(f"Other ranks did not start within {TIMEOUT.total_seconds():g} s. Read their logs.")
        time.sleep(POLL_SECONDS)


def broadcast_from_first(world: World, make: Callable[[], Any]) -> Any:
    """Calls `make` on rank 0, and returns its result in every process. The result must be JSON-serializable."""
    text = b"" if world.rank else json.dumps(make()).encode()
    if not world.launched:
        return json.loads(text)
    size = torch.tensor(len(text))
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8) if world.rank else torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return json.loads(bytes(data.tolist()))


def _connect_store(world: World) -> TCPStore:
    """Connects to the store of torchrun or of rank 0. On one host, the store of rank 0 accepts no remote clients."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if hosted or not world.one_host:
        return TCPStore(address, port, world.size, not (hosted or world.rank), TIMEOUT)
    listener = None if world.rank else socket.create_server((LOOPBACK, port)).detach()
    return TCPStore(LOOPBACK, port, world.size, not world.rank, TIMEOUT, master_listen_fd=listener)
