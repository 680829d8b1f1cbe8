"""Defines the costs of actions: the seconds and bytes of each stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, assert_never

from gpipe.schedule.action import Action, Kind

VERIFIED_MICRO_BATCHES = 2  # the number of micro-batches that a verified step records and replays


@dataclass(frozen=True)
class StageCost:
    """The seconds and bytes that one micro-batch costs at one stage. `tie` and `reduce` are per mini-batch.

    Attributes:
        forward: Seconds of a forward.
        backward: Seconds of a whole backward.
        backward_input: Seconds of an input-gradient pass. None means half of `backward`.
        backward_weight: Seconds of a weight-gradient pass. None means half of `backward`.
        recompute: Seconds of a recompute. None means `forward`.
        send: Seconds until an output arrives at the receiving rank. The sending rank does not wait.
        send_gradient: Seconds until a gradient arrives at the preceding stage. None means `send`.
        tie: Seconds to sum the gradients of shared weights, after all tied stages have computed their gradients.
        reduce: Seconds to reduce the gradients of the stage over replicas.
        move: Seconds to copy what the stage offloads to host memory, or back. A rank waits for the copy only before
            it starts the next copy.
        gather: Seconds to all-gather the weights from all replicas. A rank waits only before it uses the weights.
        load: Seconds to copy the weights from host memory. A rank waits only before it uses the weights.
        unload: Seconds to copy the gradients to host memory, while the rank continues.
        boundary: Bytes that the stage keeps even if it recomputes: mainly its inputs.
        activations: Bytes of the other tensors that a forward saves for the backward.
        working: Bytes that a whole backward needs in addition to `boundary` and `activations`.
        state: Bytes of weights, gradients and optimizer state. For sharded weights, only the bytes of the shards.
        gathered: Bytes of gathered weights, if the weights are sharded. Their gradients need the same number of
            bytes.
        sent_forward: Bytes that a forward sends to other stages.
        sent_backward: Bytes that a backward sends to other stages.
        late: Bytes that an input-gradient pass keeps for the weight-gradient pass. None means `boundary` plus
            `activations`.
        working_input: Bytes of temporary tensors in an input-gradient pass. None means `working`.
        working_weight: Bytes of temporary tensors in a weight-gradient pass.
        recorded: Bytes that a verified step copies for its replay.
        gradients: Bytes of the gradients of the weights. The replay needs these bytes a second time.
        loaded: Bytes of the weights that LOAD copies from host memory. 0 if all weights stay on the device. Otherwise
            `state` has only the bytes that stay on the device.
        on_host: Bytes of weights, gradients and optimizer state in host memory.

    >>> StageCost(1.0, 2.0, backward_input=1.0, backward_weight=3.0).weight_share
    0.75
    """

    forward: float
    backward: float
    backward_input: float | None = None
    backward_weight: float | None = None
    recompute: float | None = None
    send: float = 0.0
    send_gradient: float | None = None
    tie: float = 0.0
    reduce: float = 0.0
    move: float = 0.0
    gather: float = 0.0
    load: float = 0.0
    unload: float = 0.0
    boundary: int = 0
    activations: int = 0
    working: int = 0
    state: int = 0
    gathered: int = 0
    sent_forward: int = 0
    sent_backward: int = 0
    late: int | None = None
    working_input: int | None = None
    working_weight: int = 0
    recorded: int = 0
    gradients: int = 0
    loaded: int = 0
    on_host: int = 0

    def divided_by(self, slices: float) -> "StageCost":
        """Returns the cost of one of `slices` equal slices of the micro-batch. All slices count as equally expensive.

        >>> StageCost(1.0, 2.0, tie=3.0).divided_by(2)  # doctest: +ELLIPSIS
        StageCost(forward=0.5, backward=1.0, backward_input=None, ..., tie=3.0, ...)
        """
        names = ("forward", "backward", "backward_input", "backward_weight", "recompute", "send", "send_gradient")
        seconds = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value / slices for name, value in seconds.items() if value is not None})

    def with_host(self, bytes_per_second: float, remat: object = "offload") -> "StageCost":
        """Returns a cost with the seconds of copies at this speed: of the inputs, or by default of the activations.

        If the weights are on the host, the cost also has the seconds of LOAD and FREE.

        >>> StageCost(1.0, 2.0, boundary=8, activations=80).with_host(4.0, "offload_inputs").move
        2.0
        >>> StageCost(1.0, 2.0, loaded=8, gradients=6).with_host(4.0).unload
        1.5
        """
        moved = self.boundary if remat == "offload_inputs" else self.activations
        unload = self.gradients if self.loaded else 0
        move, load, unload_seconds = (size / bytes_per_second for size in (moved, self.loaded, unload))
        return replace(self, move=move, load=load, unload=unload_seconds)

    def with_bytes_of(self, counted: "StageCost") -> "StageCost":
        """Returns a cost with the seconds of this cost and the bytes of `counted`.

        >>> StageCost(1.0, 2.0).with_bytes_of(StageCost(7.0, 7.0, activations=3))  # doctest: +ELLIPSIS
        StageCost(forward=1.0, backward=2.0, ..., activations=3, ...)
        """
        return replace(self, **{name: getattr(counted, name) for name in BYTES})

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes that a stage may keep for a micro-batch, by purpose.

        The constants in `simulate` are the indices.
        """
        late = self.boundary + self.activations if self.late is None else self.late
        working_input = self.working if self.working_input is None else self.working_input
        held = self.boundary, self.activations, self.working, self.gathered
        sent = self.sent_forward, self.sent_backward
        return *held, *sent, late, working_input, self.working_weight, self.loaded, self.gradients

    @property
    def recompute_seconds(self) -> float:
        """The seconds of a recompute."""
        return self.forward if self.recompute is None else self.recompute

    @property
    def weight_share(self) -> float | None:
        """The share of the weight-gradient pass in a split backward. None if the two passes were not measured."""
        if self.backward_input is None or self.backward_weight is None:
            return None
        parts = self.backward_input + self.backward_weight
        return self.backward_weight / parts if parts else None


