"""The seam between a mini-batch and other processes: what a process that is one of several does otherwise."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from gpipe.layers.batchnorm import Deferred
from gpipe.layers.stage import LayerProgress
from gpipe.layers.weight_aliases import WeightAliases
from gpipe.plan.action import Action
from gpipe.runtime.mailbox import Mailbox
from gpipe.runtime.rows import CompiledProgram, CompiledRows
from gpipe.values.messages import Transport


class Others(Protocol):
    """What the ranks of this process do together with others, in one mini-batch.

    Attributes:
        transport: Carries messages between ranks.
    """

    transport: Transport

    def name(self, rank: int) -> str:
        """A rank of this process, in messages."""

    def new_progress(self) -> LayerProgress:
        """Where a stage notes how far it is, for whoever looks."""

    def around(self, rows: CompiledRows) -> AbstractContextManager[object]:
        """What is done before and behind the rows."""

    def close(self, action: Action) -> None:
        """Does a TIE or REDUCE."""

    def share(self, deferred: Mapping[int, Deferred]) -> None:
        """Has statistics, by stage, be those of all replicas."""


class Alone:
    """All ranks are of this process: they hand each other what they have, and tell nobody."""

    def __init__(self, compiled: CompiledProgram, aliases: WeightAliases) -> None:
        self.transport: Transport = Mailbox(compiled.program.ranks)

    def name(self, rank: int) -> str:
        """A rank, in messages."""
        return f"rank {rank}"

    def new_progress(self) -> LayerProgress:
        """Nobody looks."""
        return LayerProgress()

    def around(self, rows: CompiledRows) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def close(self, action: Action) -> None:
        """There is none."""
        raise AssertionError(f"{action} is for several processes")

    def share(self, deferred: Mapping[int, Deferred]) -> None:
        """They are those of the only replica."""
