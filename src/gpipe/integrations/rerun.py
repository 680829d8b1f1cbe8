"""What a training step changes of its object before it calls the model, put back before it is run a second time."""

from collections import deque
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

NOTHING = object()
MANY = 100  # a container that has more is data, and no count
COUNTS = (
    "compute_loss or training_step changes self.{name} in place before it calls the model, and up to there it is run "
    "twice for each batch; bind it anew (self.{name} = ...), or count in a callback"
)


class Bindings:
    """What the names on an object are bound to, but for some, and its content where that is plain."""

    def __init__(self, home: object, without: Collection[str]) -> None:
        self._home, self._without = home, without
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        every = vars(self._home).items()
        return {name: (value, _content(value)) for name, value in every if name not in self._without}

    def changed(self) -> dict[str, Any]:
        """What the names that are bound to something else by now were bound to; for `rebind`.

        Raises:
            ValueError: What one was bound to was changed in place.
        """
        for name, (value, content) in self._before.items():
            if _content(value) != content:
                raise ValueError(COUNTS.format(name=name))
        now, nothing = self._now(), (NOTHING, None)
        were = {name: self._before.get(name, nothing)[0] for name in {**self._before, **now}}
        return {name: old for name, old in were.items() if now.get(name, nothing)[0] is not old}


def _content(value: Any, depth: int = 3) -> Any:
    """What tells whether a small container or a tensor was changed in place; None for all else."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, str | int | float) and depth < 3:
        return value
    if type(value) in (list, dict, set, deque) and len(value) <= MANY and depth:
        return [_content(one, depth - 1) for one in (chain(*value.items()) if type(value) is dict else value)]
    return None


def rebind(home: object, values: Mapping[str, Any]) -> None:
    """Binds names on an object to values, or to nothing."""
    for name, value in values.items():
        if value is NOTHING:
            vars(home).pop(name, None)
        else:
            vars(home)[name] = value