BYTES = tuple(each.name for each in fields(StageCost) if each.type in (int, int | None))
Costs = Sequence[StageCost]


class LayerSeconds(NamedTuple):
    """The measured seconds that one micro-batch takes in a layer.

    Attributes:
        forward: Seconds of the forward.
        backward: Seconds of the whole backward.
        inputs: Seconds of the input-gradient pass. None if it was not measured.
        weights: Seconds of the weight-gradient pass. The two passes together take longer than a whole backward.
        recompute: Seconds of the recompute.

    >>> LayerSeconds(forward=0.01, backward=0.02)
    LayerSeconds(forward=0.01, backward=0.02, inputs=None, weights=None, recompute=None)
    """

    forward: float
    backward: float
    inputs: float | None = None
    weights: float | None = None
    recompute: float | None = None


def stage_cost(layers: Sequence[LayerSeconds]) -> StageCost:
    """Returns the cost of a stage from the measured seconds of its layers.

    >>> stage_cost([LayerSeconds(1.0, 2.0), LayerSeconds(1.0, 3.0)])  # doctest: +ELLIPSIS
    StageCost(forward=2.0, backward=5.0, backward_input=None, backward_weight=None, ...
    """
    columns = zip(*layers, strict=True)
    return StageCost(*(None if None in column else sum(column) for column in columns))  # type: ignore[arg-type]  # the first two are numbers


def unit_costs(stages: int) -> Costs:
    """Returns the costs of equal stages. Forward and backward take one second each, as in the paper's bubble formula.

    >>> len(unit_costs(4)), unit_costs(4)[0].backward
    (4, 1.0)
    """
    return (StageCost(forward=1.0, backward=1.0),) * stages


def seconds(action: Action, costs: Costs) -> float:
    """Returns the duration of an action in seconds. During sends, copies and gathers, the rank can compute."""
    cost = costs[action.stage]
    match action.kind:
        case Kind.FORWARD:
            return cost.forward
        case Kind.RECOMPUTE:
            return cost.recompute_seconds
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
        case Kind.UNSHARD | Kind.TIE | Kind.REDUCE:
            return {Kind.UNSHARD: cost.gather, Kind.TIE: cost.tie, Kind.REDUCE: cost.reduce}[action.kind]
        case Kind.LOAD | Kind.FREE:
            return cost.load if action.kind is Kind.LOAD else cost.unload
        case Kind.RECEIVE | Kind.COMMIT | Kind.RESHARD:
            return 0.0
        case _:
            assert_never(action.kind)


class GatheredWeights(NamedTuple):
    """The weights of a stage that are sharded over replicas.

    Attributes:
        bytes: Bytes of the unsharded weights.
        share: The share of these weights among all weights of the stage.
    """

    bytes: int
    share: float

    def cost(self, whole: StageCost, replicas: int) -> StageCost:
        """Returns the cost of the sharded stage, from its cost without sharding.

        Gradient shards are allocated after the unsharded gradients are freed, so they need no extra memory.
        """
        state = whole.state * (1 - self.share * (1 - 1 / replicas)) - self.bytes / replicas
        return replace(whole, state=round(state), gathered=self.bytes)
