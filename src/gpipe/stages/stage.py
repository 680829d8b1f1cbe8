"""Runs a stage: consecutive layers on one device.

Layers may change their input in place. The first run of a stage in each combination of training modes receives a copy
of the input, and gpipe checks whether the layers change it. Later runs receive a copy only if the layers change it.
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
from gpipe.stages.buffers import Buffers, Slot, Submodules
from gpipe.stages.digest import differ, digest
from gpipe.stages.dtensor import is_sharded
from gpipe.stages.memory_layout import copy_of, storage_address, versions
from gpipe.stages.rng import PipeRngScope
from gpipe.stages.skips import Pop, Stashed, alias, keep_stashes
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

if TYPE_CHECKING:
    from gpipe.features.slices import SliceKeys

LOSS = "loss_fn"
"""Name of the loss function in messages that otherwise name a layer."""

NO_ALIASES: AbstractContextManager[object] = nullcontext()
_NONE: frozenset[int] = frozenset()
TRIES = 4
"""Number of times that a layer runs in the search for nondeterministic layers."""
Modes: TypeAlias = tuple[bool, ...]
"""The training mode of each layer."""

BEGUN_IN_PLACE = (
    "{stage}: a layer changes its input in place, but did not in earlier runs, so gpipe did not copy the input. Run "
    "the step again. [input-change-began]"
)
BACKWARD_INSIDE = (
    "{source} calls backward(), so earlier layers would lose gradients of the input of {stage}. Use "
    "torch.autograd.grad, or detach the input. [backward-inside-forward]"
)
HOOKED_NODE = (
    "{stage}: a layer registers a hook on the grad_fn of a tensor that it receives. In a pipe, this grad_fn is a "
    "different node. Register the hook on the tensor (tensor.register_hook). [hook-on-received-node]"
)
SHARED_IN_PLACE = (
    "{stage}: a layer changes an input in place. Another input shares its memory, but after a stage boundary, it "
    "does not change too. Change a copy, or return a clone from the earlier layer. [shared-input-changed-in-place]"
)


class RngKey(NamedTuple):
    """The random key of a stage. A recomputation uses the same key as its forward."""

    seed: int
    step: int
    micro_batch: int


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of the pipe.

    Attributes:
        index: The index of the layer in the pipe.
        name: The name of the layer in the pipe.
        module: The module.
        stash: The names of the tensors that the layer stashes.
        pop: The stashes that the layer pops.
        kind: The description of the layer in messages. Default: the class of the module.
        prefix: The prefix that parameter names of the layer have in the pipe. Default: the name of the layer and a
            dot.
        aliased: A context in which the module has the aliases of shared parameters that belong to this layer
            (`WeightAliases`).
    """

    index: int
    name: str
    module: nn.Module
    stash: tuple[str, ...] = ()
    pop: tuple[Pop, ...] = ()
    kind: str = ""
    prefix: str | None = None
    aliased: AbstractContextManager[object] = NO_ALIASES

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name}: {self.kind or type(self.module).__name__})"

    def full_name(self, name: str) -> str:
        """Returns the name that a parameter of the layer has in the pipe."""
        return f"{self.name}.{name}" if self.prefix is None else f"{self.prefix}{name}"


@dataclass(slots=True)
class LayerProgress:
    """Records how far a run through a stage has come, for error messages.

    Attributes:
        numbers: The sequence number of the next autograd node, before each layer and before the loss.
        found: The layer that caused an error, if it is known. Otherwise messages name the layer that began last.
    """

    numbers: list[int] = field(default_factory=list)
    found: str = ""

    def enter(self) -> None:
        """Records that the next layer begins. After the last layer, this is the loss."""
        self.numbers.append(next_node_number())

    def last_of(self, layers: Sequence[Layer]) -> str | None:
        """Describes the layer that caused the error. If it is unknown, describes the layer that began last."""
        return self.found or layer_at(layers, len(self.numbers) - 1)

    def maker_of(self, number: int | None, layers: Sequence[Layer]) -> str | None:
        """Describes the layer that created the autograd node with this sequence number."""
        return None if number is None else layer_at(layers, bisect_right(self.numbers, number) - 1)


def layer_at(layers: Sequence[Layer], position: int) -> str | None:
    """Describes the layer at a position in a stage. The loss follows the last layer."""
    if position < 0:
        return None
    return str(layers[position]) if position < len(layers) else LOSS


@dataclass(slots=True)
class StageCall:
    """One run through a stage.

    Attributes:
        arrived: The stashes of earlier stages, by route name.
        rng_key: The random key.
        progress: The layers that have begun.
        set_layer: Called with the index of each layer before it runs. Random numbers then use the key of this layer.
        held: The stashes of the layers that have run.
        keys: The keys and values of earlier slices, if the micro-batch is a slice of a sequence.
        watch: Called after each layer, with the output of the layer.
        output: The result, after all layers have run.
    """

    arrived: Mapping[str, Tensor | None]
    rng_key: RngKey
    progress: LayerProgress
    set_layer: Callable[[int], object] = id
    held: dict[str, Stashed] = field(default_factory=dict)
    keys: "SliceKeys | None" = None
    watch: Callable[[Layer, Tree], None] | None = None
    output: "StageOutput | None" = None


