"""While a pipe is built: what all processes must know of each other, and that none waits for one that has failed."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from gpipe.run.place import Place, default_device
from gpipe.run.rendezvous import tell_all
from gpipe.run.transport import RemoteError


class Council:
    """Talks of the processes that build one pipe, each a dict of JSON from everyone."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Tells the others, who wait at their next `tell`, if something fails inside."""
        try:
            yield
        except RemoteError:
            raise
        except BaseException as error:
            self._tell_all(_failure(error))
            raise

    def tell(self, **told: Any) -> list[Mapping[str, Any]]:
        """What each process of the pipe told here, by rank.

        Raises:
            RemoteError: Another process failed before it came here.
        """
        every = self.tell_world(**told)
        return [every[member] for member in self.place.members]

    def tell_world(self, **told: Any) -> list[Mapping[str, Any]]:
        """What each process of the world told here: also those that have other parts of the same layers.

        Raises:
            RemoteError: Another process failed before it came here.
        """
        every = self._tell_all(told)
        for number, theirs in enumerate(every):
            if "type" in theirs:
                rank = self.place.members.index(number) if number in self.place.members else number
                raise RemoteError(
                    f"rank {rank} failed while the pipe was built: {theirs['type']}: {theirs['text']}",
                    rank,
                    theirs["type"],
                )
        return every

    def _tell_all(self, told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [json.loads(theirs) for theirs in tell_all(json.dumps(told).encode(), self.place.device)]

    def compare(self, **settings: object) -> None:
        """Checks that all processes have the same settings.

        Raises:
            ValueError: Names what differs, and on which ranks.
        """
        own = {name: _sum(value) for name, value in settings.items()}
        every = self.tell(sums=own, shown={name: str(value)[:60] for name, value in settings.items()})
        mistakes = []
        for name in settings:
            shown = {
                theirs["sums"].get(name): (rank, theirs["shown"].get(name, "none"))
                for rank, theirs in enumerate(every)
            }
            if len(shown) > 1:
                found = ", ".join(f"{text} (rank {rank})" for rank, text in sorted(shown.values()))
                mistakes.append(f"{name} differs between the processes: {found}; give the same everywhere")
        if mistakes:
            raise ValueError("GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in mistakes))


def give_up(error: BaseException) -> None:
    """Tells all processes of the world, who wait at their first `tell`, that this one cannot even find its place."""
    if dist.is_available() and dist.is_initialized():
        tell_all(json.dumps(_failure(error)).encode(), default_device())


def _failure(error: BaseException) -> dict[str, str]:
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {"type": type(error).__name__, "text": text[:10_000]}


def _sum(value: object) -> int:
    return zlib.crc32(repr(value).encode())
