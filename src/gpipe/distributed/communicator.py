"""Implements collectives that also check that all processes of a pipe make the same call.

- `all_gather_checked` runs between steps. It gathers a value from each rank, or raises an error on all ranks.
- `broadcast_header` begins a run. The process with the first stage sends a header to the other processes of its
  replica. Each process compares the header with its own call.
"""

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpipe.distributed.codec import decoding
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.mesh import Position
from gpipe.errors import RemoteError
from gpipe.stages.messages import Control, Label

LONGEST_SHOWN = 300  # characters of a setting that a message shows; longer ones are compared by checksum


class Communicator:
    """Sends messages between the processes of a pipe. This base class is for a pipe with a single process.

    Attributes:
        rank: The rank of this process within the pipe.
        size: The number of processes.
        survives: Whether other processes may change between two calls, because a replica is lost or comes back.
    """

    rank: int = 0
    size: int = 1
    survives: bool = False

    @property
    def readers(self) -> "Communicator":
        """The processes that load a checkpoint together. Before `join`, only the processes of this replica."""
        return self

    def all_gather(self, message: bytes, /) -> list[bytes]:
        """Sends a message to all processes, and returns the messages of all processes, ordered by rank.

        Every process must call this method.
        """
        return [message]

    def note_signal(self) -> None:
        """Notes that a rank has received a signal, and that all ranks are about to end."""

    def gone(self) -> Collection[int]:
        """Returns the ranks whose connection to this process has ended. Thread-safe."""
        return ()


def versions() -> dict[str, str]:
    """Returns the installed version of each package that must have the same version on all ranks."""
    try:
        installed = version("gpipe")
    except PackageNotFoundError:
        installed = "not installed"
    return {"gpipe": installed, "torch": torch.__version__}


def communicator_of(pipe: object) -> Communicator:
    """Returns the communicator of a pipe. For a plain module, returns a communicator for a single process."""
    return getattr(pipe, "_processes", None) or Communicator()


class FirstError(AbstractContextManager["FirstError"]):
    """A context manager that suppresses exceptions and keeps the first exception.

    The caller passes this exception to `all_gather_checked`, which raises it and reports it to all ranks. A rank with
    an error therefore does not leave the other ranks waiting.

    >>> failed = FirstError()
    >>> with failed:
    ...     raise OSError("the disk is full")
    >>> failed.error
    OSError('the disk is full')
    """

    error: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):  # interrupts are not kept
            self.error = self.error or error
        return isinstance(error, Exception)


def all_gather_checked(
    ranks: Communicator,
    value: Any = None,
    *,
    same: Mapping[str, object] | None = None,
    error: Exception | None = None,
    doing: str = "",
) -> list[Any]:
    """Gathers a value from each rank. Raises an error on all ranks if a rank failed or if settings differ.

    Every rank must call this function.

    Args:
        ranks: The processes.
        value: A value that JSON can represent.
        same: Settings by name that must be the same on all ranks. Settings are equal if their `repr` is equal.
        error: An exception of this rank. This rank raises the exception, and all other ranks raise a RemoteError.
        doing: The current activity. If a rank is lost, the error has a note with the activity.

    Returns:
        The values of all ranks, ordered by rank.

    Raises:
        ValueError: If settings differ.
        RemoteError: If another rank passed an `error` or is lost.
    """
    settings = {name: _shown(setting) for name, setting in (same or {}).items()}
    fault = None if error is None else [type(error).__name__, str(error)]
    values, settings_of, faults = list[Any](), dict[int, dict[str, str]](), dict[int, tuple[str, str]]()
    try:
        messages = ranks.all_gather(json.dumps([value, settings, fault]).encode())
    except RemoteError as lost:
        if doing:
            lost.add_note(f"while all ranks {doing}")
        raise
    for rank, message in enumerate(messages):
        with decoding("a message", rank):
            remote, settings_of[rank], remote_fault = json.loads(message.decode())
            values.append(remote)
            if remote_fault:
                faults[rank] = remote_fault
    if error is not None:
        for rank, (kind, text) in faults.items():
            if rank != ranks.rank:
                error.add_note(f"rank {rank} failed too: {kind}: {text}")
        raise error
    if faults:
        first = min(faults)
        lines = [f"rank {rank} failed: {kind}: {text}" for rank, (kind, text) in faults.items()]
        raise RemoteError("\n".join(lines), first, faults[first][0])
    check_same_on_ranks(settings_of)
    return values


def check_same_on_ranks(settings: Mapping[int, Mapping[str, str]]) -> None:
    """Checks that all ranks have the same settings.

    Raises:
        ValueError: If settings differ.
    """
    if different := differences(settings):
        raise ValueError(
            f"Ranks have different values: {'; '.join(different)}. Pass the same values on all ranks. "
            f"[different-on-ranks]"
        )


def differences(settings: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Returns a text for each setting that differs between ranks. For each value, the text names the first rank.

    >>> differences({0: {"seed": "3", "remat": "True"}, 1: {"seed": "4", "remat": "True"}})
    ['seed is 3 on rank 0 and 4 on rank 1']
    """
    texts = []
    for name in dict.fromkeys(name for remote in settings.values() for name in remote):
        first: dict[str, int] = {}
        for rank, remote in settings.items():
            first.setdefault(remote.get(name, "missing"), rank)
        if len(first) > 1:
            texts.append(f"{name} is " + " and ".join(f"{value} on rank {rank}" for value, rank in first.items()))
    return texts


def _shown(setting: object) -> str:
    text = repr(setting)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:LONGEST_SHOWN]}... (checksum {zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x})"


CALLED = "the called function"
GRADIENTS = "whether gradients are enabled"
PROGRAM = "the checksum of the program (schedule= if it is a function, remat=, and shared weights)"


def broadcast_header(
    endpoint: Endpoint,
    position: Position,
    first: int,
    same: Mapping[str, object],
    values: Sequence[Any] = (),
    apply: Callable[..., int] = lambda: 0,
) -> None:
    """Begins a run.

    The rank with the first stage sends values and the properties of its call to the other ranks of its replica. Each
    rank compares these properties with its own call.

    Args:
        endpoint: The connections of this process.
        position: The position of this process in the mesh.
        first: The rank with the first stage of this replica.
        same: Properties of this process's call, by name. The first entry must be `CALLED`.
        values: Values that JSON can represent. Only rank `first` must pass values.
        apply: A function that every rank calls with the values of rank `first`. It returns the checksum of the
            program to run.

    Raises:
        ValueError: If the call or the program differs between this process and rank `first`.
    """
    call, text = {name: str(value) for name, value in same.items()}, None
    if endpoint.rank == first:
        call[PROGRAM] = str(apply(*values))
        text = torch.frombuffer(bytearray(json.dumps([call, values]).encode()), dtype=torch.uint8)
    text = endpoint.broadcast(first, position.replica_ranks, Label(Control.HEADER, 0, gradient=False), text)
    if endpoint.rank == first:
        return
    with decoding("a header", first):
        first_call, values = json.loads(bytes(text.tolist()))
        is_same_call, has_same_mode = (first_call.get(name) == call.get(name) for name in (CALLED, GRADIENTS))
    if is_same_call and has_same_mode:
        call[PROGRAM] = str(apply(*values))
    else:
        first_call.pop(PROGRAM, None)
    if mistakes := differences({first: first_call, endpoint.rank: call}):
        mistakes = mistakes if is_same_call else mistakes[:1]  # the other differences follow from this one
        raise ValueError(
            f"Processes make different calls: {'; '.join(mistakes)}. Call the pipe the same number of times in every "
            f"process, with the same arguments. [different-calls]"
        )
