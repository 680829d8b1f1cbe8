"""Costs of actions, in seconds and bytes by stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, assert_never

from gpipe.schedule.action import Action, Kind

VERIFIED = 2  # micro-batches of a verified step that are recorded and replayed


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs at one stage, in seconds and bytes; a tie or reduction, what a mini-batch does.

    `boundary` is what a stage keeps of a micro-batch though it recomputes it, above all what crosses into it;
    `inside` what a forward keeps beside for the backward of its own stage, `working` what that backward needs beside
    both; `handed_on` and `handed_back` what its forward and its backward send to others; `state` the weights,
    gradients and optimizer state, whatever the micro-batches, and of sharded ones no more than the shards: `gathered`
    are those when they are gathered, and so many bytes have their gradients too. Of a backward in two parts `late` is
    what the first leaves for the second, `working_input` and `working_weight` what they need beside. `recorded` is
    what a verified step copies for its replay, and `gradients` the gradients of the weights, which that needs anew.

    >>> StageCost(1.0, 2.0, backward_input=1.0, backward_weight=3.0).weight_share
    0.75
    """

    forward: float
    backward: float
    backward_input: float | None = None  # None: half of backward
    backward_weight: float | None = None  # likewise
    recompute: float | None = None  # None: as long as forward
    send: float = 0.0  # until the receiver has it; the sender does not wait
    send_gradient: float | None = None  # of what came in, to the stage before; None: as long as send
    tie: float = 0.0  # adding up the gradients of shared weights, when all stages that tie have theirs
    reduce: float = 0.0  # averaging the gradients of the stage over replicas
    move: float = 0.0  # of what is inside to the host, or back; the rank does not wait, but with its next move
    gather: float = 0.0  # of weights from all replicas; the rank does not wait, but with what it computes with them
    boundary: int = 0
    inside: int = 0
    working: int = 0
    state: int = 0
    gathered: int = 0
    handed_on: int = 0
    handed_back: int = 0
    late: int | None = None  # None: boundary and inside
    working_input: int | None = None  # None: as much as working
    working_weight: int = 0
    recorded: int = 0
    gradients: int = 0

    def shared_by(self, slices: float) -> "StageCost":
        """What each of so many slices of the micro-batch costs, as if tokens cost the same wherever they stand.

        >>> StageCost(1.0, 2.0, tie=3.0).shared_by(2)  # doctest: +ELLIPSIS
        StageCost(forward=0.5, backward=1.0, backward_input=None, ..., tie=3.0, ...)
        """
        shared = ("forward", "backward", "backward_input", "backward_weight", "recompute", "send", "send_gradient")
        each = {name: getattr(self, name) for name in shared}
        return replace(self, **{name: value / slices for name, value in each.items() if value is not None})

    def holding(self, counted: "StageCost") -> "StageCost":
        """The same seconds, with the bytes that were counted.

        >>> StageCost(1.0, 2.0).holding(StageCost(7.0, 7.0, inside=3))  # doctest: +ELLIPSIS
        StageCost(forward=1.0, backward=2.0, ..., inside=3, ...)
        """
        return replace(self, **{name: getattr(counted, name) for name in BYTES})

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of all that a stage may hold of a micro-batch, in the order of `Simulator.held`."""
        late = self.boundary + self.inside if self.late is None else self.late
        working_input = self.working if self.working_input is None else self.working_input
        held = self.boundary, self.inside, self.working, self.gathered
        return *held, self.handed_on, self.handed_back, late, working_input, self.working_weight

    @property
    def again(self) -> float:
        """The seconds of a recompute."""
        return self.forward if self.recompute is None else self.recompute

    @property
    def weight_share(self) -> float | None:
        """The share of the weights in the two parts of the backward, if these are known."""
        if self.backward_input is None or self.backward_weight is None:
            return None
        parts = self.backward_input + self.backward_weight
        return self.backward_weight / parts if parts else None


BYTES = tuple(each.name for each in fields(StageCost) if each.type in (int, int | None))
Costs = Sequence[StageCost]


class LayerSeconds(NamedTuple):
    """What one micro-batch takes in a layer: its forward, its backward whole and in its two parts, its recompute.

    These are None where they were not measured; the parts together take longer than the whole.

    >>> LayerSeconds(forward=0.01, backward=0.02)
    LayerSeconds(forward=0.01, backward=0.02, inputs=None, weights=None, recompute=None)
    """

    forward: float
    backward: float
    inputs: float | None = None
    weights: float | None = None
    recompute: float | None = None


def stage_cost(layers: Sequence[LayerSeconds]) -> StageCost:
    """What a stage of measured layers costs.

    >>> stage_cost([LayerSeconds(1.0, 2.0), LayerSeconds(1.0, 3.0)])  # doctest: +ELLIPSIS
    StageCost(forward=2.0, backward=5.0, backward_input=None, backward_weight=None, ...
    """
    columns = zip(*layers, strict=True)
    return StageCost(*(None if None in column else sum(column) for column in columns))  # type: ignore[arg-type]  # not of the first two


def unit_costs(stages: int) -> Costs:
    """Forward and backward one second each, and all stages alike: the paper's bubble.

    >>> len(unit_costs(4)), unit_costs(4)[0].backward
    (4, 1.0)
    """
    return (StageCost(forward=1.0, backward=1.0),) * stages


def seconds(action: Action, costs: Costs) -> float:
    """How long an action keeps its rank busy; a SEND its message under way, a move what is moved."""
    cost = costs[action.stage]
    match action.kind:
        case Kind.FORWARD:
            return cost.forward
        case Kind.RECOMPUTE:
            return cost.again
        case Kind.BACKWARD:
            return cost.backward
        case Kind.BACKWARD_INPUT:
            return cost.backward / 2 if cost.backward_input is None else cost.backward_input
        case Kind.BACKWARD_WEIGHT:
            return cost.backward / 2 if cost.backward_weight is None else cost.backward_weight
        case Kind.SEND:
            gradient = cost.send_gradient if action.carries_gradient else None
            return cost.send if gradient is None else gradient
        case Kind.OFFLOAD | Kind.FETCH:
            return cost.move
        case Kind.UNSHARD:
            return cost.gather
        case Kind.TIE:
            return cost.tie
        case Kind.REDUCE:
            return cost.reduce
        case Kind.RECEIVE | Kind.COMMIT | Kind.RESHARD:
            return 0.0
        case _:
            assert_never(action.kind)


class GatheredWeights(NamedTuple):
    """What is sharded over the replicas of the weights of a stage: the bytes of all of it, and its share of them."""

    bytes: int
    share: float

    def cost(self, whole: StageCost, replicas: int) -> StageCost:
        """Returns the cost of such a stage, from its cost if each replica has all of it.

        Shards of gradients are there when the whole ones no longer are.
        """
        state = whole.state * (1 - self.share * (1 - 1 / replicas)) - self.bytes / replicas
        return replace(whole, state=round(state), gathered=self.bytes)