class StageOutput(NamedTuple):
    """The result of a stage for one micro-batch.

    Attributes:
        values: The values to send, one per outgoing route. The main route is last.
        for_loss: The stashes that the loss function pops.
        changed: The ids of the input tensors whose copies the layers changed in place.
    """

    values: list[Tree]
    for_loss: Mapping[str, Tensor | None]
    changed: frozenset[int]


class Stage:
    """Consecutive layers that run one after another for each micro-batch.

    `StageRun` holds the state of one mini-batch.

    Attributes:
        index: The number of the stage.
        layers: The layers.
        device: The device of the layers.
        home: The device of the weights between mini-batches.
        works_in_place: Whether the layers change their input in place, for each combination of training modes that
            has run.
        first: The index of the first layer.
        shared: The slots of parameters that several layers use.
    """

    def __init__(self, index: int, layers: Sequence[Layer], device: torch.device) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = self.home = device
        self.works_in_place: dict[Modes, bool] = {}
        self.first = self.layers[0].index
        self.shared: frozenset[Slot] = frozenset()
        self.submodules = Submodules(layer.module for layer in self.layers)

    def begin(self) -> None:
        """Adapts the stage to changes of its layers. Called before each pass over the micro-batches."""

    def restart(self) -> None:
        """Discards the state that runs have left in the stage. Called before a replay."""

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the layers, including submodules, each once."""
        return self.submodules.now()

    def forward(
        self,
        value: Tree,
        call: StageCall,
        departing: Sequence[tuple[str, str]],
        for_loss: Sequence[Pop],
        modes: Modes,
    ) -> StageOutput:
        """Runs the layers for one micro-batch.

        Args:
            value: The value that arrives on the main route.
            call: The run.
            departing: The name of each outgoing skip route, and the name of the stash that it carries.
            for_loss: The stashes that the loss function pops, if this is the last stage.
            modes: The training modes of the layers.

        Raises:
            RuntimeError: If the layers change an input in place although they must not, or register a hook on the
                node of an input.
        """
        both = (value, call.arrived) if call.arrived else value
        used = given = tensors_in(both)
        copies = self.works_in_place.get(modes, True)
        if copies or type(both) is not Tensor:  # A layer may change the containers that it receives.
            both = replace_tensors(both, _copy if copies else _same)
            used = tensors_in(both)
        before = versions(used)
        main = both
        if call.arrived:
            main, call.arrived = both  # type: ignore[misc]  # The tuple from the first line.
        try:
            made = self._run(main, call)
        except RuntimeError:
            self.works_in_place.pop(modes, None)  # Perhaps a layer began to change its input, a leaf: torch raises.
            raise
        now = versions(used)
        changed = list(compress(given, map(ne, before, now))) if now != before else []
        if changed or (copies and not any(map(Tensor.is_inference, used))):
            self.works_in_place[modes] = bool(changed) or self.works_in_place.get(modes, False)
        if changed and not copies:
            raise RuntimeError(BEGUN_IN_PLACE.format(stage=self))
        if changed and any(_share_storage(tensor, other) for tensor in changed for other in tensors_in(value)):
            raise RuntimeError(SHARED_IN_PLACE.format(stage=self))
        if copies and self.index and any(map(_is_hooked_copy, given, used)):
            raise RuntimeError(HOOKED_NODE.format(stage=self))
        values: list[Tree] = [call.held[stash].unchanged(stash) for _, stash in departing] if departing else []
        values.append(made)
        popped = {pop.name: self._pop(pop, call) for pop in for_loss} if for_loss else {}
        return StageOutput(values, popped, frozenset(map(id, changed)) if changed else _NONE)

    def _run(self, value: Tree, call: StageCall) -> Tree:
        numbers, set_layer, watch = call.progress.numbers, call.set_layer, call.watch
        for layer in self.layers:
            numbers.append(next_node_number())
            set_layer(layer.index)
            is_plain = layer.aliased is NO_ALIASES and not (layer.pop or layer.stash)
            value = layer.module(value) if is_plain else self._run_layer(layer, value, call)
            if watch is not None:
                watch(layer, value)
        return value

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        return f"stage {self.index} ({first})" if first is last else f"stage {self.index} ({first} to {last})"

    def _run_layer(self, layer: Layer, value: Tree, call: StageCall) -> Tree:
        popped = {pop.name: self._pop(pop, call) for pop in layer.pop} if layer.pop else {}
        with layer.aliased:
            result = layer.module(value, **popped)
        return keep_stashes(result, layer.stash, call.held)

    def _pop(self, pop: Pop, call: StageCall) -> Tensor | None:
        """Returns a stashed tensor of this stage or of an earlier stage, for one use."""
        is_local = pop.source >= self.first
        return call.held[pop.name].pop(pop.name) if is_local else alias(call.arrived[pop.route_name])

    def find_nondeterministic_layer(
        self, value: Tree, call: StageCall, as_before: Callable[[], AbstractContextManager[None]]
    ) -> Layer | None:
        """Returns the first layer that returns different results when it runs again with the same inputs.

        Args:
            value: The input of the stage.
            call: The run, whose stashes are overwritten.
            as_before: Returns a context that restores the buffers before each run of a layer.

        Returns:
            The layer, or None if all layers are deterministic.
        """
        key = call.rng_key
        for layer in self.layers:
            results = []
            for _ in range(TRIES):
                with as_before(), PipeRngScope(key.seed, key.step, layer.index, key.micro_batch):
                    made = self._run_layer(layer, replace_tensors(value, copy_of), call)
                outputs = [made, *(call.held[name].tensor for name in layer.stash)]
                results.append((digest(outputs), set(map(id, leaves_of(tensors_in(outputs))))))
            first, *others = results
            if any(differ(first[0], other[0]) is True or first[1] != other[1] for other in others):
                return layer
            value = made
        return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(tensor: Tensor) -> Tensor:
    """Copies a tensor with its memory layout. Results are then bitwise identical to runs without a copy."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor  # Torch does not write to expanded tensors.
    return carry_attributes(tensor, copy_of(tensor))


