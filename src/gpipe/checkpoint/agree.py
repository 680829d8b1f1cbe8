"""What the ranks tell each other: JSON, and whether any of them failed. Alone in a process, a rank hears itself."""

import json
from types import TracebackType
from typing import Any

from gpipe.distributed.team import Team
from gpipe.errors import RemoteError


class Trouble:
    """The first error in any of the blocks that were run `with` it: kept until all ranks are told, by `agree`.

    So a rank on which something fails does not leave the others waiting.
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
    """Tells all ranks something, and gives what each told, by rank; every rank calls it.

    Raises:
        Exception: `error`, if this rank has one.
        RemoteError: Another rank has one.
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
    """Like `agree`, for ranks that were all given the same.

    Raises:
        ValueError: They were given different things.
    """
    heard = agree(team, {"same": same, "told": told}, error)
    mistakes = [
        f"{key} is {each['same'][key]!r} on rank {rank} and {heard[0]['same'][key]!r} on rank 0"
        for rank, each in enumerate(heard)
        for key in same
        if each["same"][key] != heard[0]["same"][key]
    ]
    if mistakes:
        raise ValueError("all ranks must be given the same: " + "; ".join(mistakes))
    return [each["told"] for each in heard]
