"""A stage: consecutive layers on one device, tensors in, tensors out."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gpipe.run.buffers import Buffers
from gpipe.run.lend import Trial, lend
from gpipe.run.loans import Loans
from gpipe.run.microbatch import Tree
from gpipe.run.skips import Kept, Pop, alias, unpack
from gpipe.run.visit import visit, visit_key

LOSS = "loss_fn"
"""What stands behind the last layer, in words."""

_sequence_number = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class Moment:
    """When a stage is run: at which step, under which seed, and again or for the first time."""

    seed: int
    step: int
    micro_batch: int
    recomputing: bool = False


@dataclass(slots=True)
class Layer:
    """One layer of the user's sequence, with its place and name in it."""

    index: int
    name: str
    module: nn.Module
    stash: tuple[str, ...] = ()
    pop: tuple[Pop, ...] = ()
    draws: dict[bool, bool] = field(default_factory=dict)  # by training mode: whether it was seen to draw
    lends: dict[bool, bool] = field(default_factory=dict)  # likewise: whether it may be lent the default generator
    stand_in: nn.Module | None = None  # runs in its place during a run (see shared.py)

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name}: {type(self.module).__name__})"

    def may_draw(self) -> bool:
        """Whether the layer must be run under a visit: it drew before, or was never seen in this mode."""
        return self.draws.get(self.module.training, True)

    def run(self, value: Tree, popped: Mapping[str, Tensor | None], moment: Moment, *, alone: bool = False) -> object:
        """Runs the module, its randomness keyed; `alone` where no other thread draws meanwhile."""
        module = self.module if self.stand_in is None else self.stand_in
        if not self.may_draw():
            return module(value, **popped)
        training, call = self.module.training, partial(module, value, **popped)
        key = moment.seed, moment.step, self.index, moment.micro_batch
        if not alone:
            with visit(*key) as keyed:
                result = call()
        elif self.lends.get(training):
            return lend(visit_key(*key), call)
        else:
            keyed = Trial(*key)
            result = keyed.run(call)
            if keyed.drew:
                self.lends[training] = keyed.lends
        self.draws[training] = keyed.drew or self.draws.get(training, False)
        return result


@dataclass(slots=True)
class Trace:
    """How far a run through a stage got: autograd's sequence number before each layer, and before the loss."""

    numbers: list[int] = field(default_factory=list)

    def enter(self) -> None:
        """Notes that the next layer begins, or behind the last layer the loss."""
        self.numbers.append(_sequence_number())

    def last_of(self, layers: Sequence[Layer]) -> str | None:
        """In words, what was begun last."""
        return layer_at(layers, len(self.numbers) - 1)

    def maker_of(self, number: int | None, layers: Sequence[Layer]) -> str | None:
        """In words, what made the autograd node with this sequence number."""
        if number is None:
            return None
        return layer_at(layers, bisect_right(self.numbers, number) - 1)


def layer_at(layers: Sequence[Layer], at: int) -> str | None:
    """In words, the layer at a place in a stage, or the loss behind the last."""
    if at < 0:
        return None
    return str(layers[at]) if at < len(layers) else LOSS


class Stage:
    """Runs its layers one after another for one micro-batch."""

    def __init__(self, index: int, layers: Sequence[Layer], device: torch.device) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device
        self.buffers = Buffers([layer.module for layer in layers])
        self.loans = Loans()
        self.first = self.layers[0].index
        self.alone = False  # whether no other thread draws while it is run
        self.begin()

    def begin(self) -> None:
        """Begins a run: notes what its layers' modes are, for the whole of it."""
        self.modes = tuple([layer.module.training for layer in self.layers])
        self.simple = not any(layer.pop or layer.stash or layer.may_draw() for layer in self.layers)

    def forward(
        self,
        value: Tree,
        arrived: Mapping[str, Tensor | None],
        departing: Sequence[tuple[str, str]],
        moment: Moment,
        trace: Trace,
    ) -> list[Tree]:
        """Runs the layers.

        Args:
            value: What the main line brings.
            arrived: What skip routes bring, by route name.
            departing: The routes to send stashes by: name of the route, name of the stash.
            moment: When this is.
            trace: Is told how far the run got.

        Returns:
            What each route of `departing` takes on, and last what the main line does.
        """
        modes = self.modes
        loan = self.loans.lend(value, arrived, modes)
        held: dict[str, Kept] = {}
        try:
            made = self._run(loan.value, loan.arrived, held, moment, trace)
        except RuntimeError:
            self.loans.forget(modes)
            raise
        self.loans.settle(loan, modes, self)
        return [*(held[stash].unchanged(stash) for _, stash in departing), made]

    def _run(
        self, value: Tree, arrived: Mapping[str, Tensor | None], held: dict[str, Kept], moment: Moment, trace: Trace
    ) -> Tree:
        begun = trace.numbers
        if self.simple:
            for layer in self.layers:
                begun.append(_sequence_number())
                value = (layer.module if layer.stand_in is None else layer.stand_in)(value)
            return value
        for layer in self.layers:
            begun.append(_sequence_number())
            if layer.pop or layer.stash:
                value = self._run_with_skips(layer, value, arrived, held, moment)
            else:
                value = layer.run(value, {}, moment, alone=self.alone)
        return value

    def __str__(self) -> str:
        return f"partition {self.index}, from {self.layers[0]} to {self.layers[-1]},"

    def _run_with_skips(
        self, layer: Layer, value: Tree, arrived: Mapping[str, Tensor | None], held: dict[str, Kept], moment: Moment
    ) -> Tree:
        popped = {
            pop.name: held[pop.name].pop(pop.name) if pop.source >= self.first else alias(arrived[pop.route_name])
            for pop in layer.pop
        }
        result = layer.run(value, popped, moment, alone=self.alone)
        if not layer.stash:
            return result
        result, tensors = unpack(result, layer.stash)
        held |= {name: Kept.of(tensor) for name, tensor in tensors.items()}
        return result
