"""The ranks that train one pipe together, as far as those need to know who only have something to tell each other."""

from collections.abc import Collection
from typing import Protocol


class Team(Protocol):
    """The processes of a pipe; in one process there is one, however many stages it runs.

    Attributes:
        rank: The number of this process.
        size: How many processes there are.
    """

    rank: int
    size: int

    def exchange(self, told: bytes) -> list[bytes]:
        """Tells all processes something, and gives what each told, by rank. Every process calls it, as often.

        Raises:
            RemoteError: Another process failed, or is gone.
        """

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
        """Nobody."""
        return ()
