"""A stage: consecutive layers on one device, tensors in, tensors out."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpipe._torch.autograd import next_node_number
from gpipe.stages.boundary import BoundaryValue, InPlaceCheck, Modes, detach_boundary, find_ancestors, leaves_of
from gpipe.stages.buffers import Buffers, Slot
from gpipe.stages.layout import copy_of, is_sharded, storage_address
from gpipe.stages.recompute_check import differ, digest
from gpipe.stages.rng import PipeRngScope
from gpipe.stages.skips import Pop, Stashed, alias, unpack_stashes
from gpipe.stages.tree import Tree, replace_tensors, tensors_in, version

LOSS = "loss_fn"
"""What stands behind the last layer, in words."""

_OWN: AbstractContextManager[object] = nullcontext()
TRIES = 4
"""Times that a layer is run twice to see whether it gives the same."""


@dataclass(frozen=True, slots=True)
class RngKey:
    """What keys the randomness of a stage: seed, step and micro-batch; a recompute has the same."""

    seed: int
    step: int
    micro_batch: int


@dataclass(slots=True)
class Layer:
    """One layer of the user's sequence, with its place and name in it."""

    index: int
    name: str
    module: nn.Module
    stash: tuple[str, ...] = ()
    pop: tuple[Pop, ...] = ()
    kind: str = ""  # what it is, in words; by default its class
    prefix: str | None = None  # of its parameters' names in the pipe; by default its own name
    aliased: AbstractContextManager[object] = _OWN  # has it see its own aliases while it runs (see weight_aliases)

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name}: {self.kind or type(self.module).__name__})"

    def full_name(self, name: str) -> str:
        """The name in the pipe of a parameter of the layer."""
        return f"{self.name}.{name}" if self.prefix is None else f"{self.prefix}{name}"

    def run(self, value: Tree, popped: Mapping[str, Tensor | None], rng_key: RngKey) -> object:
        """Runs the module, its randomness keyed."""
        with self.aliased, PipeRngScope(rng_key.seed, rng_key.step, self.index, rng_key.micro_batch):
            return self.module(value, **popped)


@dataclass(slots=True)
class LayerProgress:
    """How far a run through a stage got: autograd's sequence number before each layer, and before the loss."""

    numbers: list[int] = field(default_factory=list)
    found: str = ""

    def enter(self) -> None:
        """Notes that the next layer begins, or behind the last layer the loss."""
        self.numbers.append(next_node_number())

    def point_at(self, layer: "Layer | None") -> None:
        """Notes the layer that an error was traced to: messages name it instead of the last that began."""
        if layer is not None:
            self.found = str(layer)

    def last_of(self, layers: Sequence[Layer]) -> str | None:
        """In words, what was begun last."""
        return self.found or layer_at(layers, len(self.numbers) - 1)

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


class StageOutput(NamedTuple):
    """What a stage made of a micro-batch.

    Attributes:
        values: One for each route out, the main one last.
        for_loss: What the loss pops.
        changed: The ids of the tensors that the stage was given and would have changed in place.
    """

    values: list[Tree]
    for_loss: Mapping[str, Tensor | None]
    changed: frozenset[int]


