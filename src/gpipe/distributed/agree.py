"""What the processes of a pipe tell each other between runs, and how they come to do the same.

Each has one word: all tell something at the same time, and hear what each told. Alone, a process hears itself.
"""

import json
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from gpipe.errors import RemoteError

Told = TypeVar("Told")


class Team(Protocol):
    """The processes of a pipe; in one process there is one, however many stages it runs.

    Attributes:
        rank: The number of this process.
        size: How many processes there are.
    """

    rank: int
    size: int

    def exchange(self, told: bytes) -> list[bytes]:
        """Tells all processes something, and gives what each told, by rank. Every process calls it, as often."""

    def gone(self) -> Collection[int]:
        """The ranks to which there is no connection any more, as far as that is known. Any thread may ask."""


class Alone:
    """One process."""

    rank = 0
    size = 1

    def exchange(self, told: bytes) -> list[bytes]:
        """Gives what was told."""
        return [told]

    def gone(self) -> Collection[int]:
        """No rank: there is none but this process."""
        return ()


def team_of(pipe: object) -> Team:
    """The processes that a pipe, or plain layers, are trained by."""
    return getattr(pipe, "team", None) or Alone()


class FirstError:
    """The first error in any of the blocks that were run `with` it: kept until all ranks are told, by `agree`.

    So a rank on which something fails does not leave the others waiting.

    >>> failed = FirstError()
    >>> with failed:
    ...     raise OSError("the disk is full")
    >>> failed.error
    OSError('the disk is full')
    """

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False  # nothing is wrong, or it is an interrupt, which goes on
        self.error = self.error or error
        return True


def agree(team: Team, told: Any = None, error: Exception | None = None) -> list[Any]:
    """Tells all ranks something that JSON can hold, and gives what each told, by rank; every rank calls it.

    Raises:
        Exception: `error`, if this rank has one.
        RemoteError: Another rank has one.

    >>> agree(Alone(), {"epoch": 3})
    [{'epoch': 3}]
    """
    fault = None if error is None else [type(error).__name__, str(error)]
    heard = [json.loads(each.decode()) for each in team.exchange(json.dumps({"told": told, "fault": fault}).encode())]
    faults = {rank: each["fault"] for rank, each in enumerate(heard) if each["fault"]}
    if error is not None:
        for rank, (kind, text) in faults.items():
            if rank != team.rank:
                error.add_note(f"rank {rank} failed too: {kind}: {text}")
        raise error
    if faults:
        first = min(faults)
        lines = [f"rank {rank} failed: {kind}: {text}" for rank, (kind, text) in faults.items()]
        raise RemoteError("\n".join(lines), first, faults[first][0])
    return [each["told"] for each in heard]


def agree_on(team: Team, same: dict[str, Any], told: Any = None, error: Exception | None = None) -> list[Any]:
    """Like `agree`, for ranks that were all given the same."""
    heard = agree(team, {"same": same, "told": told}, error)
    mistakes = [
        f"{name} is {value!r} on rank {rank} and {by_rank[0]!r} on rank 0"
        for name, by_rank in find_different(dict(enumerate(each["same"] for each in heard))).items()
        for rank, value in by_rank.items()
        if value != by_rank[0]
    ]
    if mistakes:
        raise ValueError("all ranks must be given the same: " + "; ".join(mistakes))
    return [each["told"] for each in heard]


def any_says(team: Team, so: bool) -> bool:
    """Whether any rank says so; every rank calls it.

    >>> any_says(Alone(), True)
    True
    """
    return any(told == b"1" for told in team.exchange(b"1" if so else b"0"))


def find_different(told: Mapping[int, Mapping[str, Told]]) -> dict[str, dict[int, Told]]:
    """What ranks told that should be the same and is not: by name, and then by rank.

    >>> find_different({0: {"seed": 3, "remat": True}, 1: {"seed": 4, "remat": True}})
    {'seed': {0: 3, 1: 4}}
    """
    names = next(iter(told.values()))
    by_name = {name: {rank: each[name] for rank, each in told.items()} for name in names}
    return {
        name: by_rank
        for name, by_rank in by_name.items()
        if any(value != next(iter(by_rank.values())) for value in by_rank.values())
    }
