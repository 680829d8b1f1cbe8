"""A stage: consecutive layers on one device, tensors in, tensors out.

A stage that works in place on what it is given gets copies. Whether it does is found out by its first run in each
combination of training modes.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from operator import ne
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gpipe._torch.autograd import has_node_hooks, next_node_number
from gpipe.stages.boundary import BoundaryValue, carry_attributes, detach_boundary, find_ancestors, leaves_of
from gpipe.stages.buffers import Buffers, Slot
from gpipe.stages.digest import differ, digest
from gpipe.stages.dtensor import is_sharded
from gpipe.stages.memory_layout import copy_of, storage_address, versions
from gpipe.stages.rng import PipeRngScope
from gpipe.stages.skips import Pop, Stashed, alias, keep_stashes
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

if TYPE_CHECKING:
    from gpipe.features.slices import SliceKeys

LOSS = "loss_fn"  # what stands behind the last layer, in words

_OWN: AbstractContextManager[object] = nullcontext()
_NONE: frozenset[int] = frozenset()
TRIES = 4  # times that a layer is run to see whether it gives the same
Modes: TypeAlias = tuple[bool, ...]

BEGUN_IN_PLACE = (
    "begun to change in place what it is given, so a recompute would see the new value; run the step again"
)
BACKWARD_INSIDE = (
    "calls backward() in it, whose gradients of what {stage} is given the layers before would never see; take "
    "gradients by torch.autograd.grad, or of a detached copy"
)
HOOKED_NODE = (
    "puts a hook on the grad_fn of a tensor that it receives, which is not the node of the layer that computed the "
    "tensor. Put the hook on the tensor (tensor.register_hook), or where the tensor is made."
)
SHARED_IN_PLACE = (
    "in place a tensor that shares its memory with another one that it is given, and behind a cut the other one does "
    "not change with it; let the layer work on a copy, or the layer before return a clone"
)


class RngKey(NamedTuple):
    """What keys the randomness of a stage: seed, step and micro-batch; a recompute has the same."""

    seed: int
    step: int
    micro_batch: int


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of the user's sequence, with its place and name in it."""

    index: int
    name: str
    module: nn.Module
    stash: tuple[str, ...] = ()
    pop: tuple[Pop, ...] = ()
    kind: str = ""  # what it is, in words; by default its class
    prefix: str | None = None  # of its parameters' names in the pipe; by default its own name
    aliased: AbstractContextManager[object] = _OWN  # has it see its own aliases while it runs (shared_weights.py)

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name}: {self.kind or type(self.module).__name__})"

    def full_name(self, name: str) -> str:
        """The name in the pipe of a parameter of the layer."""
        return f"{self.name}.{name}" if self.prefix is None else f"{self.prefix}{name}"


@dataclass(slots=True)
class LayerProgress:
    """How far a run through a stage got: autograd's sequence number before each layer, and before the loss."""

    numbers: list[int] = field(default_factory=list)
    found: str = ""  # the layer to which an error was traced: messages name it instead of the last that began

    def enter(self) -> None:
        """Notes that the next layer begins, or behind the last layer the loss."""
        self.numbers.append(next_node_number())

    def last_of(self, layers: Sequence[Layer]) -> str | None:
        """In words, what was begun last."""
        return self.found or layer_at(layers, len(self.numbers) - 1)

    def maker_of(self, number: int | None, layers: Sequence[Layer]) -> str | None:
        """In words, what made the autograd node with this sequence number."""
        return None if number is None else layer_at(layers, bisect_right(self.numbers, number) - 1)


def layer_at(layers: Sequence[Layer], at: int) -> str | None:
    """In words, the layer at a place in a stage, or the loss behind the last."""
    if at < 0:
        return None
    return str(layers[at]) if at < len(layers) else LOSS


@dataclass(slots=True)
class StageCall:
    """One run through a stage."""

    arrived: Mapping[str, Tensor | None]  # what skip routes bring, by route name
    rng_key: RngKey
    progress: LayerProgress
    set_layer: Callable[[int], object] = id  # told before each layer, by its index: from there on it draws
    held: dict[str, Stashed] = field(default_factory=dict)  # what its layers have stashed
    keys: "SliceKeys | None" = None  # of a slice of a sequence
    watch: Callable[[Layer, Tree], None] | None = None  # called after each layer, with its output
    output: "StageOutput | None" = None  # once the layers have run