class Stage:
    """Consecutive layers, run one after another for a micro-batch. What a mini-batch leaves is in its `StageRun`."""

    def __init__(self, index: int, layers: Sequence[Layer], device: torch.device) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device
        self.in_place = InPlaceCheck()
        self.first = self.layers[0].index
        self.shared: frozenset[Slot] = frozenset()  # where parameters stand that several layers use

    def begin(self) -> None:
        """Follows what was changed in the layers since; before each pass over micro-batches."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the layers, each layer with all inside of it."""
        return [module for layer in self.layers for module in layer.module.modules()]

    def gradients(self) -> list[tuple[int, int]]:
        """What gradients the parameters have, and how often these were added to, but for what other layers share.

        A module that is several layers has the parameters of whichever of them runs.
        """
        grads = [
            parameter.grad
            for layer in self.layers
            for module in layer.module.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and (module, name) not in self.shared
        ]
        return [(id(grad), version(grad)) for grad in grads]

    def forward(
        self,
        value: Tree,
        arrived: Mapping[str, Tensor | None],
        departing: Sequence[tuple[str, str]],
        for_loss: Sequence[Pop],
        rng_key: RngKey,
        progress: LayerProgress,
        modes: Modes,
    ) -> StageOutput:
        """Runs the layers.

        Args:
            value: What the main line brings.
            arrived: What skip routes bring, by route name.
            departing: The routes to send stashes by: name of the route, name of the stash.
            for_loss: What the loss pops, if this is the last stage.
            rng_key: When this is.
            progress: Is told how far the run got.
            modes: Whether each layer is in training mode.
        """
        stage_input = self.in_place.prepare(value, arrived, modes)
        held: dict[str, Stashed] = {}
        try:
            made = self._run(stage_input.value, stage_input.arrived, held, rng_key, progress)
        except RuntimeError:
            self.in_place.forget(modes)
            raise
        changed = self.in_place.check(stage_input, modes, self)
        values = [*(held[stash].unchanged(stash) for _, stash in departing), made]
        popped = {pop.name: self._pop(pop, stage_input.arrived, held) for pop in for_loss}
        return StageOutput(values, popped, changed)

    def _run(
        self,
        value: Tree,
        arrived: Mapping[str, Tensor | None],
        held: dict[str, Stashed],
        rng_key: RngKey,
        progress: LayerProgress,
    ) -> Tree:
        begun = progress.numbers
        for layer in self.layers:
            begun.append(next_node_number())
            if layer.pop or layer.stash:
                value = self._run_with_skips(layer, value, arrived, held, rng_key)
            else:
                value = layer.run(value, {}, rng_key)
        return value

    def __str__(self) -> str:
        return f"stage {self.index}, from {self.layers[0]} to {self.layers[-1]},"

    def _run_with_skips(
        self,
        layer: Layer,
        value: Tree,
        arrived: Mapping[str, Tensor | None],
        held: dict[str, Stashed],
        rng_key: RngKey,
    ) -> Tree:
        popped = {pop.name: self._pop(pop, arrived, held) for pop in layer.pop}
        result = layer.run(value, popped, rng_key)
        if not layer.stash:
            return result
        result, tensors = unpack_stashes(result, layer.stash)
        held |= {name: Stashed.of(tensor) for name, tensor in tensors.items()}
        return result

    def _pop(self, pop: Pop, arrived: Mapping[str, Tensor | None], held: Mapping[str, Stashed]) -> Tensor | None:
        """A stash for one use, of this stage or of an earlier one."""
        return held[pop.name].pop(pop.name) if pop.source >= self.first else alias(arrived[pop.route_name])

    def find_unsteady(self, value: Tree, arrived: Mapping[str, Tensor | None], rng_key: RngKey) -> Layer | None:
        """A layer that gives something else when it is given the same; None if none does so now."""
        held: dict[str, Stashed] = {}
        for layer in self.layers:
            popped = {pop.name: self._pop(pop, arrived, held) for pop in layer.pop}
            made = [layer.run(replace_tensors(value, copy_of), popped, rng_key) for _ in range(TRIES)]
            first, *others = ((digest([one]), set(map(id, leaves_of(tensors_in(one))))) for one in made)
            if any(differ(first[0], other[0]) is True or first[1] != other[1] for other in others):
                return layer
            value = made[0]
            if layer.stash:
                value, tensors = unpack_stashes(value, layer.stash)
                held |= {name: Stashed.of(tensor) for name, tensor in tensors.items()}
        return None


class StageRun:
    """A stage in one mini-batch: what it is found to be, once, and what it keeps between micro-batches.

    Attributes:
        stage: The stage.
        modes: Whether each of its layers is in training mode.
        buffers: What its forwards change, for recomputes.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.modes: Modes = tuple([layer.module.training for layer in stage.layers])
        self.buffers = Buffers([layer.module for layer in stage.layers])
        self._ancestors: dict[int, set[int]] = {}

    def detach_boundary(self, values: Sequence[Tree]) -> tuple[list[BoundaryValue], list[list[Tensor]]]:
        """Cuts what leaves the stage from its graph: what to send, and the tensors whose gradients come back.

        Buffers leave as copies, since a later forward may write them. What crosses is told which of its leaves others
        were made from that cross too, as in the first micro-batch of the run, and whether it shares memory with them.
        """
        found = [detach_boundary(value) for value in values]
        crossings, roots = [crossing for crossing, _ in found], [some for _, some in found]
        flat = [root for some in roots for root in some]
        if len(flat) not in self._ancestors:
            self._ancestors[len(flat)] = find_ancestors(flat) if len(flat) > 1 else set()
        first = 0
        for crossing, some in zip(crossings, roots, strict=True):
            crossing.ancestors = frozenset(at - first for at in self._ancestors[len(flat)] if at >= first)
            first += len(some)
            if not all(tensor.requires_grad for tensor in tensors_in(crossing.value)):
                crossing.value = replace_tensors(crossing.value, self._apart)
            crossing.check(self.stage)  # notes versions
        if len(crossings) > 1:
            storages = [{storage_address(tensor) for tensor in tensors_in(one.value)} - {0} for one in crossings]
            used = Counter(address for some in storages for address in some)
            for crossing, own in zip(crossings, storages, strict=True):
                crossing.shares_storage = any(used[address] > 1 for address in own)
        return crossings, roots

    def _apart(self, tensor: Tensor) -> Tensor:
        """A tensor that is no parameter or buffer of the layers, nor a view of one: itself, or a copy."""
        return tensor if tensor.requires_grad or storage_address(tensor) not in self._memory else copy_of(tensor)

    @cached_property
    def _memory(self) -> set[int]:
        """Where the parameters and buffers lie."""
        held = (t for own in self.stage.modules for t in (*own._parameters.values(), *own._buffers.values()))
        return {storage_address(t) for t in held if t is not None} - {0}

    @cached_property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` was told of one of its modules."""
        return any(map(is_sharded, self.stage.modules))


def stage_of_layers(stages: Sequence[Stage]) -> list[int]:
    """The stage of each layer, in layer order."""
    return [stage.index for stage in stages for _ in stage.layers]
