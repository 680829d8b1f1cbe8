"""The hooks of features. The runtime calls them and does not depend on any feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from gpipe.schedule.action import Kind

if TYPE_CHECKING:
    from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
    from gpipe.runtime.run import MicroBatchState, Rank, Run
    from gpipe.stages.boundary import BoundaryInput
    from gpipe.stages.stage import StageCall

Work: TypeAlias = "Callable[[Run, Rank, CompiledAction], Any]"

_NOTHING = nullcontext()


class Feature:
    """Base class of features. Each object holds the state of a feature in one mini-batch of one process.

    A feature overrides the hooks that it needs. A feature must not keep a reference to the run or the rank, which are
    passed to the hooks.
    """

    alters_layers: ClassVar[bool] = False
    """Whether the feature changes the results of layers. If it does, a replay of the step needs the feature too."""

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        """Adds functions for further kinds of action to `work`, or wraps functions that `work` contains.

        The functions of F and B call `work[Kind.SEND]` to send `rank.outbox`, and pass their own action to it. So a
        wrapper of SEND receives an F or B action. It is also called for messages that stay in the rank.
        """

    def around_pass(self, run: Run, table: CompiledTable) -> AbstractContextManager[object]:
        """Returns a context for the actions of all ranks of this process in `table`.

        At its exit, devices may still compute. Read their results in `complete`.
        """
        raise NotImplementedError

    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, attached: Sequence[BoundaryInput], call: StageCall
    ) -> AbstractContextManager[object]:
        """Returns a context for the layers of a stage. At its exit, `call.output` is their output."""
        raise NotImplementedError

    def complete(self, run: Run) -> None:
        """Makes changes permanent, after the mini-batch has succeeded in all processes.

        A call that records gradients completes twice: after its forward pass and after its backward pass.
        """

    def note_error(self, run: Run, rank: Rank, table: CompiledTable, position: int, error: BaseException) -> None:
        """Adds notes to an exception that the action at this position in the rank's row has raised."""


class Hooks:
    """Functions that call each hook of all features that override it. Later features wrap earlier features."""

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        outermost = features[::-1]
        self.around_pass = partial(_around, _overridden(outermost, "around_pass"))
        self.around_layers = partial(_around, _overridden(outermost, "around_layers"))
        self.complete = partial(_call_all, _overridden(features, "complete"))
        self.note_error = partial(_call_all, _overridden(features, "note_error"))


def _overridden(features: Sequence[Feature], hook: str) -> list[Callable[..., Any]]:
    return [getattr(f, hook) for f in features if getattr(type(f), hook) is not getattr(Feature, hook)]


def _call_all(hooks: Sequence[Callable[..., object]], *args: Any) -> None:
    for hook in hooks:
        hook(*args)


def _around(hooks: Sequence[Callable[..., Any]], *args: Any) -> AbstractContextManager[object]:
    return _enter_all(hooks, args) if hooks else _NOTHING


@contextmanager
def _enter_all(hooks: Sequence[Callable[..., AbstractContextManager[object]]], args: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook(*args))
        yield
