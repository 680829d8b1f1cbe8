"""Defines the task of a runtime and its interface.

A step is the forward and backward pass of one mini-batch. The loss of a micro-batch has weight 1/M, so all runtimes
compute the same gradients. All runtimes split the layers at `Setup.cuts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from bench.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Setup:
    """What a runtime is to do, and for one of several processes which of them it is.

    Attributes:
        meeting: A file where processes find each other; what else they share lies beside it.
        networks: The network namespace of each process, as a path; none is this machine's own.
        interface: The network interface through which processes talk.
        address: The address there of the first.
    """

    workload: str
    partitions: int
    micro_batches: int
    cuts: tuple[int, ...]
    remat: bool
    rank: int = 0
    world: int = 1
    meeting: str = ""
    networks: tuple[str, ...] = ()
    interface: str = "lo"
    address: str = "127.0.0.1"

    @property
    def work(self) -> Workload:
        """Returns the workload with that name."""
        return WORKLOADS[self.workload]

    def scheduled(self, schedule: str, remat: str) -> dict[str, Any]:
        """Returns gpipe's arguments: the split points, or a search for them and a schedule by measured costs."""
        if schedule == "auto":
            return {"partitions": self.partitions, "schedule": schedule, "sample": self.work.data()[0]}
        return {"partitions": self.cuts, "schedule": schedule, "remat": remat if self.remat else "never"}

    def cut(self, layers: list[nn.Module]) -> list[nn.Sequential]:
        """Returns the layers of each stage."""
        first = [sum(self.cuts[:stage]) for stage in range(len(self.cuts))]
        return [nn.Sequential(*layers[a : a + n]) for a, n in zip(first, self.cuts, strict=True)]


class Runtime(Protocol):
    """A way to run a mini-batch."""

    def prepare(self, setup: Setup) -> None:
        """Builds everything. The first step may still be slower than others."""

    def step(self) -> None:
        """Runs the forward and backward pass of one mini-batch."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Returns the gradients by the names of `nn.Sequential(*layers)`. Each process returns its own."""
