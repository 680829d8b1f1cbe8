"""What is recorded of an epoch: memory in its first step, as it takes time to watch it, and the time of others."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import gpipe

T = TypeVar("T")
KEPT = 100
"""Steps."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """Recordings of an epoch.

    Attributes:
        steps: When what was done; in all steps but the first, if there are others.
        memory: What was held in the first step; None where it is the only one.
    """

    steps: gpipe.Recording
    memory: gpipe.Recording | None

    @classmethod
    def of(cls, pipe: gpipe.GPipe, steps: int) -> Self:
        """Begins to record the last of so many steps."""
        time = gpipe.record(pipe, keep=min(steps, KEPT))
        return cls(time, gpipe.record(pipe, memory=True) if steps > 1 else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_watching()
        self.steps.stop()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterates over the mini-batches; memory is watched until the second is asked for."""
        for batch in self.steps.loading(batches):
            yield batch
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self.memory is not None:
            self.memory.stop()

    @property
    def held(self) -> tuple[Mapping[str, int], ...]:
        """The bytes of each rank at its peak, by what they were for; nothing where other processes have ranks."""
        return (self.memory or self.steps).report("").memory
