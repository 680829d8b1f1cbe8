"""The position of a process in the mesh: its row, its replica, and who else trains the same pipe."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpipe._torch.accelerator import accelerators
from gpipe._torch.modules import seconds_of_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE, DATA = "pp", "dp"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Position:
    """Which row of the program this process runs, and for which replica.

    `members` are the ranks in the world of all processes of the pipe, by their numbers there (`rank_of`).
    """

    row: int
    replica: int
    rows: int
    replicas: int
    members: tuple[int, ...]
    device: torch.device
    timeout: float

    @property
    def rank(self) -> int:
        """The number of this process among those of the pipe."""
        return self.rank_of(self.row)

    def rank_of(self, row: int, replica: int | None = None) -> int:
        """The number of the process that runs a row, for this replica if no other is given: replica by replica."""
        return (self.replica if replica is None else replica) * self.rows + row

    @property
    def ranks_of_replica(self) -> range:
        return range(self.rank_of(0), self.rank_of(0) + self.rows)

    @property
    def ranks_of_row(self) -> list[int]:
        """The processes that run what this one runs, one for each replica."""
        return [self.rank_of(self.row, replica) for replica in range(self.replicas)]


def is_joined() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """How many processes are in the process group; 1 if there is none."""
    return dist.get_world_size() if is_joined() else 1


def find_position(mesh: "DeviceMesh | None", partitions: object, ranks: int) -> tuple[Position | None, list[str]]:
    """Reads the mesh, or makes one of the world; gives the position, and what is wrong.

    `partitions` is what the user gave, `ranks` how many processes a replica needs for it; 0 if it cannot be.
    """
    if not is_joined():
        return None, [
            "driver='process' needs torch.distributed: start with torchrun, and call "
            "torch.distributed.init_process_group('gloo') (with GPUs 'cpu:gloo,cuda:nccl') first"
        ]
    if mesh is None:
        world = dist.get_world_size()
        if ranks < 1 or world % ranks:
            return None, [
                f"partitions={partitions!r} over {world} processes: their number must be a multiple of K, one for "
                f"each partition; start as many, or give mesh="
            ]
        table = torch.arange(world).reshape(world // ranks, ranks)
        kinds = [device.type for device in accelerators() if f"{device.type}:" in str(dist.get_backend_config())]
        kind = kinds[0] if kinds else "cpu"
    else:
        names = getattr(mesh, "mesh_dim_names", None) or ()
        if PIPELINE not in names:
            return None, [
                f"mesh has the dimensions {tuple(names)}; name one {PIPELINE!r} for the partitions, and perhaps one "
                f"{DATA!r} for replicas: init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'pp'))"
            ]
        if dist.get_rank() not in mesh.mesh:
            return None, [
                f"mesh has the ranks {mesh.mesh.flatten().tolist()}, and this process is rank {dist.get_rank()}; "
                f"give a mesh of all processes"
            ]
        table, kind = _plane(mesh, names), mesh.device_type
        if ranks != table.shape[1]:
            return None, [
                f"partitions={partitions!r}, but the mesh has {table.shape[1]} processes along {PIPELINE!r}; they "
                f"must be as many"
            ]
    replica, row = (table == dist.get_rank()).nonzero()[0].tolist()
    replicas, rows = table.shape
    device = torch.device("cpu")
    if kind != "cpu":
        if os.environ.get(QUEUES) == "1":
            return None, [
                f"{QUEUES}=1 leaves a GPU one queue for all streams, in which a message that waits for its sender "
                f"holds back what that sender waits for; leave it out, or give 16 or more"
            ]
        at = os.environ.get("LOCAL_RANK", dist.get_rank() % torch.accelerator.device_count())
        device = torch.device(kind, int(at))
    return Position(row, replica, rows, replicas, tuple(table.flatten().tolist()), device, timeout_of_world()), []


def _plane(mesh: "DeviceMesh", names: Sequence[str]) -> torch.Tensor:
    """The world's ranks, replicas by rows, that share this process's position in all other dimensions."""
    table = mesh.mesh.cpu()
    own = (table == dist.get_rank()).nonzero()[0].tolist()
    plane = table[tuple(slice(None) if name in (PIPELINE, DATA) else at for name, at in zip(names, own, strict=True))]
    if DATA not in names:
        return plane.reshape(1, -1)
    return plane.t() if names.index(DATA) > names.index(PIPELINE) else plane


def timeout_of_world() -> float:
    """Seconds that the process group waits for others."""
    assert dist.group.WORLD is not None
    return seconds_of_group(dist.group.WORLD)


def host_name() -> str:
    """What is the same for processes that share memory, a network and a clock."""
    parts = [socket.gethostname(), str(os.getuid())]
    with suppress(OSError):  # not Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{shared}") for shared in ("net", "mnt")]
    return " ".join(parts)
