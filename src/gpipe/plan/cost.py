"""Costs of actions, in seconds and bytes by stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from gpipe.plan.action import Action, Kind


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs at one stage, in seconds and bytes; a tie or reduction, what a mini-batch does.

    `inside` is what a forward keeps for the backward of its own stage, `working` what that backward needs beside it;
    `boundary` what crosses into the stage; `state` the weights, gradients and optimizer state, whatever the
    micro-batches.

    >>> from gpipe.plan.action import parse_action
    >>> seconds(parse_action("0R3"), [StageCost(forward=0.01, backward=0.02)])
    0.01
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
    boundary: int = 0
    inside: int = 0
    working: int = 0
    state: int = 0


Costs = Sequence[StageCost]


class BackwardCost(NamedTuple):
    """What the backward of one micro-batch costs, whole and in its two parts, which cost more together.

    >>> BackwardCost(2.0, inputs=1.25, weights=0.75).share
    0.375
    """

    whole: float
    inputs: float
    weights: float

    @property
    def share(self) -> float:
        """The share of the weights in the parts."""
        return self.weights / (self.inputs + self.weights) if self.weights else 0.0


def unit_costs(stages: int) -> Costs:
    """Forward and backward one second each, and all stages alike: the paper's bubble.

    >>> len(unit_costs(4)), unit_costs(4)[0].backward
    (4, 1.0)
    """
    return (StageCost(forward=1.0, backward=1.0),) * stages


def seconds(action: Action, costs: Costs) -> float:
    """How long an action keeps its rank busy; for a SEND, how long its message is under way."""
    cost = costs[action.stage]
    match action.kind:
        case Kind.FORWARD:
            return cost.forward
        case Kind.RECOMPUTE:
            return cost.forward if cost.recompute is None else cost.recompute
        case Kind.BACKWARD:
            return cost.backward
        case Kind.BACKWARD_INPUT:
            return cost.backward / 2 if cost.backward_input is None else cost.backward_input
        case Kind.BACKWARD_WEIGHT:
            return cost.backward / 2 if cost.backward_weight is None else cost.backward_weight
        case Kind.SEND if action.carries_gradient and cost.send_gradient is not None:
            return cost.send_gradient
        case Kind.SEND:
            return cost.send
        case Kind.TIE:
            return cost.tie
        case Kind.REDUCE:
            return cost.reduce
        case Kind.RECEIVE | Kind.COMMIT:
            return 0.0
        case _:
            assert_never(action.kind)
