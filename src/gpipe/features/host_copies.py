"""Copies between a rank's device and the host that run while the rank continues."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from gpipe.runtime.compiled_table import CompiledAction
from gpipe.runtime.feature import Feature
from gpipe.runtime.run import Rank
from gpipe.runtime.streams import Stamp
from gpipe.schedule.action import Action, Kind


@dataclass(eq=False)
class HostCopy:
    """A copy to or from the host. `wait` waits until the copy is complete, and returns the time of completion."""

    action: Action
    began: Stamp
    wait: Callable[[], Stamp]
    ended: Stamp | None = None

    def finish(self) -> None:
        """Waits until the copy is complete."""
        try:
            self.ended = self.wait()
        except BaseException as error:
            error.add_note(f"in {self.action}, which was in flight")
            raise


class CopyingFeature(Feature):
    """A feature with actions that start copies. Other actions wait for the copies that they need.

    Attributes:
        starts: The kinds of actions that start a copy.
    """

    starts: ClassVar[frozenset[Kind]]

    def last_copy(self, rank: int) -> HostCopy | None:
        """Returns the copy that a rank has started last."""
        raise NotImplementedError

    def await_copies(self, rank: Rank, task: CompiledAction) -> None:
        """Waits for the copies that an action needs."""
        raise NotImplementedError
