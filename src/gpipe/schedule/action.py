"""What a pipeline does, as data: the kinds of action, the routes tensors take, one action of the table."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What is done; the value is how the action prints.

    >>> Kind.RECOMPUTE.value, Kind("SEND").name
    ('R', 'SEND')
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"  # of inputs and weights at once
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECEIVE = "RECEIVE"
    OFFLOAD = "OFFLOAD"  # what a forward keeps goes to the host
    FETCH = "FETCH"  # and comes back for its backward
    UNSHARD = "UNSHARD"  # weights of a stage that are spread over replicas are gathered from them
    RESHARD = "RESHARD"  # and freed
    REDUCE = "REDUCE"  # closing: gradients over data-parallel replicas
    TIE = "TIE"  # closing: gradients of shared weights
    COMMIT = "COMMIT"  # closing: deferred BatchNorm statistics

    __hash__ = object.__hash__  # members are single objects, and each Action hashes one: twice as fast as Enum's own


TRANSFERS = frozenset({Kind.SEND, Kind.RECEIVE})
CLOSING = frozenset({Kind.REDUCE, Kind.TIE, Kind.COMMIT})
MOVES = frozenset({Kind.OFFLOAD, Kind.FETCH})
"""What a rank begins and, while it goes on, is done beside: one at a time, each when the one before is done."""
SHARDS = frozenset({Kind.UNSHARD, Kind.RESHARD})
EXCHANGES = SHARDS | {Kind.REDUCE, Kind.TIE}
"""Performed by several processes together, without SEND and RECEIVE."""
OVERLAPPED = frozenset({Kind.UNSHARD, Kind.REDUCE})
"""Exchanges that a rank starts, and waits for before the next action of their stage, or at the end of its actions."""
COMPUTE = frozenset(Kind) - TRANSFERS - CLOSING - MOVES - SHARDS

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
    Kind.REDUCE: "reduce gradients",
    Kind.TIE: "add shared gradients",
    Kind.COMMIT: "commit statistics",
}
"""What the kinds are called in every report, and the order in which they are listed."""

MAIN = "x"


class Slice(int):
    """The number of a slice among all slices of all micro-batches, `of` of each; prints as micro-batch and slice.

    >>> str(Slice(6, of=4)), Slice(6, of=4) == 6
    ('1.2', True)
    """

    of: int

    def __new__(cls, number: int, of: int) -> "Slice":
        made = super().__new__(cls, number)
        made.of = of
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # int's own has no second
        return int(self), self.of

    def __str__(self) -> str:
        return "{}.{}".format(*divmod(int(self), self.of))


def nth_backward(number: int, slices: int) -> int:
    """The n-th of what a stage runs backward, of micro-batches in so many slices: in each the last slice comes first.

    And the other way round, by its number, which it is in turn.

    >>> [nth_backward(number, slices=3) for number in range(6)]
    [2, 1, 0, 5, 4, 3]
    """
    return number if slices == 1 else (number // slices + 1) * slices - 1 - number % slices


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """A tensor's way from stage to stage; its gradient takes the same way back.

    The main line from each stage to the next is the route named `x`; a skip connection has its own name.

    >>> str(Route(0, 1)), str(Route(0, 2, "early/5"))
    ('x:0>1', 'early/5:0>2')
    """

    source: int
    target: int
    name: str = MAIN

    def __post_init__(self) -> None:
        if self.name.split() != [self.name] or set(self.name) & set("@:"):
            raise ValueError(f"{self.name!r} cannot name a route: a name is not empty and has no space, @ or :")

    def __str__(self) -> str:
        return f"{self.name}:{self.source}>{self.target}"


class Action(NamedTuple):
    """One thing done at one stage to one micro-batch; prints as `2F0` (stage 2, forward, micro-batch 0).

    Where micro-batches are cut into slices, `micro_batch` is a `Slice`, of all: `2F0.1`.

    A transfer also names its route, `0SEND3@x:0>1`; sent from the route's target it carries the gradient back.
    A closing action has no micro-batch, nor have UNSHARD and RESHARD: `2COMMIT`.

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
        """Whether this transfer goes against its route, with the gradient."""
        route = self.route
        return route is not None and self.stage != (route.source if self.kind is Kind.SEND else route.target)

    @property
    def peer(self) -> "Action":
        """The other half of this transfer: the RECEIVE of a SEND, the SEND of a RECEIVE."""
        assert self.route is not None
        kind = Kind.RECEIVE if self.kind is Kind.SEND else Kind.SEND
        return Action(kind, self.route.source + self.route.target - self.stage, self.micro_batch, self.route)


_ROUTE = r"([^@:]+):(\d+)>(\d+)"
_ACTION = re.compile(rf"(\d+)([A-Z]+)(?:(\d+)(?:\.(\d+))?)?(?:@({_ROUTE}))?")


def parse_route(text: str) -> Route:
    """Reads a route back from its printed form."""
    match = re.fullmatch(_ROUTE, text)
    if match is None:
        raise ValueError(f"{text!r} is not a route; a route looks like x:0>1")
    name, source, target = match.groups()
    return Route(int(source), int(target), name)


def parse_action(text: str, slices: int = 1) -> Action:
    """Reads an action back from its printed form, of micro-batches in so many slices.

    >>> parse_action("2F0")
    Action(kind=<Kind.FORWARD: 'F'>, stage=2, micro_batch=0, route=None)
    >>> str(parse_action("2F1.3", slices=4))
    '2F1.3'

    Raises:
        ValueError: The text is not an action.
    """
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in {kind.value for kind in Kind}:
        raise ValueError(f"{text!r} is not an action; an action looks like 2F0, 0SEND3@x:0>1 or 2COMMIT")
    stage, kind, micro_batch, at, route = match.groups()[:5]
    if (slices > 1 and micro_batch is not None) != (at is not None) or int(at or 0) >= slices:
        raise ValueError(f"{text!r} is not an action where slices={slices}")
    number = Slice(int(micro_batch) * slices + int(at), slices) if at else int(micro_batch) if micro_batch else None
    return Action(Kind(kind), int(stage), number, parse_route(route) if route else None)
