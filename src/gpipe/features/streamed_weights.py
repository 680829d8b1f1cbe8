"""LOAD and FREE: copies the weights of a stage from the host to its device, and their gradients back to the host.

Between mini-batches, all weights and gradients are on the host. A parameter stays the same object, so optimizers,
hooks and traced stages keep their references: LOAD changes its `.data` and `.grad` to copies on the device, and FREE
changes them back. Backward passes add to a copy of the earlier `.grad`, in the order of the reference loop. The sum
is therefore the same as on a device that holds all weights.

If a step is verified, its replays have no LOAD and FREE. There, the first action of a stage loads the weights, and
the last backward pass frees them.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpipe._torch.accelerator import put_data, queued_on, queues
from gpipe._torch.autograd import PLAIN
from gpipe.features.host_copies import CopyingFeature, HostCopy
from gpipe.features.verification.feature import Verification
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Work
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.streams import DeviceStream, RankStream, Stamp, event_on
from gpipe.schedule.action import COMPUTE, STREAMS, Action, Kind
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARD_PARTS
from gpipe.stages.digest import Digest, differ, digest
from gpipe.stages.host_memory import allocate_in_file, give_back, release_pages
from gpipe.stages.host_weights import UNSUPPORTED, is_on_host
from gpipe.stages.memory_layout import copy_of, version
from gpipe.stages.stage import Stage

LOADED_TWICE = (
    "{stage}: its weights are in use by a different mini-batch of the same pipe. With weights='host', call "
    "backward() before another thread starts a mini-batch. [weights-in-use]"
)
ACCUMULATED = (
    "{stage}: its forward pass has added to the gradient of a weight. With weights='host', compute this loss in "
    "loss_fn instead, from a stash of the layer. [backward-in-forward]"
)

_loaded = weakref.WeakSet[Stage]()
"""The stages whose weights are on their devices. A CPU runs one mini-batch of a pipe at a time; a GPU may run two."""


@dataclass(eq=False, slots=True)
class LoadedWeight:
    """A weight of a stage that is loaded.

    Attributes:
        weight: The parameter, or the alias of a shared parameter.
        host: Its values on the host. A write to this tensor does not increase the version of the weight.
        gradient: Its gradient on the host.
        copies: The copies of both on the device, until the first action uses them.
        version: The version of the weight when the copies were put in place.
        digest: A digest of its values at that time, if a write through `.data` must be found.
    """

    weight: Tensor
    host: Tensor
    gradient: Tensor | None
    copies: tuple[Tensor, Tensor | None] | None = None
    version: int = 0
    digest: Digest | None = None

    def put(self, data: Tensor, gradient: Tensor | None) -> None:
        """Changes the data and the gradient of the weight, which may be on a different device."""
        self.weight.grad = None
        put_data(self.weight, data)
        self.weight.grad = gradient

    def put_copies(self, *, finds_writes: bool) -> None:
        """Puts the copies on the device in place."""
        assert self.copies is not None
        self.put(*self.copies)
        self.copies, self.version = None, version(self.weight)
        self.digest = digest([self.weight.data]) if finds_writes else None

    @property
    def is_written(self) -> bool:
        """Whether a layer has written the weight. A write through `.data` does not increase the version."""
        if version(self.weight) != self.version:
            return True
        return self.digest is not None and bool(differ(self.digest, digest([self.weight.data], outlives=False)))

    def put_back(self) -> None:
        """Puts the values and the gradient on the host in place."""
        self.put(self.host, self.gradient)


class _LoadedStages:
    """The loaded stages of a rank."""

    def __init__(self, stream: RankStream) -> None:
        self.stream = stream
        self.finds_writes = False  # whether to find writes through `.data`
        self.weights: dict[Stage, list[LoadedWeight]] = {}
        self.last: HostCopy | None = None
        self._arriving: dict[Stage, HostCopy] = {}
        self._leaving: HostCopy | None = None

    def load(self, action: Action, stage: Stage, weights: Sequence[Tensor], *, trains: bool) -> None:
        """Starts to copy weights to the device, and their gradients if a backward pass will add to them."""
        if stage in _loaded:
            raise RuntimeError(LOADED_TWICE.format(stage=stage))
        loaded = self.weights[stage] = [
            LoadedWeight(weight, weight.data, weight.grad)
            for weight in weights
            if is_on_host(weight, self.stream.device)
        ]
        _loaded.add(stage)
        self.last = self._arriving[stage] = HostCopy(action, self.stream.stamp(), self._start_load(loaded, trains))

    def await_load(self, stage: Stage) -> None:
        """Waits until the weights of a stage are on the device."""
        copy = self._arriving.pop(stage, None)
        if copy is not None:
            copy.finish()
            for loaded in self.weights[stage]:
                loaded.put_copies(finds_writes=self.finds_writes)

    def free(self, action: Action, stage: Stage, *, trains: bool) -> None:
        """Frees the copies, and starts to copy gradients, and weights that layers have written, to the host."""
        self.await_load(stage)  # if no action has used the weights
        self.finish()
        pairs, writes = list[tuple[Tensor, Tensor]](), False
        for loaded in self.weights[stage]:
            weight, gradient = loaded.weight, loaded.weight.grad
            if gradient is not None and not trains:
                raise RuntimeError(ACCUMULATED.format(stage=stage))
            if loaded.is_written:
                writes = True
                pairs.append((weight.data, loaded.host))
            if trains and gradient is None:
                loaded.gradient = None
            elif gradient is not None and gradient.layout is not torch.strided:
                loaded.gradient = gradient.to(loaded.host.device)
            elif gradient is not None:
                if loaded.gradient is None or loaded.gradient.stride() != gradient.stride():
                    loaded.gradient = self.allocate(gradient)
                pairs.append((gradient, loaded.gradient))
            loaded.put_back()
        del self.weights[stage]
        _loaded.discard(stage)
        self.last = self._leaving = HostCopy(action, self.stream.stamp(), self._start_free(pairs))
        if writes:  # The next LOAD may read these weights, if a different stage shares them.
            self.finish()

    def finish(self) -> None:
        """Waits until the gradients of the last FREE are on the host. Then their memory on the device is free."""
        copy, self._leaving = self._leaving, None
        if copy is not None:
            copy.finish()

    def put_back(self) -> None:
        """Puts the weights on the host in place, after a pass or an exception. Drops gradients on the device."""
        self.await_copies()
        for stage in [*self.weights]:
            for loaded in self.weights[stage]:
                loaded.put_back()
            del self.weights[stage]
            _loaded.discard(stage)

    def allocate(self, gradient: Tensor) -> Tensor:
        """Allocates memory on the host for a gradient."""
        raise NotImplementedError

    def await_copies(self) -> None:
        """Waits for all copies in flight."""
        raise NotImplementedError

    def _start_load(self, weights: Sequence[LoadedWeight], trains: bool) -> Callable[[], Stamp]:
        raise NotImplementedError

    def _start_free(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], Stamp]:
        raise NotImplementedError


class StreamedWeights(CopyingFeature):
    """Loads and frees the weights of stages, on all ranks of this process."""

    starts = STREAMS
    alters_layers = True  # Layers of a replay need weights too.

    def __init__(self) -> None:
        self._ranks: dict[int, _LoadedStages] = {}
        self._stages: Mapping[int, Stage] = {}
        self._program: Program | None = None  # the whole program of the mini-batch, or one half
        self._replayed = set[Stage]()  # stages that actions have loaded, because a replay has no LOAD

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self._compute, work[kind]) for kind in COMPUTE & work.keys()}
        work[Kind.LOAD], work[Kind.FREE] = self._load, self._free
        self._ranks = {
            rank: (PinnedWeights(stream) if queues(stream.device) else FileWeights(stream))
            for rank, stream in run.stages.streams.items()
        }
        self._stages = {stage.index: stage for stage in run.stages.local}

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        self._program = table.program
        try:
            yield
            for stages in self._ranks.values():
                stages.finish()
        finally:
            try:
                self._put_back()
            except BaseException:  # An interrupt must not leave weights on the device.
                self._put_back()
                raise

    def _put_back(self) -> None:
        for stages in self._ranks.values():
            stages.put_back()

    def last_copy(self, rank: int) -> HostCopy | None:
        return self._ranks[rank].last

    def await_copies(self, rank: Rank, task: CompiledAction) -> None:
        """Waits for the LOAD that a computation needs."""
        if task.action.kind in COMPUTE:
            self._ranks[rank.rank].await_load(self._stages[task.stage])

    def _compute(self, work: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        stages, stage = self._ranks[rank.rank], self._stages[task.stage]
        if stage not in stages.weights:
            self._replayed.add(stage)
            stages.finds_writes = True
            stages.load(task.action, stage, run.aliases.weights_of(stage), trains=True)
        self.await_copies(rank, task)
        work(run, rank, task)
        if stage in self._replayed and all(index != task.stage for index, _ in rank.states):
            stages.free(task.action, stage, trains=True)
            stages.finish()

    def _load(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """LOAD: starts to copy the weights of a stage to the device."""
        stage, trains = self._stages[task.stage], self._trains(task.action)
        weights = run.aliases.weights_of(stage)
        if kinds := {type(weight).__name__ for weight in weights if type(weight) not in PLAIN}:
            raise RuntimeError(UNSUPPORTED.format(name=f"a weight of {stage}", kind=" or a ".join(sorted(kinds))))
        stages, verification = self._ranks[rank.rank], run.feature(Verification)
        stages.finds_writes = verification is not None and verification.record is not None
        stages.load(task.action, stage, weights, trains=trains)

    def _free(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """FREE: frees the weights of a stage on the device, and starts to copy their gradients to the host."""
        stages, trains = self._ranks[rank.rank], self._trains(task.action._replace(kind=Kind.LOAD))
        stages.free(task.action, self._stages[task.stage], trains=trains)
        if run.compiled.kinds & {Kind.REDUCE, Kind.TIE}:  # These actions read gradients on the host.
            stages.finish()

    def _trains(self, load: Action) -> bool:
        """Whether a backward pass uses the weights of a LOAD."""
        assert self._program is not None
        return any(use.kind in BACKWARD_PARTS for use in self._program.uses_of[load])


class FileWeights(_LoadedStages):
    """The loaded stages of a rank on a CPU: copies in memory of weights in temporary files.

    A thread copies. It ends after each pass, so that a call whose `backward()` is never called keeps no thread.
    """

    def __init__(self, stream: RankStream) -> None:
        super().__init__(stream)
        self._thread: ThreadPoolExecutor | None = None

    def allocate(self, gradient: Tensor) -> Tensor:
        return allocate_in_file(gradient)

    def await_copies(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _start_load(self, weights: Sequence[LoadedWeight], trains: bool) -> Callable[[], Stamp]:
        def load() -> float:
            give_back(0)  # Otherwise freed copies count as memory of the process.
            for each in weights:
                gradient = each.gradient if trains else None
                each.copies = copy_of(each.host), None if gradient is None else copy_of(gradient)
                release_pages(each.host)
                release_pages(gradient)
            return time.perf_counter()

        return self._submit(load)

    def _start_free(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], Stamp]:
        def free() -> float:
            while pairs:  # Frees each tensor after its copy.
                copied, target = pairs.pop()
                target.copy_(copied)
                release_pages(target)
            return time.perf_counter()

        return self._submit(free)

    def _submit(self, work: Callable[[], float]) -> Callable[[], Stamp]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gpipe weights")
        return self._thread.submit(work).result


class PinnedWeights(_LoadedStages):
    """The loaded stages of a rank on a GPU, with a stream for the copies of each direction."""

    stream: DeviceStream

    def __init__(self, stream: RankStream) -> None:
        super().__init__(stream)
        self._to_device, self._to_host = torch.Stream(stream.device), torch.Stream(stream.device)

    def allocate(self, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient, device="cpu", pin_memory=True)

    def await_copies(self) -> None:
        self._to_device.synchronize()
        self._to_host.synchronize()

    def _start_load(self, weights: Sequence[LoadedWeight], trains: bool) -> Callable[[], Stamp]:
        device, pairs = self.stream.device, list[tuple[Tensor, Tensor]]()
        for each in weights:  # Allocated on the compute stream, which frees the memory later.
            gradient = each.gradient if trains else None
            each.copies = (
                torch.empty_like(each.host, device=device),
                None if gradient is None else torch.empty_like(gradient, device=device),
            )
            sources, copies = (each.host, gradient), each.copies
            pairs += [(a, b) for a, b in zip(sources, copies, strict=True) if a is not None and b is not None]
        ended = self._copy(pairs, self._to_device)
        return partial(self._make_rank_wait, ended)

    def _start_free(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], Stamp]:
        for copied, _ in pairs:
            copied.record_stream(self._to_host)
        return partial(_synchronized, self._copy(pairs, self._to_host))

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.Stream) -> torch.Event:
        stream.wait_event(self.stream.mark())  # type: ignore[arg-type]  # It is an event on a GPU.
        with queued_on(stream):
            for copied, target in pairs:
                target.copy_(copied, non_blocking=True)
            return event_on(stream, enable_timing=True)

    def _make_rank_wait(self, ended: torch.Event) -> Stamp:
        self.stream.compute.wait_event(ended)
        return ended


def _synchronized(ended: torch.Event) -> Stamp:
    ended.synchronize()
    return ended
