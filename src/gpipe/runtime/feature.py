"""The hooks by which features take part in a mini-batch: the runtime calls them, and knows no feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    """A feature in one mini-batch of one process, with the state that it keeps of it.

    A feature overrides the hooks that it needs. It gets the run and the rank as arguments, and keeps neither.
    """

    alters_layers: ClassVar[bool] = False
    """Whether layers compute something else with it, so that a repetition of their actions needs it, too."""

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        """Adds the functions that perform its kinds of action to `work`, or wraps other functions there."""

    def around_pass(self, run: Run, table: CompiledTable) -> AbstractContextManager[object]:
        """Returns a context around the actions of all ranks of this process."""
        raise NotImplementedError

    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, entered: Sequence[BoundaryInput], call: StageCall
    ) -> AbstractContextManager[object]:
        """Returns a context around the layers of a stage. At its end, `call.output` is what they returned."""
        raise NotImplementedError

    def complete(self, run: Run) -> None:
        """Makes lasting what the mini-batch has changed, after it has succeeded in all processes."""

    def note_error(self, run: Run, rank: Rank, table: CompiledTable, at: int, error: BaseException) -> None:
        """Adds notes to an exception of action number `at` of a rank."""


class Hooks:
    """The hooks of several features, only those that they override. Later features are around earlier ones."""

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        outermost = features[::-1]
        self._around_pass = [f.around_pass for f in outermost if type(f).around_pass is not Feature.around_pass]
        self._around_layers = [
            f.around_layers for f in outermost if type(f).around_layers is not Feature.around_layers
        ]
        self._complete = [f.complete for f in features if type(f).complete is not Feature.complete]
        self._note_error = [f.note_error for f in features if type(f).note_error is not Feature.note_error]

    def around_pass(self, *args: Any) -> AbstractContextManager[object]:
        return _entered(self._around_pass, args) if self._around_pass else _NOTHING

    def around_layers(self, *args: Any) -> AbstractContextManager[object]:
        return _entered(self._around_layers, args) if self._around_layers else _NOTHING

    def complete(self, run: Run) -> None:
        for hook in self._complete:
            hook(run)

    def note_error(self, *args: Any) -> None:
        for hook in self._note_error:
            hook(*args)


@contextmanager
def _entered(hooks: Sequence[Callable[..., AbstractContextManager[object]]], args: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook(*args))
        yield
