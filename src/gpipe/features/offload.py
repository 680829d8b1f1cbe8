"""OFFLOAD and FETCH: copies activations to host memory or to a file, and copies them back for the backward pass.

If a micro-batch is recomputed, the inputs of the stage are copied instead, and copied back for the recompute.

Hooks collect every tensor that autograd saves in a forward pass. A storage is offloaded only if nothing else refers
to it. So these are not moved: weights, buffers, boundary tensors of stages that do not recompute, and tensors that a
layer or the caller keeps. If several saved tensors share a storage, it is copied once. Shapes, strides and alignment
do not change, and values are bitwise identical.

A rank has at most one copy in flight, and runs other actions during the copy. The rank waits for the copy before the
next copy, or before the backward pass that needs the activations. On a GPU, only the stream of the rank waits.

On a CPU, glibc keeps freed memory, so the process would grow as if it kept the activations of all micro-batches. Each
copy therefore returns free pages to the operating system. FETCH maps the file into memory, and the mapping of a
tensor is freed as soon as its autograd node has run.
"""

import ctypes
import mmap
import os
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from gpipe._torch.accelerator import queued_on, queues
from gpipe._torch.autograd import SavedTensor, memory_users, unpack
from gpipe.features.host_copies import CopyingFeature, HostCopy
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Work
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.streams import DeviceStream, RankStream, Stamp, event_on
from gpipe.schedule.action import MOVES, Action, Kind
from gpipe.schedule.rules import BACKWARDS
from gpipe.stages.host_memory import LIBC, give_back, room_for
from gpipe.stages.tree import tensors_in

Host: TypeAlias = "FileHost | PinnedHost"
USES_FETCHED = Kind.RECOMPUTE, *BACKWARDS
"""The kinds of actions that wait for the FETCH of their micro-batch."""
NAME = "gpipe moves"  # the name of the thread that copies
POPULATE_READ = 22
"""The `madvise` option to read all pages at once, since Linux 5.14. Otherwise each page is read at its first use."""


@dataclass(slots=True, eq=False)
class OffloadedStorage:
    """An offloaded storage, and the tensors in it that autograd has saved."""

    storage: UntypedStorage | None  # None while it is on the host
    size: int
    saved: Sequence[SavedTensor]

    def bytes(self) -> Tensor:
        """Returns the bytes of the storage as a tensor."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def address(self) -> int:
        """Returns the address of the storage. A numpy view would prevent torch from resizing the storage later."""
        assert self.storage is not None
        return self.storage.data_ptr()

    def free(self) -> None:
        """Drops all references to the storage."""
        self.storage = None
        for tensor in self.saved:
            tensor.release_storage()

    def lay_in(self, storage: UntypedStorage) -> None:
        """Moves the saved tensors to a different storage, without changing their layout."""
        self.storage = storage
        for tensor in self.saved:
            tensor.restore_storage(storage)


@dataclass(eq=False)
class OffloadedActivations:
    """The activations of one micro-batch at one stage, or its inputs if they are recomputed.

    Attributes:
        saved: Tensors that autograd has saved, or the inputs, until OFFLOAD.
        moved: The offloaded storages, between OFFLOAD and the backward pass.
        host_data: The copies on the host.
    """

    saved: list[SavedTensor] = field(default_factory=list)
    moved: list[OffloadedStorage] = field(default_factory=list)
    host_data: Any = None

    def watched(self) -> AbstractContextManager[object]:
        """Returns a context that collects the tensors that autograd saves."""
        saved = self.saved  # The graph keeps the hook, which must not refer to `self`.

        def pack(tensor: Tensor) -> SavedTensor:
            saved.append(SavedTensor.of(tensor))
            return saved[-1]

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def select_storages(self) -> None:
        """Selects the storages to which only saved tensors refer."""
        by_storage = defaultdict[int, list[SavedTensor]](list)
        for tensor in self.saved:
            by_storage[tensor.address].append(tensor)
        by_storage.pop(0, None)
        for tensors in by_storage.values():
            storage = tensors[0].tensor.untyped_storage()
            # The memory of a storage that is not resizable belongs to a different library.
            is_only_user = memory_users(tensors[0].tensor) == len(tensors) and storage.resizable()
            if is_only_user and all(tensor.is_as_saved for tensor in tensors):
                self.moved.append(OffloadedStorage(storage, storage.nbytes(), tensors))
        self.saved.clear()

    def release(self) -> None:
        """Drops the references to fetched storages, so that the graph frees each storage after its node has run."""
        self.moved, self.host_data = [], None


class _Moves:
    """The copies of a rank, of which at most one is in flight."""

    last: HostCopy | None = None

    def __init__(self, stream: RankStream) -> None:
        self.stream, self._process = stream, os.getpid()
        self._moving = OffloadedActivations()  # the activations that `last` copies

    def finish(self, activations: OffloadedActivations | None = None) -> None:
        """Waits for the copy in flight. With `activations`, waits only if the copy is of these activations."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "backward(): activations were offloaded before this process was forked. Call backward() in the "
                "process that called the pipe. [offloaded-before-fork]"
            )
        if self.last is None or activations not in (None, self._moving):
            return
        copy, self.last = self.last, None
        copy.finish()
        if copy.action.kind is Kind.OFFLOAD:
            for storage in self._moving.moved:
                storage.free()


