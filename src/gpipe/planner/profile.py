"""What layers cost for micro-batches of any size, told from two sizes: without an accelerator, or measured here.

Floating-point operations and bytes are counted on tensors without values: what a forward keeps for its backward is
what autograd saves, each storage once and in the first layer that saves it, parameters and buffers left out.
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from gpipe._torch.dispatcher import Fakes
from gpipe.planner.alike import likeness, likeness_of_value
from gpipe.planner.counts import counting
from gpipe.planner.measure import LayerOutput, backward_of, measure_seconds
from gpipe.planner.search.profile import LayerProfile, Line, Profile
from gpipe.planner.watch import Watch, storage_identity
from gpipe.schedule.cost import LayerSeconds
from gpipe.stages.buffers import untouched
from gpipe.stages.shared_weights import put_parameter
from gpipe.stages.skips import skip_names, unpack_stashes
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

ADAM = 2
"""Numbers that the optimizer keeps of each that it trains: Adam keeps two."""

IF_IT_NEEDS_VALUES = (
    "if it needs them, to branch on, no plan and no remat='auto' can be found: give partitions=, micro_batches= and "
    "remat= to GPipe yourself"
)


@dataclass
class LayerCounts:
    """What one layer costs for a micro-batch of one size, in floating-point operations and bytes."""

    forward: float = 0.0
    backward: float = 0.0
    boundary: float = 0.0
    inside: float = 0.0
    keeps_input: float = 0.0
    working: float = 0.0
    leaving: float = 0.0
    popped: dict[int, float] = field(default_factory=dict)


def profile_layers(
    layers: Sequence[nn.Module],
    samples: Mapping[int, Tree],
    names: Sequence[str],
    *,
    optimizer_numbers: float = ADAM,
    measured_on: torch.device | None = None,
    at_once: int = 1,
    parts: bool = False,
) -> Profile:
    """Profiles layers that are run one after another.

    Args:
        layers: In order; they may be on the meta device, if nothing is to be measured.
        samples: By their rows, one micro-batch or two of what the first layer takes.
        names: Of the layers.
        optimizer_numbers: How many numbers the optimizer keeps of each that it trains.
        measured_on: The device on which to measure seconds; None: count floating-point operations.
        at_once: How many ranks compute at once on this machine, where seconds are measured.
        parts: Whether the two parts of a backward are measured too.

    >>> layers = [nn.Linear(4, 8), nn.Tanh()]
    >>> profile = profile_layers(layers, {2: torch.ones(2, 4), 4: torch.ones(4, 4)}, ["0", "1"])
    >>> profile.layers[0].forward, profile.layers[0].state, profile.layers[1].inside
    (Line(fixed=0.0, per_row=64.0), 640.0, Line(fixed=0.0, per_row=32.0))
    """
    counted = {rows: count(layers, sample) for rows, sample in samples.items()}
    work = {rows: [LayerSeconds(each.forward, each.backward) for each in counts] for rows, counts in counted.items()}
    if measured_on is not None:
        measured = partial(measure_seconds, layers, device=measured_on, at_once=at_once, parts=parts)
        work = {rows: measured(sample) for rows, sample in samples.items()}
    profiles = []
    for at, (name, layer) in enumerate(zip(names, layers, strict=True)):
        counts = {rows: each[at] for rows, each in counted.items()}
        taken = {rows: each[at] for rows, each in work.items()}
        profiles.append(_profile(name, layer, counts, taken, optimizer_numbers))
    return Profile(tuple(profiles), "flops" if measured_on is None else "seconds")


def _profile(
    name: str,
    layer: nn.Module,
    counts: Mapping[int, LayerCounts],
    work: Mapping[int, LayerSeconds],
    optimizer_numbers: float,
) -> LayerProfile:
    """The profile of a layer of which is known, by rows, what it counts and takes."""
    return LayerProfile(
        name=name,
        forward=_line({rows: max(_LEAST, each.forward) for rows, each in work.items()}),
        backward=_line({rows: each.backward for rows, each in work.items()}),
        parts=_parts(work),
        boundary=_line({rows: each.boundary for rows, each in counts.items()}),
        inside=_line({rows: each.inside for rows, each in counts.items()}),
        keeps_input=_line({rows: each.keeps_input for rows, each in counts.items()}),
        working=_line({rows: each.working for rows, each in counts.items()}),
        leaving=_line({rows: each.leaving for rows, each in counts.items()}),
        state=_state(layer, optimizer_numbers),
        buffers=float(sum(t.numel() * t.element_size() for t in layer.buffers() if not is_lazy(t))),
        popped=tuple(
            (source, _line({rows: each.popped[source] for rows, each in counts.items()}))
            for source in next(iter(counts.values())).popped
        ),
    )


_LEAST = 1e-9
"""No layer costs nothing."""


def _line(numbers: Mapping[int, float]) -> Line:
    """The line through one number or two; where it would begin below 0, from there through the larger."""
    (first, small), (last, large) = min(numbers.items()), max(numbers.items())
    per_row = (large - small) / (last - first) if last > first else large / last
    fixed = large - per_row * last
    if fixed < 0 or per_row < 0 or last == first:
        return Line(0.0, large / last) if per_row > 0 else Line(max(small, large))
    return Line(fixed, per_row)


def _parts(work: Mapping[int, LayerSeconds]) -> tuple[Line, Line] | None:
    inputs = {rows: each.inputs for rows, each in work.items() if each.inputs is not None}
    weights = {rows: each.weights for rows, each in work.items() if each.weights is not None}
    return (_line(inputs), _line(weights)) if inputs and weights else None


def _state(layer: nn.Module, optimizer_numbers: float) -> float:
    """Bytes of weights and buffers, and where they are trained of gradients and the optimizer."""
    held = [*layer.parameters(), *layer.buffers()]
    sizes = ((t.numel() * t.element_size(), t.requires_grad) for t in held if not is_lazy(t))
    return float(sum(size * (2 + optimizer_numbers if trains else 1) for size, trains in sizes))


def count(layers: Sequence[nn.Module], sample: Tree) -> list[LayerCounts]:
    """Counts what each layer costs on what the layers before it make of a sample; nothing is computed.

    Raises:
        Exception: What a layer raises that cannot be run without values, with a note that says so.
    """
    run = _Run()
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
        value = replace_tensors(sample, run.fake)
        for index, layer in enumerate(layers):
            try:
                value = run.layer(index, layer, value, is_last=index + 1 == len(layers))
            except Exception as error:
                name = type(layer).__name__
                error.add_note(f"while layer {index} ({name}) was counted without values; {IF_IT_NEEDS_VALUES}")
                raise
    return run.counts


@dataclass(frozen=True)
class _Outcome:
    """What a layer came to that hands on storages of its own, and keeps none but those and what it takes.

    Attributes:
        counts: What it costs.
        output: What it hands on.
        keeps: Of the tensors that it takes, and of those that it hands on, whether their storages are kept by then.
    """

    counts: LayerCounts
    output: Tree
    keeps: tuple[bool, ...]


class _Run:
    """Layers that run one after another on tensors without values, and the storages that they have kept so far."""

    def __init__(self) -> None:
        self.counts: list[LayerCounts] = []
        self._fakes = Fakes()
        self._kept: dict[int, torch.UntypedStorage] = {}  # by identity, which they keep while they are held
        self._origin: dict[int, torch.UntypedStorage] = {}  # by that of a copy, what it is a copy of
        self._copies: list[torch.UntypedStorage] = []
        self._stashed: dict[str, tuple[int, Tensor | None]] = {}
        self._outcomes: dict[Hashable, _Outcome] = {}  # by what layers are and take

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor of the same layout without values."""
        return self._fakes.like(tensor.detach()).requires_grad_(tensor.requires_grad)

    @contextmanager
    def on_fakes(self, layer: nn.Module) -> Iterator[None]:
        """Has the modules of a layer hold tensors without values; `untouched` puts back what they held."""
        held = [
            (module, name, tensor, own)
            for module in layer.modules()
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        ]
        made = {id(tensor): self._fakes.like(tensor) for _, _, tensor, _ in held}
        try:
            for module, name, tensor, own in held:
                _put(module, name, made[id(tensor)], own)
            yield
        finally:
            for module, name, tensor, own in held:
                _put(module, name, tensor, own)

    def layer(self, index: int, layer: nn.Module, value: Tree, *, is_last: bool) -> Tree:
        """Counts one layer, or takes for its costs those of one that is alike; gives what it hands on."""
        key = None if is_last else self._key(layer, value)
        if key in self._outcomes:
            return self._as_before(self._outcomes[key], value)
        before = dict(self._kept)
        with untouched(layer), self.on_fakes(layer):
            output = self._run(index, layer, value, is_last=is_last)
        if key is not None and self._is_outcome(value, output, before):
            keeps = tuple(map(self._is_kept, (*tensors_in(value), *tensors_in(output))))
            self._outcomes[key] = _Outcome(self.counts[-1], replace_tensors(output, self.fake), keeps)
        return output

    def _key(self, layer: nn.Module, value: Tree) -> Hashable | None:
        """By which layers are alike; None if that cannot be told."""
        copied = any(id(tensor.untyped_storage()) in self._origin for tensor in tensors_in(value))
        if copied or skip_names(layer, "pop") or skip_names(layer, "stash"):
            return None
        what, given = likeness(layer), likeness_of_value(value, self._kept)
        return None if what is None or given is None else (what, given)

    def _is_outcome(self, value: Tree, output: Tree, before: Mapping[int, torch.UntypedStorage]) -> bool:
        """Whether all that is left of a layer that was run is what an outcome says."""
        given, made = (_storages(tensors_in(tree)) for tree in (value, output))
        of_others = given.keys() | before.keys() | self._origin.keys()
        only = self._kept.keys() - before.keys() <= given.keys() | made.keys()
        fresh = replace_tensors(output, self.fake)
        alike = likeness_of_value(output, ()) == likeness_of_value(fresh, ())
        return only and alike and made.keys().isdisjoint(of_others)

    def _is_kept(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._kept

    def _as_before(self, outcome: _Outcome, value: Tree) -> Tree:
        """Counts a layer that is like one that was run."""
        self.counts.append(outcome.counts)
        output = replace_tensors(outcome.output, self.fake)
        tensors = (*tensors_in(value), *tensors_in(output))
        kept = [tensor for tensor, keeps in zip(tensors, outcome.keeps, strict=True) if keeps]
        self._kept |= _storages(kept)
        return output

    def _run(self, index: int, layer: nn.Module, value: Tree, *, is_last: bool) -> Tree:
        own = {id(tensor.untyped_storage()) for tensor in (*layer.parameters(), *layer.buffers())}
        entering = _storages(tensors_in(value))
        popped = {name: self._stashed[name] for name in skip_names(layer, "pop")}
        found = LayerCounts(boundary=_bytes(entering))
        for source, tensor in popped.values():
            if tensor is not None:
                found.popped[source] = found.popped.get(source, 0.0) + _bytes(_storages([tensor]))
        saved: dict[int, torch.UntypedStorage] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = self._original(tensor.untyped_storage())
            if id(storage) not in own | self._kept.keys():
                saved[id(storage)] = storage
            return tensor

        for parameter in layer.parameters():  # as it is behind the first micro-batch
            parameter.grad = self._fakes.like(parameter.detach()) if parameter.requires_grad else None
        watch = Watch(storage_identity)
        with self._fakes.inside(), counting() as counter, watch:
            with saved_tensors_hooks(save, lambda tensor: tensor):
                output = self._forward(layer, value, {name: tensor for name, (_, tensor) in popped.items()})
            found.forward = float(counter.get_total_flops())
            leaving = _storages([t for t in (*tensors_in(output[0]), *output[1].values()) if t is not None])
            found.keeps_input = _bytes({at: storage for at, storage in saved.items() if at in entering})
            found.inside = _bytes(saved) - found.keeps_input
            found.leaving = _bytes(leaving if is_last else {at: s for at, s in leaving.items() if at not in saved})
            still = {at: weakref.ref(storage) for at, storage in saved.items()}
            saved.clear()
            watch.end(gradients=())
            before = watch.held
            backward_of(output)()
            watch.end(gradients=())
            found.backward = counter.get_total_flops() - found.forward
        found.working = watch.peak - before
        self._kept |= {at: storage for at, one in still.items() if (storage := one()) is not None}
        self.counts.append(found)
        for name, tensor in output[1].items():
            self._stashed[name] = index, None if tensor is None else _cut(tensor)
        return replace_tensors(output[0], _cut)

    def _forward(self, layer: nn.Module, value: Tree, popped: Mapping[str, Tensor | None]) -> LayerOutput:
        given = {name: None if tensor is None else self._copy(tensor) for name, tensor in popped.items()}
        result = layer(replace_tensors(value, self._copy), **given)
        stash = skip_names(layer, "stash")
        return unpack_stashes(result, stash) if stash else (result, {})

    def _copy(self, tensor: Tensor) -> Tensor:
        """A tensor for a layer to work on, in place too; known for what it is a copy of."""
        copy = tensor.clone()
        storage = copy.untyped_storage()
        self._copies.append(storage)
        self._origin[id(storage)] = self._original(tensor.untyped_storage())
        return copy

    def _original(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return self._origin.get(id(storage), storage)


def _cut(tensor: Tensor) -> Tensor:
    """What later layers take, apart from the graph behind it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _storages(tensors: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {id(storage): storage for storage in storages}


def _bytes(storages: Mapping[int, torch.UntypedStorage]) -> float:
    return float(sum(storage.nbytes() for storage in storages.values()))


def _put(module: nn.Module, name: str, tensor: Tensor, own: Mapping[str, Tensor | None]) -> None:
    if own is module._parameters:
        put_parameter(module, name, tensor)
    else:
        module._buffers[name] = tensor
