"""Sees that a forward goes one way or another by chance, as where layers are dropped at random."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from gpipe.replay.errors import CannotSplitError
from gpipe.replay.path import Tag

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "less", "greater"})

BY_CHANCE = (
    "the forward of the {model} goes one way or another by a random number between blocks{what}, as where layers "
    "are dropped at random: the next micro-batch would take another path than the sample. Set what drops layers "
    "(layerdrop, layer_drop) to 0, or let a block draw"
)


class Chance:
    """What of a forward is drawn, and depends on nothing else.

    Args:
        model: The model, for errors.
        walked: The modules that every layer walks through, by name.
    """

    def __init__(self, model: nn.Module, walked: Mapping[str, nn.Module]) -> None:
        self._model, self._walked = model, walked
        self._drawn: set[Tag] = set()
        self._thresholds: list[float] = []

    def see(
        self,
        name: str,
        args: Sequence[Any],
        uses: Collection[Tag],
        made: Mapping[Tag, Any],
        *,
        draws: bool,
    ) -> None:
        """Is told of an operation between units.

        Args:
            name: The function's.
            args: What it was given.
            uses: The tensors of events among that.
            made: The leaves of what it returned; those of plain numbers too.
            draws: Whether it is a function that draws.

        Raises:
            CannotSplitError: It makes a plain value of a random number.
        """
        if not (draws and not uses) and not (uses and self._drawn.issuperset(uses)):
            return
        threshold = next((item for item in args if isinstance(item, (int, float))), None)
        if name in COMPARISONS and threshold is not None:
            if not 0 < threshold < 1:
                return  # whatever is drawn, it is the same
            self._thresholds.append(float(threshold))
        if uses and any(isinstance(leaf, (bool, int, float)) for leaf in made.values()):
            raise CannotSplitError(BY_CHANCE.format(model=type(self._model).__name__, what=self._in_words()))
        self._drawn |= made.keys()

    def _in_words(self) -> str:
        named = [
            f"{type(module).__name__}.{key}={value!r}"
            for module in self._walked.values()
            for key, value in vars(module).items()
            if "drop" in key and isinstance(value, float) and value in self._thresholds
        ]
        return f" ({', '.join(dict.fromkeys(named))})" if named else ""
