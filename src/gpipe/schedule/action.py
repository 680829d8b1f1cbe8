"""Represents the actions of a pipeline as data: their kinds, and the routes of the tensors that they transfer."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of an action. Printed actions contain the value of the kind, such as `F`.

    >>> Kind.RECOMPUTE.value, Kind("SEND").name
    ('R', 'SEND')
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"  # gradients of inputs and weights
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECEIVE = "RECEIVE"
    OFFLOAD = "OFFLOAD"  # moves activations to host memory
    FETCH = "FETCH"  # moves offloaded activations back before the backward pass
    UNSHARD = "UNSHARD"  # all-gathers the sharded weights of a stage
    RESHARD = "RESHARD"  # frees the gathered weights
    LOAD = "LOAD"  # copies the weights of a stage from host memory
    FREE = "FREE"  # frees these copies, and copies gradients to host memory
    REDUCE = "REDUCE"  # closing: reduces gradients over data-parallel replicas
    TIE = "TIE"  # closing: adds up the gradients of shared weights
    COMMIT = "COMMIT"  # closing: updates deferred BatchNorm statistics

    __hash__ = object.__hash__  # Members are singletons. Hashing is hot, and this is twice as fast as Enum.__hash__.


TRANSFERS = frozenset({Kind.SEND, Kind.RECEIVE})
CLOSING = frozenset({Kind.REDUCE, Kind.TIE, Kind.COMMIT})
"""Actions that a stage executes once per mini-batch, after the actions that they depend on."""
MOVES = frozenset({Kind.OFFLOAD, Kind.FETCH})
"""Asynchronous copies to and from host memory. Each rank runs one copy at a time, in order, while it executes other
actions."""
SHARDS = frozenset({Kind.UNSHARD, Kind.RESHARD})
EXCHANGES = SHARDS | {Kind.REDUCE, Kind.TIE}
"""Actions that several processes execute together, without SEND and RECEIVE."""
OVERLAPPED = frozenset({Kind.UNSHARD, Kind.REDUCE})
"""Exchanges that run while the rank continues. The rank waits for their end before the next action of the stage, or
at the end of the mini-batch."""
STREAMS = frozenset({Kind.LOAD, Kind.FREE})
"""Asynchronous copies of weights and gradients. Their `micro_batch` counts the LOADs of the stage: `2LOAD1` is the
second."""
COMPUTE = frozenset(Kind) - TRANSFERS - CLOSING - MOVES - SHARDS - STREAMS

NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
    Kind.SEND: "send",
    Kind.RECEIVE: "receive",
    Kind.OFFLOAD: "offload",
    Kind.FETCH: "fetch",
    Kind.UNSHARD: "gather weights",
    Kind.RESHARD: "free weights",
    Kind.LOAD: "load weights",
    Kind.FREE: "free loaded weights",
    Kind.REDUCE: "reduce gradients",
    Kind.TIE: "add shared gradients",
    Kind.COMMIT: "commit statistics",
}
"""The names of the kinds in reports, which list the kinds in this order."""

MAIN = "x"


class Slice(int):
    """The index of a slice among the slices of all micro-batches. Prints as `micro-batch.slice`.

    `of` is the number of slices of each micro-batch.

    >>> str(Slice(6, of=4)), Slice(6, of=4) == 6
    ('1.2', True)
    """

    of: int

    def __new__(cls, number: int, of: int) -> "Slice":
        made = super().__new__(cls, number)
        made.of = of
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # int.__getnewargs__ returns one value
        return int(self), self.of

    def __str__(self) -> str:
        return "{}.{}".format(*divmod(int(self), self.of))


def nth_backward(number: int, slices: int) -> int:
    """Returns the index of the slice that a stage runs in its backward pass number `number`.

    Micro-batches run in order, and the slices of each micro-batch run in reverse order. The function is its own
    inverse.

    >>> [nth_backward(number, slices=3) for number in range(6)]
    [2, 1, 0, 5, 4, 3]
    """
    return number if slices == 1 else (number // slices + 1) * slices - 1 - number % slices


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """The route of a tensor from one stage to a later stage.

    The gradient takes the same route in the opposite direction.

    The main route from each stage to the next is named `x`. Each skip connection has its own name.

    >>> str(Route(0, 1)), str(Route(0, 2, "early/5"))
    ('x:0>1', 'early/5:0>2')
    """

    source: int
    target: int
    name: str = MAIN

    def __post_init__(self) -> None:
        if self.name.split() != [self.name] or set(self.name) & set("@:"):
            raise ValueError(f"Route: name={self.name!r} is invalid. Use a name that contains no space, '@' or ':'.")

    def __str__(self) -> str:
        return f"{self.name}:{self.source}>{self.target}"


class Action(NamedTuple):
    """One action of one stage, usually on one micro-batch. Prints as `2F0` (stage 2, forward, micro-batch 0).

    - With slices, `micro_batch` is a `Slice`: `2F0.1`.
    - A SEND or RECEIVE also has a route: `0SEND3@x:0>1`. A transfer from the target to the source of its route
      carries a gradient.
    - Closing actions, UNSHARD and RESHARD have no micro-batch: `2COMMIT`.
    - LOAD and FREE have the number of the LOAD instead: `2LOAD1` is the second LOAD of stage 2.

    >>> action = parse_action("1SEND3@x:0>1")
    >>> action.carries_gradient, str(action.peer)
    (True, '0RECEIVE3@x:0>1')
    """

    kind: Kind
    stage: int
    micro_batch: int | None = None
    route: Route | None = None

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        route = "" if self.route is None else f"@{self.route}"
        return f"{self.stage}{self.kind.value}{micro_batch}{route}"

    @property
    def carries_gradient(self) -> bool:
        """Whether this transfer carries a gradient, against the direction of its route."""
        route = self.route
        return route is not None and self.stage != (route.source if self.kind is Kind.SEND else route.target)

    @property
    def peer(self) -> "Action":
        """The matching action on the other stage: the RECEIVE of a SEND, or the SEND of a RECEIVE."""
        assert self.route is not None
        kind = Kind.RECEIVE if self.kind is Kind.SEND else Kind.SEND
        return Action(kind, self.route.source + self.route.target - self.stage, self.micro_batch, self.route)


_ROUTE = r"([^@:]+):(\d+)>(\d+)"
_ACTION = re.compile(rf"(\d+)([A-Z]+)(?:(\d+)(?:\.(\d+))?)?(?:@({_ROUTE}))?")


def parse_route(text: str) -> Route:
    """Parses the text of a route, such as `x:0>1`."""
    match = re.fullmatch(_ROUTE, text)
    if match is None:
        raise ValueError(f"{text!r} is not a route. Write routes like x:0>1.")
    name, source, target = match.groups()
    return Route(int(source), int(target), name)


def parse_action(text: str, slices: int = 1) -> Action:
    """Parses the text of an action.

    Args:
        text: The text of an action, such as `2F0` or `0SEND3@x:0>1`.
        slices: The number of slices of each micro-batch. If there is more than one slice, the text also contains the
            slice, as in `2F1.3`.
            Default: 1.

    Returns:
        The action. With slices, its `micro_batch` is a `Slice`.

    Raises:
        ValueError: If the text is not an action.

    >>> parse_action("2F0")
    Action(kind=<Kind.FORWARD: 'F'>, stage=2, micro_batch=0, route=None)
    >>> str(parse_action("2F1.3", slices=4))
    '2F1.3'
    """
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in {kind.value for kind in Kind}:
        raise ValueError(f"{text!r} is not an action. Write actions like 2F0, 0SEND3@x:0>1 or 2COMMIT.")
    stage, kind, micro_batch, part, route = match.groups()[:5]
    if (slices > 1 and micro_batch is not None) != (part is not None) or int(part or 0) >= slices:
        raise ValueError(f"{text!r} is not an action with slices={slices}. Write 2F0.0 for slice 0 of micro-batch 0.")
    number = None if micro_batch is None else int(micro_batch)
    if number is not None and part:
        number = Slice(number * slices + int(part), slices)
    return Action(Kind(kind), int(stage), number, parse_route(route) if route else None)
