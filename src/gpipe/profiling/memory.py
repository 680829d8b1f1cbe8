"""What a rank holds at its peak: state, which is counted, and activations, which are watched as they come and go.

How much of this machine other processes use meanwhile.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe._torch.trees import tree_leaves
from gpipe.features.offload import Offload
from gpipe.features.split_backward import SplitBackward
from gpipe.planner.watch import Watch
from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import Kind
from gpipe.schedule.rules import BACKWARD_PARTS
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.dtensor import is_sharded, local_tensor
from gpipe.stages.memory_layout import storage_address
from gpipe.stages.quantized import is_quantized, pieces_of, stored_in
from gpipe.stages.tree import tensors_in


@dataclass(frozen=True)
class Held:
    """What a rank holds when it holds most, in bytes.

    Attributes:
        weights: Of parameters and buffers.
        gradients: Of parameters.
        optimizer: Of the states of optimizers that were stepped while recording.
        boundary: Of what came from other ranks: boundary tensors, their gradients, and weights that were gathered.
            Each rank is taken to have a device of its own: what crosses between two counts at both, as far as both
            keep it. None if activations were not watched.
        inside: All else that its operations make: what forwards keep for backwards, what goes to other ranks, and
            what is there for the length of an operation. What the caller made counts nowhere. None likewise.

    >>> Held(weights=100, gradients=100, optimizer=200, boundary=20, inside=30).total
    450
    """

    weights: int
    gradients: int
    optimizer: int
    boundary: int | None = None
    inside: int | None = None

    @property
    def activations(self) -> int | None:
        """What is held beside state; None if it was not watched."""
        return None if self.boundary is None or self.inside is None else self.boundary + self.inside

    @property
    def state(self) -> int:
        """What is held whatever the mini-batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it that is known."""
        return self.state + (self.activations or 0)


class Watches:
    """Watches what each rank holds, as if it had a device of its own.

    What crosses from rank to rank is one storage here, and would be two: it counts where it was taken until the
    backward there is done, and where it was made as long as that is kept: while the graph behind it is.
    """

    def __init__(self) -> None:
        self.by_rank = defaultdict[int, Watch](lambda: Watch(_address))
        self._arrived: dict[tuple[int, int, int | None], list[Tensor]] = {}

    def taken(self, rank: Rank, step: CompiledAction) -> None:
        """Counts what a step was brought where it is now, and where it was made no longer if it is not kept there."""
        values = [message.value if isinstance(message, BoundaryValue) else message for message in rank.inbox]
        tensors = tensors_in(values)
        others = [watch for other, watch in list(self.by_rank.items()) if other != step.rank]
        for tensor in tensors:
            for watch in others:
                watch.give_up(tensor, only_loose=True)
            self.by_rank[step.rank].add(tensor)
        if step.action.kind is Kind.FORWARD:
            self._arrived[step.rank, step.stage, step.micro_batch] = tensors

    def works(self, rank: Rank, step: CompiledAction) -> None:
        """Counts weights that were gathered no longer, since they are about to be freed."""
        for weight in _under_fully_shard(rank, step) if step.action.kind is Kind.RESHARD else ():
            self.by_rank[step.rank].give_up(weight)

    def worked(self, run: Run, rank: Rank, step: CompiledAction) -> None:
        """Notes what a rank needs no longer itself: what a forward made that is to be recomputed, and gradients."""
        watch, kind = self.by_rank[step.rank], step.action.kind
        keeps = kind is Kind.FORWARD and step.micro_batch not in run.routes[step.stage].micro_batches[Kind.RECOMPUTE]
        watch.mark(loose=not keeps)
        if kind is Kind.UNSHARD:
            for weight in _under_fully_shard(rank, step):
                watch.add(weight)
        if kind is Kind.FETCH and (offload := run.feature(Offload)) is not None:
            moved = offload.activations[step.stage, step.micro_batch].moved
            watch.see((), [one.saved[0].tensor for one in moved])
        if kind in BACKWARD_PARTS:
            at = rank.rank, step.stage, step.micro_batch
            split = run.feature(SplitBackward)
            pending = split.pending[step.stage].get(step.micro_batch) if split is not None else None
            used = {_address(one.product.x) for one in pending.products} if pending else ()
            arrived = self._arrived.pop(at, [])
            for tensor in arrived:
                if _address(tensor) in used:
                    self._arrived.setdefault(at, []).append(tensor)
                else:
                    watch.give_up(tensor)

    def end(self, layers: Mapping[int, Sequence[nn.Module]]) -> None:
        self._arrived.clear()
        for rank, watch in self.by_rank.items():
            parameters = (p for module in layers[rank] for p in module.parameters())
            watch.end([p.grad for p in parameters if p.grad is not None])

    def peaks(self) -> dict[int, tuple[int, int]]:
        """The most bytes that each rank held at once, but for its state: those from other ranks, and its own."""
        return {rank: (watch.crossed, watch.peak - watch.crossed) for rank, watch in self.by_rank.items()}


def _under_fully_shard(rank: Rank, step: CompiledAction) -> Iterable[Tensor]:
    sharded = filter(is_sharded, rank.stages[step.stage].stage.modules)
    return dict.fromkeys(p for module in sharded for p in module.parameters())


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; a view of a weight that a quantizer made is no memory more."""
    return storage_address(pieces_of(tensor)[0] if is_quantized(tensor) else tensor)


def held(modules: Iterable[nn.Module], states: Iterable[Mapping[Tensor, Any]], peak: tuple[int, int] | None) -> Held:
    """What the modules of a rank, states of optimizers by parameter, and activations need, if their peak is known."""
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    # activations have others' whole ones
    alone = [p for p in parameters if peak is None or not hasattr(p, "to_local")]
    gradients = [p.grad for p in alone if p.grad is not None]
    optimizer = [state.get(p) for state in states for p in parameters]
    return Held(
        _bytes(stored_in(modules)),
        _bytes(gradients) or _bytes([p for p in alone if p.requires_grad]),
        _bytes(leaf for leaf in tree_leaves(optimizer) if isinstance(leaf, Tensor)),
        *(peak or (None, None)),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage_address(t): t.untyped_storage().nbytes() for t in map(local_tensor, tensors)}.values())


STAT = Path("/proc/stat")
IDLE = (3, 4)  # the columns of time without work: idle, and waiting for a disk
ENOUGH = 0.2  # seconds; in less the system's ticks of 10 ms say little


class OtherProcesses(NamedTuple):
    """What other processes used meanwhile."""

    cores: float
    of: int

    def __str__(self) -> str:
        return f"other processes used {self.cores:.1f} of this machine's {self.of} cores"


class Meter:
    """Compares the processors' time of all processes with that of this one, from now until `stop`."""

    def __init__(self) -> None:
        self._start = _read()
        self._end: tuple[float, ...] = ()

    def stop(self) -> None:
        self._end = self._end or _read()

    def others(self) -> OtherProcesses | None:
        """The cores that other processes used, and how many there are; None where that cannot be known."""
        each = zip(self._start, self._end or _read(), strict=False)
        wall, every, own = tuple(until - since for since, until in each) or (0.0, 0.0, 0.0)
        if wall < ENOUGH:
            return None
        return OtherProcesses(max(0.0, every - own) / wall, os.cpu_count() or 1)


def _read() -> tuple[float, ...]:
    """Now, and the seconds that processors have worked: for all processes, for this one; empty if nobody says."""
    try:
        ticks = [int(number) for number in STAT.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return ()
    busy = sum(number for at, number in enumerate(ticks) if at not in IDLE) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, time.process_time()
