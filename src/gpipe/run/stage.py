"""A stage: consecutive layers on one device, tensors in, tensors out."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpipe.run.boundary import replace_tensors, tensors_in
from gpipe.run.buffers import Buffers
from gpipe.run.microbatch import Tree
from gpipe.run.skips import Kept, Pop, alias, unpack, version
from gpipe.run.visit import visit

BEGUN_IN_PLACE = (
    "begun to change in place what it is given, so a recompute would see the new value; run the step again, now that "
    "it is known"
)
SHARED_IN_PLACE = (
    "in place a tensor that shares its memory with another one that it is given, and behind a cut the other one does "
    "not change with it; let the layer work on a copy, or the layer before return a clone"
)

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
    stand_in: nn.Module | None = None  # runs in its place during a run (see shared.py)

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name}: {type(self.module).__name__})"

    def may_draw(self) -> bool:
        """Whether the layer must be run under a visit: it drew before, or was never seen in this mode."""
        return self.draws.get(self.module.training, True)

    def run(self, value: Tree, popped: Mapping[str, Tensor], moment: Moment) -> object:
        """Runs the module, its randomness keyed."""
        module = self.stand_in or self.module
        if not self.may_draw():
            return module(value, **popped)
        with visit(moment.seed, moment.step, self.index, moment.micro_batch) as keyed:
            result = module(value, **popped)
        self.draws[self.module.training] = keyed.drew or self.draws.get(self.module.training, False)
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
        return _in_words(layers, len(self.numbers) - 1)

    def maker_of(self, number: int | None, layers: Sequence[Layer]) -> str | None:
        """In words, what made the autograd node with this sequence number."""
        if number is None:
            return None
        return _in_words(layers, bisect_right(self.numbers, number) - 1)


def _in_words(layers: Sequence[Layer], at: int) -> str | None:
    if at < 0:
        return None
    return str(layers[at]) if at < len(layers) else "loss_fn"


class Stage:
    """Runs its layers one after another for one micro-batch."""

    def __init__(self, index: int, layers: Sequence[Layer], device: torch.device) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device
        self.buffers = Buffers([layer.module for layer in layers])
        self.works_in_place: dict[tuple[bool, ...], bool] = {}  # on what it is given; by modes, from the first run
        self.first = self.layers[0].index

    def forward(
        self,
        value: Tree,
        arrived: Mapping[str, Tensor],
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
        main = tensors_in(value)
        given = (*main, *arrived.values())
        modes = tuple([layer.module.training for layer in self.layers])
        lends = self.works_in_place.get(modes, True)
        if lends:
            value, arrived = _copies(value, arrived)
        elif type(value) is not Tensor:
            value = replace_tensors(value, lambda tensor: tensor)  # a layer may change the dict that it is given
        lent = (*tensors_in(value), *arrived.values()) if lends else given
        versions = [version(tensor) for tensor in lent]
        held: dict[str, Kept] = {}
        try:
            value = self._run(value, arrived, held, moment, trace)
        except RuntimeError:
            self.works_in_place.pop(modes, None)  # it may have begun to work in place, which torch refuses on a leaf
            raise
        changed = [at for at, tensor in enumerate(lent) if version(tensor) != versions[at]]
        if changed or not (modes in self.works_in_place or any(tensor.is_inference() for tensor in lent)):
            self.works_in_place[modes] = bool(changed) or self.works_in_place.get(modes, False)
            self._check_in_place([given[at] for at in changed], main, lends=lends)
        return [*(held[stash].unchanged(stash) for _, stash in departing), value]

    def _run(
        self, value: Tree, arrived: Mapping[str, Tensor], held: dict[str, Kept], moment: Moment, trace: Trace
    ) -> Tree:
        begun = trace.numbers
        for layer in self.layers:
            begun.append(_sequence_number())
            if layer.pop or layer.stash:
                value = self._run_with_skips(layer, value, arrived, held, moment)
            elif layer.draws.get(layer.module.training, True):
                value = layer.run(value, {}, moment)
            else:
                value = (layer.stand_in or layer.module)(value)
        return value

    def _check_in_place(self, changed: Sequence[Tensor], main: Sequence[Tensor], *, lends: bool) -> None:
        """Checks that what the layers did in place would be the same without the cut; stashes are as stashed anyway.

        Raises:
            RuntimeError: It would not.
        """
        if changed and not lends:
            raise RuntimeError(f"{self} has {BEGUN_IN_PLACE}")
        if any(one is not other and _share_memory(one, other) for one in changed for other in main):
            raise RuntimeError(f"{self} changes {SHARED_IN_PLACE}")

    def __str__(self) -> str:
        return f"partition {self.index}, from {self.layers[0]} to {self.layers[-1]},"

    def _run_with_skips(
        self, layer: Layer, value: Tree, arrived: Mapping[str, Tensor], held: dict[str, Kept], moment: Moment
    ) -> Tree:
        popped = {
            pop.name: held[pop.name].pop(pop.name) if pop.source >= self.first else alias(arrived[pop.route_name])
            for pop in layer.pop
        }
        result = layer.run(value, popped, moment)
        if not layer.stash:
            return result
        result, tensors = unpack(result, layer.stash)
        held |= {name: Kept.of(tensor) for name, tensor in tensors.items()}
        return result


def _copies(value: Tree, arrived: Mapping[str, Tensor]) -> tuple[Tree, Mapping[str, Tensor]]:
    """Copies for a stage that works in place on what it is given; its first run has them too, to find out."""
    return replace_tensors(value, _copy), {name: _copy(tensor) for name, tensor in arrived.items()}


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that later runs without a copy give the same bits."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor  # expanded: torch itself refuses to work on it in place
    copied = tensor.clone()
    if copied.stride() == tensor.stride():
        return copied
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
