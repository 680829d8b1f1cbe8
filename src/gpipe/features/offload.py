"""OFFLOAD and FETCH: copies the activations that autograd saves to host memory, and back for the backward.

Hooks see everything that autograd saves in a forward. A storage is offloaded only if nothing else refers to it. So
weights, buffers, boundary tensors, and tensors that a layer or the caller keeps stay. A storage that is saved twice,
or has views, is copied once and shared again. Shapes, strides and alignment are kept, and so are all bits.

A rank has one copy in flight, and runs other actions while it lasts. It waits for the copy before the next
copy, or before the backward that needs it. On a device, only its stream waits.

On a CPU, glibc keeps freed memory, and the process would grow to the activations of all micro-batches. So each copy
returns free pages to the system, and FETCH maps the file into memory, which is freed as soon as its node has run.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from gpipe._torch.accelerator import queued_on, queues
from gpipe._torch.autograd import SavedTensor, memory_users, unpack
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import Rank, Run
from gpipe.runtime.streams import DeviceStream, RankStream, Stamp, event_on
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.rules import BACKWARDS

Host: TypeAlias = "FileHost | PinnedHost"
NAME = "gpipe moves"  # of the thread that moves
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
give_back: Callable[[int], object] = getattr(LIBC, "malloc_trim", int)
"""Has glibc give the pages of all that is free back to the system; other allocators do so in their own time."""
POPULATE_READ = 22
"""Of `madvise`: maps all pages at once, of Linux from 5.14 on. Elsewhere a page comes when it is first read."""


@dataclass(slots=True, eq=False)
class OffloadedStorage:
    """A storage that is offloaded, and the tensors of it that autograd saved."""

    storage: UntypedStorage | None  # None: it is away
    size: int
    saved: Sequence[SavedTensor]

    def bytes(self) -> Tensor:
        """What it holds."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def address(self) -> int:
        """Its address. No numpy view is taken, because torch does not resize storages that numpy has seen."""
        assert self.storage is not None
        return self.storage.data_ptr()

    def free(self) -> None:
        """Lets go of it."""
        self.storage = None
        for one in self.saved:
            one.release_storage()

    def lay_in(self, storage: UntypedStorage) -> None:
        """Puts the saved tensors into a new storage, in the same layout."""
        self.storage = storage
        for one in self.saved:
            one.restore_storage(storage)


@dataclass(eq=False)
class OffloadedActivations:
    """The tensors that autograd saves for one micro-batch at one stage, and the storages that are offloaded."""

    saved: list[SavedTensor] = field(default_factory=list)
    moved: list[OffloadedStorage] = field(default_factory=list)
    there: Any = None  # where it is with the host

    def watched(self) -> AbstractContextManager[object]:
        """Collects what autograd saves inside this context."""
        saved = self.saved  # and no more than that: the graph keeps the hooks

        def pack(tensor: Tensor) -> SavedTensor:
            saved.append(SavedTensor.of(tensor))
            return saved[-1]

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def leave(self) -> None:
        """Finds the storages to which only saved tensors refer."""
        alike = defaultdict[int, list[SavedTensor]](list)
        for one in self.saved:
            alike[one.address].append(one)
        alike.pop(0, None)
        for some in alike.values():
            storage = some[0].tensor.untyped_storage()
            alone = memory_users(some[0].tensor) == len(some) and storage.resizable()  # nor is it another library's
            if alone and all(one.is_as_saved for one in some):
                self.moved.append(OffloadedStorage(storage, storage.nbytes(), some))
        self.saved.clear()

    def arrive(self) -> None:
        """Drops the references to fetched storages. Only the graph keeps them, until each node has run."""
        self.moved, self.there = [], None


@dataclass(eq=False)
class HostCopy:
    """A copy in flight: its start, its storages, and what to wait for."""

    action: Action
    inside: OffloadedActivations
    began: Stamp
    wait: Callable[[], Stamp]  # gives when it was done
    ended: Stamp | None = None


class _Moves:
    """The copies of a rank, one at a time."""

    last: HostCopy | None = None

    def __init__(self, stream: RankStream) -> None:
        self.stream, self._process = stream, os.getpid()

    def finish(self, inside: OffloadedActivations | None = None) -> None:
        """Waits until the copy in flight is done, or only if it is of these activations."""
        if os.getpid() != self._process:
            raise RuntimeError("what was offloaded comes back in its own process, of which this one is a fork")
        if self.last is None or inside not in (None, self.last.inside):
            return
        move, self.last = self.last, None
        try:
            move.ended = move.wait()
        except BaseException as error:
            error.add_note(f"in {move.action}, which was under way")
            raise
        if move.action.kind is Kind.OFFLOAD:
            for one in move.inside.moved:
                one.free()