class StageOutput(NamedTuple):
    """What a stage made of a micro-batch."""

    values: list[Tree]  # one for each route out, the main one last
    for_loss: Mapping[str, Tensor | None]  # what the loss pops
    changed: frozenset[int]  # the ids of the tensors that it was given and would have changed in place


class Stage:
    """Consecutive layers, run one after another for a micro-batch. What a mini-batch leaves is in its `StageRun`."""

    def __init__(self, index: int, layers: Sequence[Layer], device: torch.device) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device
        self.works_in_place: dict[Modes, bool] = {}  # on what it is given; not known, it gets copies
        self.first = self.layers[0].index
        self.shared: frozenset[Slot] = frozenset()  # where parameters stand that several layers use

    def begin(self) -> None:
        """Follows what was changed in the layers since; before each pass over micro-batches."""

    def restart(self) -> None:
        """Forgets what runs have left in the stage itself; before a replay."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the layers, each layer with all inside of it."""
        return [module for layer in self.layers for module in layer.module.modules()]

    def forward(
        self,
        value: Tree,  # what the main line brings
        call: StageCall,
        departing: Sequence[tuple[str, str]],  # the routes to send stashes by: name of the route, name of the stash
        for_loss: Sequence[Pop],  # what the loss pops, if this is the last stage
        modes: Modes,
    ) -> StageOutput:
        both = (value, call.arrived) if call.arrived else value
        used = given = tensors_in(both)
        copies = self.works_in_place.get(modes, True)
        if copies or type(both) is not Tensor:  # a layer may change the dict that it is given
            both = replace_tensors(both, _copy if copies else _same)
            used = tensors_in(both)
        before = versions(used)
        main = both
        if call.arrived:
            main, call.arrived = both  # type: ignore[misc]  # the tuple of above
        try:
            made = self._run(main, call)
        except RuntimeError:
            self.works_in_place.pop(modes, None)  # perhaps it has begun to, which torch refuses on a leaf
            raise
        now = versions(used)
        changed = list(compress(given, map(ne, before, now))) if now != before else []
        if changed or (copies and not any(map(Tensor.is_inference, used))):
            self.works_in_place[modes] = bool(changed) or self.works_in_place.get(modes, False)
        if changed and not copies:
            raise RuntimeError(f"{self} has {BEGUN_IN_PLACE}")
        if changed and any(_share_storage(one, other) for one in changed for other in tensors_in(value)):
            raise RuntimeError(f"{self} changes {SHARED_IN_PLACE}")
        if copies and self.index and any(map(_is_hooked_copy, given, used)):
            raise RuntimeError(f"{self} {HOOKED_NODE}")
        values: list[Tree] = [call.held[stash].unchanged(stash) for _, stash in departing] if departing else []
        values.append(made)
        popped = {pop.name: self._pop(pop, call) for pop in for_loss} if for_loss else {}
        return StageOutput(values, popped, frozenset(map(id, changed)) if changed else _NONE)

    def _run(self, value: Tree, call: StageCall) -> Tree:
        numbers, set_layer, watch = call.progress.numbers, call.set_layer, call.watch
        for layer in self.layers:
            numbers.append(next_node_number())
            set_layer(layer.index)
            value = self._run_layer(layer, value, call)
            if watch is not None:
                watch(layer, value)
        return value

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        return f"stage {self.index}, {first}," if first is last else f"stage {self.index}, from {first} to {last},"

    def _run_layer(self, layer: Layer, value: Tree, call: StageCall) -> Tree:
        if layer.aliased is _OWN and not (layer.pop or layer.stash):  # as most
            return layer.module(value)
        popped = {pop.name: self._pop(pop, call) for pop in layer.pop} if layer.pop else {}
        with layer.aliased:
            result = layer.module(value, **popped)
        return keep_stashes(result, layer.stash, call.held)

    def _pop(self, pop: Pop, call: StageCall) -> Tensor | None:
        """A stash for one use, of this stage or of an earlier one."""
        own = pop.source >= self.first
        return call.held[pop.name].pop(pop.name) if own else alias(call.arrived[pop.route_name])

    def find_nondeterministic_layer(
        self, value: Tree, call: StageCall, as_before: Callable[[], AbstractContextManager[None]]
    ) -> Layer | None:
        """A layer that gives something else when it is given the same, and buffers `as_before`; None if none does."""
        key = call.rng_key
        for layer in self.layers:
            tries = []
            for _ in range(TRIES):
                with as_before(), PipeRngScope(key.seed, key.step, layer.index, key.micro_batch):
                    made = self._run_layer(layer, replace_tensors(value, copy_of), call)
                all_made = [made, *(call.held[name].tensor for name in layer.stash)]
                tries.append((digest(all_made), set(map(id, leaves_of(tensors_in(all_made))))))
            first, *others = tries
            if any(differ(first[0], other[0]) is True or first[1] != other[1] for other in others):
                return layer
            value = made
        return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(tensor: Tensor) -> Tensor:
    """A copy that lies like the tensor, so that later runs without a copy give the same bits."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor  # expanded: torch itself refuses to work on it in place
    return carry_attributes(tensor, copy_of(tensor))


def _is_hooked_copy(tensor: Tensor, copied: Tensor) -> bool:
    return copied is not tensor and copied.grad_fn is not None and has_node_hooks(copied.grad_fn)


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one is not other and storage_address(one) == storage_address(other) != 0


class StageRun:
    """A stage in one mini-batch: what it is found to be, once, and what it keeps between micro-batches."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        modules = [layer.module for layer in stage.layers]
        self.modes: Modes = tuple([module.training for module in modules])  # whether each is in training
        self.buffers = Buffers(modules)  # what its forwards change
        self._ancestors: dict[int, set[int]] = {}

    def detach_boundary(self, values: Sequence[Tree]) -> tuple[list[BoundaryValue], list[list[Tensor]]]:
        """Cuts what leaves the stage from its graph: what to send, and the tensors whose gradients come back.

        Buffers leave as copies, since a later forward may write them. What crosses is told which of its leaves others
        were made from that cross too, as in the first micro-batch of the run, and whether it shares memory with them.
        """
        crossings: list[BoundaryValue] = []
        roots: list[list[Tensor]] = []
        tensors: list[list[Tensor]] = []
        for value in values:
            crossing, some = detach_boundary(value)
            held = tensors_in(crossing.value)
            if len(crossing.leaves) < len(held):
                crossing.value = replace_tensors(crossing.value, self._apart)
                made, held = held, tensors_in(crossing.value)
                crossing.sharing = frozenset(
                    at for at, (a, b) in enumerate(zip(made, held, strict=True)) if a is not b
                )
            crossing.ancestors, crossing.versions = _NONE, versions(held)
            crossings.append(crossing)
            roots.append(some)
            tensors.append(held)
        if len(tensors) > 1 or len(tensors[0]) > 1:
            self._note_relations(crossings, roots, tensors)
        return crossings, roots

    def _note_relations(
        self, crossings: Sequence[BoundaryValue], roots: Sequence[list[Tensor]], tensors: Sequence[list[Tensor]]
    ) -> None:
        """Tells crossings of the leaves from which others were made, and which of their tensors share memory."""
        flat: list[Tensor] = list(chain.from_iterable(roots))
        if len(flat) not in self._ancestors:
            # Without gradients, relations do not matter, and a view may lack the node that its base had.
            self._ancestors[len(flat)] = find_ancestors(flat) if torch.is_grad_enabled() else set()
        first, addresses = 0, {id(tensor): storage_address(tensor) for some in tensors for tensor in some}
        used = Counter(address for address in addresses.values() if address)
        for crossing, some, held in zip(crossings, roots, tensors, strict=True):
            crossing.ancestors = frozenset(at - first for at in self._ancestors[len(flat)] if at >= first)
            crossing.sharing |= {at for at, one in enumerate(held) if used[addresses[id(one)]] > 1}
            first += len(some)

    def _apart(self, tensor: Tensor) -> Tensor:
        """A tensor that is no parameter or buffer of the layers, nor a view of one: itself, or a copy."""
        return tensor if tensor.requires_grad or storage_address(tensor) not in self._memory else copy_of(tensor)

    @cached_property
    def _memory(self) -> set[int]:
        held = (t for own in self.stage.modules for t in (*own._parameters.values(), *own._buffers.values()))
        return {storage_address(t) for t in held if t is not None} - {0}

    @cached_property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` was told of one of its modules."""
        return any(map(is_sharded, self.stage.modules))


def stage_of_layers(stages: Sequence[Stage]) -> list[int]:
    """The stage of each layer, in layer order."""
    return [stage.index for stage in stages for _ in stage.layers]