def _is_hooked_copy(tensor: Tensor, copied: Tensor) -> bool:
    """Whether a layer registered a hook on the node of a copy, which is not the node of the original tensor."""
    return copied is not tensor and copied.grad_fn is not None and has_node_hooks(copied.grad_fn)


def _share_storage(tensor: Tensor, other: Tensor) -> bool:
    return tensor is not other and storage_address(tensor) == storage_address(other) != 0


class StageRun:
    """A stage in one mini-batch: its training modes, its buffers, and relations between its outputs."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.modes: Modes = tuple([layer.module.training for layer in stage.layers])
        self.buffers = Buffers(stage.submodules)
        self._ancestors: dict[int, set[int]] = {}  # By the number of leaves.

    def detach_boundary(self, values: Sequence[Tree]) -> tuple[list[BoundaryValue], list[list[Tensor]]]:
        """Detaches the values that leave the stage from its autograd graph.

        Buffers, and views of buffers, are copied, because a later forward may change the buffers. The ancestors of a
        boundary value are found in the first micro-batch of the run.

        Returns:
            The values to send, and for each value the tensors of the graph that correspond to its leaves.
        """
        boundaries: list[BoundaryValue] = []
        roots: list[list[Tensor]] = []
        tensors: list[list[Tensor]] = []
        for value in values:
            boundary, value_roots = detach_boundary(value)
            value_tensors = tensors_in(boundary.value)
            if len(boundary.leaves) < len(value_tensors):
                boundary.value = replace_tensors(boundary.value, self._copy_state)
                originals, value_tensors = value_tensors, tensors_in(boundary.value)
                pairs = enumerate(zip(originals, value_tensors, strict=True))
                boundary.sharing = frozenset(index for index, (a, b) in pairs if a is not b)
            boundary.ancestors, boundary.versions = _NONE, versions(value_tensors)
            boundaries.append(boundary)
            roots.append(value_roots)
            tensors.append(value_tensors)
        if len(tensors) > 1 or len(tensors[0]) > 1:
            self._set_relations(boundaries, roots, tensors)
        return boundaries, roots

    def _set_relations(
        self, boundaries: Sequence[BoundaryValue], roots: Sequence[list[Tensor]], tensors: Sequence[list[Tensor]]
    ) -> None:
        """Sets the ancestors of boundary values, and which of their tensors share memory."""
        flat: list[Tensor] = list(chain.from_iterable(roots))
        if len(flat) not in self._ancestors:
            # Without gradients, ancestors do not matter, and a view may lack the node of its base.
            self._ancestors[len(flat)] = find_ancestors(flat) if torch.is_grad_enabled() else set()
        first, addresses = 0, {id(tensor): storage_address(tensor) for row in tensors for tensor in row}
        users = Counter(address for address in addresses.values() if address)
        for boundary, value_roots, value_tensors in zip(boundaries, roots, tensors, strict=True):
            boundary.ancestors = frozenset(index - first for index in self._ancestors[len(flat)] if index >= first)
            boundary.sharing |= {i for i, tensor in enumerate(value_tensors) if users[addresses[id(tensor)]] > 1}
            first += len(value_roots)

    def _copy_state(self, tensor: Tensor) -> Tensor:
        """Copies a tensor if it shares memory with a parameter or buffer of the layers, else returns it unchanged."""
        return tensor if tensor.requires_grad or storage_address(tensor) not in self._memory else copy_of(tensor)

    @cached_property
    def _memory(self) -> set[int]:
        state = (t for part in self.stage.modules for t in (*part._parameters.values(), *part._buffers.values()))
        return {storage_address(t) for t in state if t is not None} - {0}

    @cached_property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` was applied to a module of the stage."""
        return any(map(is_sharded, self.stage.modules))


def stage_of_layers(stages: Sequence[Stage]) -> list[int]:
    """Returns the stage of each layer, in layer order."""
    return [stage.index for stage in stages for _ in stage.layers]
