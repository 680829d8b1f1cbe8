"""Finds the position of a process in the device mesh: its pipeline rank, its replica, and the other processes."""

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
from gpipe.distributed.launch_variables import several_without_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE, DATA = "pp", "dp"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Position:
    """The position of a process in the mesh.

    A pipe numbers its processes by replica, then by pipeline rank. The attribute `rank` is this number.

    Attributes:
        pp_rank: The rank in the pipeline. This process runs the actions of this rank in the program.
        pp_size: The number of processes per replica.
        replica: The index of the data-parallel replica.
        replicas: The number of replicas.
        members: The global rank of each process of the pipe, ordered by `rank`.
        device: The device of this process.
        timeout: The timeout of the process group, in seconds.
    """

    pp_rank: int
    replica: int
    pp_size: int
    replicas: int
    members: tuple[int, ...]
    device: torch.device
    timeout: float

    @property
    def rank(self) -> int:
        """The number of this process within the pipe."""
        return self.rank_of(self.pp_rank)

    def rank_of(self, pp_rank: int, replica: int | None = None) -> int:
        """Returns the number of a process within the pipe. The default replica is the replica of this process."""
        return (self.replica if replica is None else replica) * self.pp_size + pp_rank

    @property
    def replica_ranks(self) -> range:
        """The processes of this replica, including this process."""
        return range(self.rank_of(0), self.rank_of(0) + self.pp_size)

    @property
    def dp_ranks(self) -> list[int]:
        """The processes that have the same stages as this process, one per replica, including this process."""
        return [self.rank_of(self.pp_rank, replica) for replica in range(self.replicas)]


def is_joined() -> bool:
    """Returns whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Returns the number of processes in the default process group, or 1 without torch.distributed."""
    return dist.get_world_size() if is_joined() else 1


def find_position(mesh: "DeviceMesh | None", partitions: object, ranks: int) -> tuple[Position | None, list[str]]:
    """Returns the position of this process, or None and a list of mistakes.

    Args:
        mesh: The user's mesh, or None for a mesh of all processes.
        partitions: The user's argument `partitions`, for messages.
        ranks: The number of processes per replica that `partitions` requires, or 0 if `partitions` is invalid.
    """
    if not is_joined():
        if launched := several_without_group(os.environ):
            return None, [f"driver='process' requires torch.distributed: {launched}"]
        return None, [
            "driver='process' requires torch.distributed, which is not initialized. Start the script with torchrun, "
            "and call torch.distributed.init_process_group('gloo') first (with GPUs: 'cpu:gloo,cuda:nccl'). "
            "[no-process-group]"
        ]
    if mesh is None:
        world = dist.get_world_size()
        if ranks < 1 or world % ranks:
            return None, [
                f"partitions={partitions!r} does not fit {world} processes: their number is not divisible by K, one "
                f"process per partition. Start a multiple of K processes, or pass mesh=. [processes-not-divisible]"
            ]
        table = torch.arange(world).reshape(world // ranks, ranks)
        kinds = [device.type for device in accelerators() if f"{device.type}:" in str(dist.get_backend_config())]
        kind = kinds[0] if kinds else "cpu"
    else:
        names = getattr(mesh, "mesh_dim_names", None) or ()
        if PIPELINE not in names:
            return None, [
                f"mesh= has the dimensions {tuple(names)}, but no {PIPELINE!r}. Name the dimension of the partitions "
                f"{PIPELINE!r}, and the dimension of the replicas {DATA!r}: "
                f"init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'pp'))."
            ]
        if dist.get_rank() not in mesh.mesh:
            return None, [
                f"mesh= has the ranks {mesh.mesh.flatten().tolist()}, but this process is rank {dist.get_rank()}. "
                f"Pass a mesh of all processes that create the pipe."
            ]
        table, kind = _plane(mesh, names), mesh.device_type
        if ranks != table.shape[1]:
            return None, [
                f"partitions={partitions!r}, but mesh= has {table.shape[1]} processes along {PIPELINE!r}. Pass "
                f"partitions={table.shape[1]}, or a mesh with one process per partition."
            ]
    replica, pp_rank = (table == dist.get_rank()).nonzero()[0].tolist()
    replicas, pp_size = table.shape
    device = torch.device("cpu")
    if kind != "cpu":
        if os.environ.get(QUEUES) == "1":
            return None, [
                f"{QUEUES}=1 limits a GPU to one hardware queue. A message that waits for its sender would block "
                f"the work that the sender waits for. Unset {QUEUES}, or set it to 16 or more."
            ]
        index = _device_index(kind)
        if index is None:
            return None, [
                f"The device of rank {dist.get_rank()} is ambiguous, because it sees fewer devices "
                f"({torch.accelerator.device_count()}) than there are processes. Pass "
                f"device_id=torch.device({kind!r}, index) to init_process_group. [ambiguous-device]"
            ]
        device = torch.device(kind, index)
    members = tuple(table.flatten().tolist())
    return Position(pp_rank, replica, pp_size, replicas, members, device, timeout_of_world()), []


def _device_index(kind: str) -> int | None:
    """Returns the index of the device of this process, or None if it is ambiguous.

    The index is the first in this list that exists:

    1. the `device_id` passed to `init_process_group`,
    2. the only visible device,
    3. the current device, unless it is device 0, which is the default,
    4. LOCAL_RANK, if every process of this host can have a device,
    5. without LOCAL_RANK the rank, if every process can have a device.
    """
    assert dist.group.WORLD is not None
    bound, count = dist.group.WORLD.bound_device_id, torch.accelerator.device_count()
    if bound is not None and bound.type == kind and bound.index is not None:
        return int(bound.index)
    if count == 1:
        return 0
    if current := torch.accelerator.current_device_index():
        return current
    index, processes = dist.get_rank(), world_size()
    if "LOCAL_RANK" in os.environ:
        index = int(os.environ["LOCAL_RANK"])
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", index + 1))
    return index if processes <= count else None


def _plane(mesh: "DeviceMesh", names: Sequence[str]) -> torch.Tensor:
    """Returns the global ranks of all processes of this pipe, with shape [replicas, pp_size].

    In all other dimensions of the mesh, these processes have the same coordinates as this process.
    """
    table = mesh.mesh.cpu()
    own = (table == dist.get_rank()).nonzero()[0].tolist()
    plane = table[tuple(slice(None) if name in (PIPELINE, DATA) else at for name, at in zip(names, own, strict=True))]
    if DATA not in names:
        return plane.reshape(1, -1)
    return plane.t() if names.index(DATA) > names.index(PIPELINE) else plane


def timeout_of_world() -> float:
    """Returns the timeout of the default process group, in seconds."""
    assert dist.group.WORLD is not None
    return seconds_of_group(dist.group.WORLD)


def host_name() -> str:
    """Returns a string that is equal for two processes if they share memory, network namespace and clock."""
    parts = [socket.gethostname(), str(os.getuid())]
    with suppress(OSError):  # not Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{shared}") for shared in ("net", "mnt")]
    return " ".join(parts)
