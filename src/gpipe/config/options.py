"""What an argument of `GPipe` takes in place of a name, with what only that choice reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from gpipe.errors import int_remedy, is_count


@dataclass(frozen=True)
class Threads:
    """Runs each rank in a thread of this process.

    Args:
        intra_op_threads: The number of CPU threads that one operation may use, the same on every rank. Results
            depend on it bitwise.

    >>> import gpipe, torch
    >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 2)] * 2, 2, 2, driver=gpipe.Threads(intra_op_threads=2))
    """

    intra_op_threads: int = 1
    name: ClassVar[str] = "threads"


@dataclass(frozen=True)
class Lockstep:
    """Runs all ranks in the calling thread, for debugging.

    Args:
        intra_op_threads: As for `Threads`.

    >>> Lockstep(intra_op_threads=2).name
    'lockstep'
    """

    intra_op_threads: int = 1
    name: ClassVar[str] = "lockstep"


@dataclass(frozen=True)
class Processes:
    """Runs one rank in this process, and the others in other processes of torch.distributed.

    Args:
        intra_op_threads: As for `Threads`.
        survive: Whether each replica has its own launcher, so that training continues if one is lost. All processes
            call `GPipe.join` (docs/how-to/fault-tolerance.md).

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
    """Recomputes as little as fits in memory; `remat="auto"` is `Remat()`.

    Args:
        memory: The bytes that each rank may hold, one number or one for each rank: weights, gradients, an optimizer
            such as Adam, and activations. Default: the memory of its device, divided evenly among its ranks.

    >>> import gpipe, torch
    >>> layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> pipe = gpipe.GPipe(layers, 2, 4, sample=torch.ones(64, 64), remat=gpipe.Remat(memory=2**20))
    >>> pipe.plan.remat
    ('never', 'never')
    """

    memory: float | Sequence[float] | None = None


def read_driver(driver: object, *, has_mesh: bool) -> tuple[Driver, list[str]]:
    """Reads `driver=`; returns it, threads if it is invalid, and what is wrong with it."""
    if driver is None:
        return (Processes() if has_mesh else Threads()), []
    if isinstance(driver, str) and driver in DRIVERS:
        return DRIVERS[driver](), []
    if not isinstance(driver, Driver):
        known = ", ".join(map(repr, DRIVERS))
        return Threads(), [
            f"driver={driver!r}; known are {known}, and gpipe.Threads, gpipe.Lockstep, gpipe.Processes"
        ]
    wrong = []
    if not is_count(count := driver.intra_op_threads):
        wrong.append(f"intra_op_threads={count!r}; give a whole number of at least 1{int_remedy(count)}")
    if isinstance(driver, Processes) and not isinstance(driver.survive, bool):
        wrong.append(f"survive={driver.survive!r}; give True or False")
    return driver, wrong
