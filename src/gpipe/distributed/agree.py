"""How the ranks of a pipe come to do the same: `agree` gathers a value from each between runs, or raises on all.

Before a run the first stage sends the others of its replica a header, which they compare with what they would do.
"""

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpipe.distributed.codec import reading
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.mesh import Position
from gpipe.errors import RemoteError
from gpipe.stages.messages import Control, Label

LONGEST_SHOWN = 300  # characters of a setting; what is longer is cut, and compared by its checksum


class Communicator:
    """The processes of a pipe, as one of them talks to all; this one is alone, whatever stages it runs."""

    rank: int = 0
    size: int = 1

    def exchange(self, message: bytes, /) -> list[bytes]:
        """Sends a message to all processes, and gathers those of all, by rank. Every process calls it, as often."""
        return [message]

    def gone(self) -> Collection[int]:
        """The ranks to which there is no connection any more, as far as that is known. Any thread may ask."""
        return ()


def versions() -> dict[str, str]:
    """What is installed, by its name."""
    try:
        own = version("gpipe")
    except PackageNotFoundError:
        own = "not installed"
    return {"gpipe": own, "torch": torch.__version__}


def communicator_of(pipe: object) -> Communicator:
    """The processes that a pipe, or plain layers, are trained by."""
    return getattr(pipe, "_processes", None) or Communicator()


class FirstError(AbstractContextManager["FirstError"]):
    """The first error in any of the blocks that were run `with` it: kept until all ranks are told, by `agree`.

    So a rank on which something fails does not leave the others waiting.

    >>> failed = FirstError()
    >>> with failed:
    ...     raise OSError("the disk is full")
    >>> failed.error
    OSError('the disk is full')
    """

    error: Exception | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):  # else nothing is wrong, or it is an interrupt, which goes on
            self.error = self.error or error
        return isinstance(error, Exception)


def agree(
    ranks: Communicator,
    value: Any = None,
    *,
    same: Mapping[str, object] | None = None,
    error: Exception | None = None,
    doing: str = "",
) -> list[Any]:
    """Gathers a value that JSON can hold from all ranks, by rank; every rank calls it.

    `same` are settings by name that must be the same on all ranks, compared by their `repr`: else all raise a
    ValueError. The `error` that one rank has it raises, and all others a RemoteError. If one is gone, they tell what
    all were `doing` since they last agreed.
    """
    settings = {name: _shown(setting) for name, setting in (same or {}).items()}
    fault = None if error is None else [type(error).__name__, str(error)]
    values, same_of, faults = list[Any](), dict[int, dict[str, str]](), dict[int, tuple[str, str]]()
    try:
        messages = ranks.exchange(json.dumps([value, settings, fault]).encode())
    except RemoteError as lost:
        if doing:
            lost.add_note(f"while all ranks {doing}")
        raise
    for rank, message in enumerate(messages):
        with reading("a message", rank):
            remote, same_of[rank], failed = json.loads(message.decode())
            values.append(remote)
            if failed:
                faults[rank] = failed
    if error is not None:
        for rank, (kind, text) in faults.items():
            if rank != ranks.rank:
                error.add_note(f"rank {rank} failed too: {kind}: {text}")
        raise error
    if faults:
        first = min(faults)
        lines = [f"rank {rank} failed: {kind}: {text}" for rank, (kind, text) in faults.items()]
        raise RemoteError("\n".join(lines), first, faults[first][0])
    if different := differences(same_of):
        raise ValueError(f"all ranks must be given the same: {'; '.join(different)}")
    return values


def differences(settings: Mapping[int, Mapping[str, str]]) -> list[str]:
    """What should be the same on some ranks and is not, by its text; of the ranks with equal ones the first is named.

    >>> differences({0: {"seed": "3", "remat": "True"}, 1: {"seed": "4", "remat": "True"}})
    ['seed is 3 on rank 0 and 4 on rank 1']
    """
    found = []
    for name in dict.fromkeys(name for remote in settings.values() for name in remote):
        first: dict[str, int] = {}
        for rank, remote in settings.items():
            first.setdefault(remote.get(name, "missing"), rank)
        if len(first) > 1:
            found.append(f"{name} is " + " and ".join(f"{value} on rank {rank}" for value, rank in first.items()))
    return found


def _shown(setting: object) -> str:
    text = repr(setting)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:LONGEST_SHOWN]}... (checksum {zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x})"


CALLED = "what was called"
GRADIENTS = "whether gradients are enabled"
PROGRAM = "the checksum of the program (of schedule=, if that is a function, remat, and what layers share)"


def follow_first(
    endpoint: Endpoint,
    position: Position,
    first: int,
    same: Mapping[str, object],
    given: Sequence[Any] = (),
    take: Callable[..., int] = lambda: 0,
) -> None:
    """Has all processes of a replica do what that of the first stage does, `first`; a ValueError: one does not.

    `same` is what every process knows for itself, by its words, first what was `CALLED`; `given` what only that of
    the first stage knows, for JSON. `take` takes it there and here, and gives the checksum of the program of it.
    """
    own, text = {words: str(value) for words, value in same.items()}, None
    if endpoint.rank == first:
        own[PROGRAM] = str(take(*given))
        text = torch.frombuffer(bytearray(json.dumps([own, given]).encode()), dtype=torch.uint8)
    text = endpoint.spread(first, position.ranks_of_replica, Label(Control.HEADER, 0, gradient=False), text)
    if endpoint.rank == first:
        return
    with reading("a header", first):
        theirs, given = json.loads(bytes(text.tolist()))
        is_same_call, has_same_mode = (theirs.get(words) == own.get(words) for words in (CALLED, GRADIENTS))
    if is_same_call and has_same_mode:
        own[PROGRAM] = str(take(*given))
    else:
        theirs.pop(PROGRAM, None)
    if mistakes := differences({first: theirs, endpoint.rank: own}):
        mistakes = mistakes if is_same_call else mistakes[:1]  # all else follows
        raise ValueError(
            f"the processes have come apart: {'; '.join(mistakes)}. Call the pipe in every process, as often, and "
            f"with the same arguments"
        )