class Offload(CopyingFeature):
    """Offloads and fetches activations, on all ranks of this process."""

    starts = MOVES

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}  # by rank
        self.activations: dict[tuple[int, int], OffloadedActivations] = {}  # by stage and micro-batch

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work[Kind.FORWARD] = partial(self._forward, work[Kind.FORWARD])
        work[Kind.OFFLOAD], work[Kind.FETCH] = self._offload, self._fetch
        work |= {kind: partial(self._fetched, work[kind]) for kind in USES_FETCHED if kind in work}
        for rank, stages in run.stages.stages_of.items():
            if any(run.routes[stage.index].micro_batches[Kind.OFFLOAD] for stage in stages):
                self.hosts[rank] = host_of(run.stages.streams[rank])

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        try:
            yield
            for host in self.hosts.values():
                host.finish()
        except BaseException:
            self._close()
            raise
        if table is not run.compiled.forward:
            self._close()

    def last_copy(self, rank: int) -> HostCopy | None:
        return self.hosts[rank].last

    def await_copies(self, rank: Rank, task: CompiledAction) -> None:
        """Waits for the FETCH that a backward pass or a recompute needs."""
        if task.action.kind not in USES_FETCHED:
            return
        activations = self.activations.pop((task.stage, task.micro_batch), None)
        if activations is not None:
            self.hosts[rank.rank].finish(activations)
            activations.release()

    def _close(self) -> None:
        for host in self.hosts.values():
            host.close()

    def _forward(self, forward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        if task.micro_batch not in run.routes[task.stage].micro_batches[Kind.OFFLOAD]:
            forward(run, rank, task)
            return
        activations = self.activations[task.stage, task.micro_batch] = OffloadedActivations()
        recomputes = task.micro_batch in run.routes[task.stage].micro_batches[Kind.RECOMPUTE]
        with nullcontext() if recomputes else activations.watched():
            forward(run, rank, task)
        if recomputes:
            inputs = rank.states[task.stage, task.micro_batch].inputs
            unique = {id(tensor): tensor for boundary in inputs for tensor in tensors_in(boundary.value)}
            activations.saved += [SavedTensor(tensor, tensor._version) for tensor in unique.values()]

    def _fetched(self, work: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        self.await_copies(rank, task)
        work(run, rank, task)

    def _offload(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """OFFLOAD: starts to copy activations or inputs to the host."""
        self.hosts[rank.rank].offload(task.action, self.activations[task.stage, task.micro_batch])

    def _fetch(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """FETCH: starts to copy them back to the device."""
        self.hosts[rank.rank].fetch(task.action, self.activations[task.stage, task.micro_batch])


class FileHost(_Moves):
    """Offloads the activations of a rank on a CPU: a thread writes them to an unnamed temporary file per micro-batch.

    The file does not count as memory of the process, and the operating system can evict the file's pages.
    """

    def __init__(self, stream: RankStream) -> None:
        super().__init__(stream)
        self._thread = ThreadPoolExecutor(1, NAME)

    def offload(self, action: Action, activations: OffloadedActivations) -> None:
        """Starts to write the activations of a micro-batch to a new file."""
        self.finish()
        activations.select_storages()
        with room_for(sum(storage.size for storage in activations.moved)):
            activations.host_data = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # open until FETCH has ended
        weakref.finalize(activations, activations.host_data.close)  # if there is no FETCH
        self._begin(action, activations, _write)

    def fetch(self, action: Action, activations: OffloadedActivations) -> None:
        """Maps the file into memory, and starts to read it."""
        self.finish()
        for offset, storage in _offsets(activations.moved):
            storage.lay_in(_map(activations.host_data.fileno(), offset, storage.size))
        self._begin(action, activations, _read)

    def _begin(
        self, action: Action, activations: OffloadedActivations, work: Callable[[OffloadedActivations], float]
    ) -> None:
        done: Future[float] = self._thread.submit(work, activations)
        self.last, self._moving = HostCopy(action, self.stream.stamp(), done.result), activations

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)


def _offsets(moved: Sequence[OffloadedStorage]) -> Iterator[tuple[int, OffloadedStorage]]:
    """Returns each storage with its offset in the file. Offsets are multiples of the page size, for `mmap`."""
    offset = 0
    for storage in moved:
        yield offset, storage
        offset += -(-storage.size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(file: int, offset: int, size: int) -> UntypedStorage:
    """Maps a part of a file into memory. Python's `mmap` would duplicate the file descriptor for each part."""
    reads_and_writes, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    address = LIBC.mmap(None, ctypes.c_size_t(size), reads_and_writes, private, file, ctypes.c_long(offset))
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "Offloaded activations could not be mapped into memory.")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, LIBC.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _write(activations: OffloadedActivations) -> float:
    give_back(0)
    with room_for(sum(storage.size for storage in activations.moved)):
        for offset, storage in _offsets(activations.moved):
            memory, done = memoryview((ctypes.c_char * storage.size).from_address(storage.address())), 0
            while done < storage.size:  # One call writes at most 2 GiB.
                done += os.pwrite(activations.host_data.fileno(), memory[done:], offset + done)
    return time.perf_counter()


def _read(activations: OffloadedActivations) -> float:
    give_back(0)
    for storage in activations.moved:
        LIBC.madvise(ctypes.c_void_p(storage.address()), ctypes.c_size_t(storage.size), POPULATE_READ)
    activations.host_data.close()
    return time.perf_counter()


class PinnedHost(_Moves):
    """Offloads the activations of a rank on a GPU to pinned memory, on a stream for copies."""

    stream: DeviceStream

    def __init__(self, stream: RankStream) -> None:
        super().__init__(stream)
        self._copies = torch.Stream(stream.device)

    def offload(self, action: Action, activations: OffloadedActivations) -> None:
        """Queues copies of the activations to pinned memory."""
        self.finish()
        activations.select_storages()
        activations.host_data = [
            torch.empty(storage.size, dtype=torch.uint8, pin_memory=True) for storage in activations.moved
        ]
        self._queue(action, activations)

    def fetch(self, action: Action, activations: OffloadedActivations) -> None:
        """Queues copies back to the device."""
        self.finish()
        for storage in activations.moved:
            memory = torch.empty(storage.size, dtype=torch.uint8, device=self.stream.device)
            storage.lay_in(memory.untyped_storage())
        self._queue(action, activations)

    def _queue(self, action: Action, activations: OffloadedActivations) -> None:
        self._copies.wait_event(self.stream.mark())  # type: ignore[arg-type]  # It is an event on a GPU.
        with queued_on(self._copies):
            began = event_on(self._copies, enable_timing=True)
            for storage, pinned in zip(activations.moved, activations.host_data, strict=True):
                device = storage.bytes()
                target, source = (pinned, device) if action.kind is Kind.OFFLOAD else (device, pinned)
                target.copy_(source, non_blocking=True)
            ended = event_on(self._copies, enable_timing=True)
        self.last = HostCopy(action, began, partial(self._wait, action.kind, ended))
        self._moving = activations

    def _wait(self, kind: Kind, ended: torch.Event) -> Stamp:
        if kind is Kind.OFFLOAD:  # The memory that is freed next may belong to any stream.
            ended.synchronize()
        else:
            self.stream.compute.wait_event(ended)
        return ended

    def close(self) -> None:
        """Waits for the copy that a failed step has left in flight, because the memory of the copy is freed next."""
        if self.last is not None:
            self._copies.synchronize()


def host_of(stream: RankStream) -> Host:
    """Returns the host to which a rank offloads activations: files for a CPU, pinned memory for a GPU."""
    return PinnedHost(stream) if queues(stream.device) else FileHost(stream)