class Offload(Feature):
    """Copies what autograd keeps to the host and back, on all ranks of this process."""

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}  # by rank
        self.activations: dict[tuple[int, int], OffloadedActivations] = {}  # by stage and micro-batch

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work[Kind.FORWARD] = partial(self._forward, work[Kind.FORWARD])
        work[Kind.OFFLOAD], work[Kind.FETCH] = self._offload, self._fetch
        work |= {kind: partial(self._backward, work[kind]) for kind in BACKWARDS if kind in work}
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

    def await_fetch(self, rank: Rank, task: CompiledAction) -> None:
        """Waits until what the backward of a micro-batch needs is back."""
        activations = self.activations.pop((task.stage, task.micro_batch), None)
        if activations is not None:
            self.hosts[rank.rank].finish(activations)
            activations.arrive()

    def _close(self) -> None:
        for host in self.hosts.values():
            host.close()

    def _forward(self, forward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        if task.micro_batch not in run.routes[task.stage].micro_batches[Kind.OFFLOAD]:
            forward(run, rank, task)
            return
        activations = self.activations[task.stage, task.micro_batch] = OffloadedActivations()
        with activations.watched():
            forward(run, rank, task)

    def _backward(self, backward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        self.await_fetch(rank, task)
        backward(run, rank, task)

    def _offload(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """OFFLOAD: begins to copy to the host."""
        self.hosts[rank.rank].offload(task.action, self.activations[task.stage, task.micro_batch])

    def _fetch(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """FETCH: begins to copy back."""
        self.hosts[rank.rank].fetch(task.action, self.activations[task.stage, task.micro_batch])


class FileHost(_Moves):
    """The host storage of a rank on a CPU: an unnamed temporary file for each micro-batch, and a thread.

    The file does not count as memory of the process, and the system can drop it from its cache.
    """

    def __init__(self, stream: RankStream) -> None:
        super().__init__(stream)
        self._thread = ThreadPoolExecutor(1, NAME)

    def offload(self, action: Action, inside: OffloadedActivations) -> None:
        """Begins to write what a micro-batch keeps."""
        self.finish()
        inside.leave()
        with room_for(sum(one.size for one in inside.moved)):
            inside.there = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # until it is back
        weakref.finalize(inside, inside.there.close)  # if it never is
        self._begin(action, inside, _write)

    def fetch(self, action: Action, inside: OffloadedActivations) -> None:
        """Begins to read it back."""
        self.finish()
        for start, one in _placed(inside.moved):
            one.lay_in(_mapped(inside.there.fileno(), start, one.size))
        self._begin(action, inside, _read)

    def _begin(
        self, action: Action, inside: OffloadedActivations, work: Callable[[OffloadedActivations], float]
    ) -> None:
        done: Future[float] = self._thread.submit(work, inside)
        self.last = HostCopy(action, inside, self.stream.stamp(), done.result)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)


def _placed(moved: Sequence[OffloadedStorage]) -> Iterator[tuple[int, OffloadedStorage]]:
    """Each storage, and where it begins in the file: at a page, since it is mapped from there."""
    start = 0
    for one in moved:
        yield start, one
        start += -(-one.size // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(file: int, start: int, size: int) -> UntypedStorage:
    """A part of a file as memory of its own. Python's mmap would hold one more file open for each."""
    reads_and_writes, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    address = LIBC.mmap(None, ctypes.c_size_t(size), reads_and_writes, private, file, ctypes.c_long(start))
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "what was offloaded could not be mapped")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, LIBC.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Has an OSError inside tell what was to be written, and in which folder."""
    try:
        yield
    except OSError as error:
        remedy = "set TMPDIR to where there is room"
        if error.errno == errno.EMFILE:
            remedy = "each micro-batch in flight has a file open: raise `ulimit -n`"
        error.add_note(f"{size:,} bytes were to go to {tempfile.gettempdir()}; {remedy}")
        raise


def _write(inside: OffloadedActivations) -> float:
    give_back(0)
    with room_for(sum(one.size for one in inside.moved)):
        for start, one in _placed(inside.moved):
            memory, done = memoryview((ctypes.c_char * one.size).from_address(one.address())), 0
            while done < one.size:  # the system takes at most 2 GiB at once
                done += os.pwrite(inside.there.fileno(), memory[done:], start + done)
    return time.perf_counter()


def _read(inside: OffloadedActivations) -> float:
    give_back(0)
    for one in inside.moved:
        LIBC.madvise(ctypes.c_void_p(one.address()), ctypes.c_size_t(one.size), POPULATE_READ)
    inside.there.close()
    return time.perf_counter()


class PinnedHost(_Moves):
    """The host storage of a rank on a device: pinned memory, and a stream to copy on."""

    stream: DeviceStream

    def __init__(self, stream: RankStream) -> None:
        super().__init__(stream)
        self._copies = torch.Stream(stream.device)

    def offload(self, action: Action, inside: OffloadedActivations) -> None:
        """Queues the copies to pinned memory."""
        self.finish()
        inside.leave()
        inside.there = [torch.empty(one.size, dtype=torch.uint8, pin_memory=True) for one in inside.moved]
        self._queue(action, inside)

    def fetch(self, action: Action, inside: OffloadedActivations) -> None:
        """Queues the copies back."""
        self.finish()
        for one in inside.moved:
            memory = torch.empty(one.size, dtype=torch.uint8, device=self.stream.device)
            one.lay_in(memory.untyped_storage())
        self._queue(action, inside)

    def _queue(self, action: Action, inside: OffloadedActivations) -> None:
        self._copies.wait_event(self.stream.mark())  # type: ignore[arg-type]  # an event, on a device
        with queued_on(self._copies):
            began = event_on(self._copies, enable_timing=True)
            for one, there in zip(inside.moved, inside.there, strict=True):
                pair = (there, one.bytes()) if action.kind is Kind.OFFLOAD else (one.bytes(), there)
                pair[0].copy_(pair[1], non_blocking=True)
            ended = event_on(self._copies, enable_timing=True)

        self.last = HostCopy(action, inside, began, partial(self._wait, action.kind, ended))

    def _wait(self, kind: Kind, ended: torch.Event) -> Stamp:
        if kind is Kind.OFFLOAD:  # what is freed then may be of any stream
            ended.synchronize()
        else:
            self.stream.compute.wait_event(ended)
        return ended

    def close(self) -> None:
        """Waits for copies that a step that failed has left under way: their memory is freed next."""
        if self.last is not None:
            self._copies.synchronize()


def host_of(stream: RankStream) -> Host:
    """Where a rank puts what it offloads."""
    return PinnedHost(stream) if queues(stream.device) else FileHost(stream)
