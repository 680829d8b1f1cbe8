"""What options may be: bounds beside their types, and what is said of values out of them."""

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Annotated, NamedTuple, get_args, get_type_hints


class Bounds(NamedTuple):
    """What the number of an option must be, in words too: `Annotated[int, Bounds(...)]`."""

    words: str
    hold: Callable[[float], bool]


def at_least(least: int, why: str = "") -> Bounds:
    """So many or more."""
    return Bounds(f"{least} or more{why}", lambda value: value >= least)


Count = Annotated[int, at_least(1)]
Positive = Annotated[float, Bounds("more than 0", lambda value: 0 < value < inf)]
NotNegative = Annotated[float, Bounds("0 or more", lambda value: 0 <= value < inf)]
Share = Annotated[float, Bounds("0 to 1", lambda value: 0 <= value <= 1)]
Part = Annotated[float, Bounds("0 to less than 1", lambda value: 0 <= value < 1)]
Rest = Annotated[float, Bounds("more than 0 to 1", lambda value: 0 < value <= 1)]


def out_of_bounds(options: object) -> Iterator[str]:
    """A line for each field of a dataclass that is out of the bounds of its type; None is always within."""
    for name, kind in get_type_hints(type(options), include_extras=True).items():
        for bounds in [one for part in (kind, *get_args(kind)) for one in getattr(part, "__metadata__", ())]:
            value = getattr(options, name)
            if isinstance(bounds, Bounds) and value is not None and not bounds.hold(value):
                yield f"{flag(name)} is {value}: choose {bounds.words}"


def refuse(problems: Iterable[str]) -> None:
    """Refuses options for their problems, if there are any.

    Raises:
        ValueError: A line for each.
    """
    if lines := list(problems):
        raise ValueError("\n".join(lines))


def name_of(field: str) -> str:
    """An option's name in a file.

    >>> name_of("from_"), name_of("micro_batches")
    ('from', 'micro_batches')
    """
    return field.rstrip("_")


def flag(field: str) -> str:
    """An option's name on the command line.

    >>> flag("from_"), flag("micro_batches")
    ('--from', '--micro-batches')
    """
    return "--" + name_of(field).replace("_", "-")
