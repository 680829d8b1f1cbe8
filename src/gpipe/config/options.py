"""Defines the classes with options for the arguments `driver` and `remat` of `GPipe`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias


@dataclass(frozen=True)
class Threads:
    """Runs each rank in a thread of this process.

    Args:
        intra_op_threads: The number of CPU threads that one operation may use, on every rank. A different number
            changes the rounding of results. Default: 1.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2)] * 2, 2, 2, driver=gpipe.Threads(intra_op_threads=2))
    """

    intra_op_threads: int = 1
    name: ClassVar[str] = "threads"


@dataclass(frozen=True)
class Lockstep:
    """Runs all ranks in the calling thread, for debugging.

    Args:
        intra_op_threads: The number of CPU threads that one operation may use, as for `Threads`.

    >>> Lockstep(intra_op_threads=2).name
    'lockstep'
    """

    intra_op_threads: int = 1
    name: ClassVar[str] = "lockstep"


@dataclass(frozen=True)
class Processes:
    """Runs one rank in each process of torch.distributed.

    Args:
        intra_op_threads: The number of CPU threads that one operation may use, as for `Threads`.
        survive: Whether training continues if a data-parallel replica is lost. If True, each replica needs its own
            launcher, and all processes must call `GPipe.join` (see docs/how-to/fault-tolerance.md). Default: False.

    >>> Processes(survive=True).intra_op_threads
    1
    """

    intra_op_threads: int = 1
    survive: bool = False
    name: ClassVar[str] = "process"


Driver: TypeAlias = Threads | Lockstep | Processes
DRIVERS: dict[str, type[Driver]] = {kind.name: kind for kind in (Threads, Lockstep, Processes)}
BatchNorm: TypeAlias = Literal["micro", "deferred", "synchronized"]


@dataclass(frozen=True)
class Remat:
    """Recomputes the activations of as few micro-batches as the memory limit allows.

    `remat="auto"` is short for `remat=Remat()`.

    Args:
        memory: The number of bytes that each rank may hold, or one number per rank. The limit covers weights,
            gradients, the state of an optimizer like Adam, and activations. Default: the memory of the device,
            divided evenly among the ranks on it.

    >>> import gpipe, torch
    >>> layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> pipe = gpipe.GPipe(layers, 2, 4, sample=torch.ones(64, 64), remat=gpipe.Remat(memory=2**20))
    >>> pipe.plan.remat
    ('never', 'never')
    """

    memory: float | Sequence[float] | None = None
