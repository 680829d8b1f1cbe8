"""What layers cost for micro-batches of any size, told from two sizes: without an accelerator, or measured here.

Floating-point operations and bytes are counted on tensors without values: what a forward keeps for its backward is
what autograd saves, each storage once and in the first layer that saves it, parameters and buffers left out.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from gpipe._torch import modes
from gpipe._torch.dispatcher import GROUPED_PRODUCT, NEEDS_VALUES, Fakes
from gpipe.features.split_backward import backward_input, backward_weight
from gpipe.planner.measure import Values, likeness_of, measure_seconds, roots_of, run_layer
from gpipe.planner.search.profile import LayerProfile, Line, Profile
from gpipe.planner.watch import Watch, storage_identity
from gpipe.schedule.cost import LayerSeconds
from gpipe.stages.boundary import run_backward
from gpipe.stages.buffers import untouched
from gpipe.stages.memory_layout import strided_parts
from gpipe.stages.quantized import is_quantized, numbers_in, stored_in
from gpipe.stages.skips import skip_names
from gpipe.stages.tree import Tree, replace_tensors, tensors_in
from gpipe.tracing.meta_model import replaced_tensors
from gpipe.tracing.stage import SingleLayer

T = TypeVar("T")
Storages: TypeAlias = MutableMapping[int, torch.UntypedStorage]  # by identity
ADAM = 2  # numbers that the optimizer keeps of each that it trains: Adam keeps two
UNCOUNTABLE = (
    "layer {index} ({kind}) cannot be counted on tensors without values: {error}. Pass partitions=, micro_batches=, "
    "costs that are timed or given, and remat='always', 'never' or 'offload'. A search, schedule='auto', "
    "remat='auto' and costs='flops' need the count"
)
COUNTED_BYTES = ("boundary", "activations", "keeps_input", "working", "leaving")
_LEAST = 1e-9  # no layer costs nothing


class UncountableError(ValueError):
    """A layer cannot run on tensors without values: it branches on them, or makes sparse tensors."""


@dataclass
class LayerCounts:
    """What one layer costs for a micro-batch of one size, in floating-point operations and bytes."""

    forward: float = 0.0
    backward: float = 0.0
    boundary: float = 0.0
    activations: float = 0.0
    keeps_input: float = 0.0
    working: float = 0.0
    leaving: float = 0.0
    halves: tuple[float, ...] | None = None  # of a backward in two parts: left for the second, needed beside by each
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
    """Profiles layers that run one after another, on one micro-batch or two of what the first takes, by their rows.

    Seconds are `measured_on` a device where `at_once` ranks compute; without one floating-point operations are
    counted, and layers may be on the meta device. If wanted, both are told of the two `parts` of each backward too.
    """
    counted = {rows: count(layers, sample, parts=parts) for rows, sample in samples.items()}
    work = {rows: [LayerSeconds(each.forward, each.backward) for each in counts] for rows, counts in counted.items()}
    if measured_on is not None:
        measured = partial(measure_seconds, layers, device=measured_on, at_once=at_once, parts=parts)
        work = {rows: measured(sample) for rows, sample in samples.items()}
    profiles = []
    for at, (name, layer) in enumerate(zip(names, layers, strict=True)):
        counts = {rows: each[at] for rows, each in counted.items()}
        seconds = {rows: each[at] for rows, each in work.items()}
        profiles.append(_profile(name, layer, counts, seconds, optimizer_numbers))
    return Profile(tuple(profiles), "flops" if measured_on is None else "seconds")


def _profile(
    name: str,
    layer: nn.Module,
    counts: Mapping[int, LayerCounts],
    work: Mapping[int, LayerSeconds],
    optimizer_numbers: float,
) -> LayerProfile:
    """The profile of a layer of which is known, by rows, what it counts and takes."""
    are_split = all(each.inputs is not None for each in work.values())
    is_redone = all(each.recompute is not None for each in work.values())
    halves = [{rows: each.halves[at] for rows, each in counts.items() if each.halves} for at in range(3)]
    inputs, weights = (_line(work, lambda each: each.inputs or 0.0), _line(work, lambda each: each.weights or 0.0))
    popped = {rows: each.popped for rows, each in counts.items()}
    buffers = _bytes_of(layer.buffers())
    trained = _bytes_of(p for p in layer.parameters() if p.requires_grad)  # beside: gradients, and the optimizer's
    return LayerProfile(
        name=name,
        forward=_line(work, lambda each: max(_LEAST, each.forward)),
        backward=_line(work, lambda each: each.backward),
        parts=(inputs, weights) if are_split else None,
        recompute=_line(work, lambda each: each.recompute or 0.0) if is_redone else None,
        **{kind: _line(counts, attrgetter(kind)) for kind in COUNTED_BYTES},
        state=_bytes_of(stored_in([layer])) + trained * (1 + optimizer_numbers),
        gradients=trained,
        buffers=buffers,
        halves=tuple(_line(each, float) for each in halves) if halves[0] else None,
        popped=tuple((at, _line(popped, itemgetter(at))) for at in next(iter(popped.values()))),
    )


def _line(found: Mapping[int, T], number: Callable[[T], float]) -> Line:
    """The line through one number or two, by rows; where it would begin below 0, from there through the larger."""
    (first, small), (last, large) = ((rows, number(found[rows])) for rows in (min(found), max(found)))
    per_row = (large - small) / (last - first) if last > first else large / last
    fixed = large - per_row * last
    if fixed < 0 or per_row < 0 or last == first:
        return Line(0.0, large / last) if per_row > 0 else Line(max(small, large))
    return Line(fixed, per_row)


def _bytes_of(tensors: Iterable[Tensor]) -> float:
    return float(sum(part.nbytes for t in tensors if not is_lazy(t) for part in strided_parts(t)))


def count_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """The parameters of each layer, at least 1."""
    return [max(1, sum(numbers_in(p) for p in layer.parameters() if not is_lazy(p))) for layer in layers]


def count_flops(layers: Sequence[nn.Module], sample: Tree) -> list[float]:
    """Floating-point operations of forward and backward of each layer, at least 1, counted without values.

    What counts is matrix products, convolutions, attention and LSTMs, a multiplication and an addition as two.
    """
    return [max(1.0, each.forward + each.backward) for each in count(layers, sample)]


def count(layers: Sequence[nn.Module], sample: Tree, *, parts: bool = False) -> list[LayerCounts]:
    """Counts what each layer costs on what the layers before it make of a sample; nothing is computed.

    Of the two `parts` of its backward as well, if wanted.

    Raises:
        UncountableError: If a layer cannot run on tensors without values.
    """
    run = _Run(parts=parts)
    with torch.random.fork_rng([]), torch.inference_mode(False), torch.enable_grad():
        value = replace_tensors(sample, run.fake)
        for index, layer in enumerate(layers):
            try:
                value = run.layer(index, layer, value, is_last=index + 1 == len(layers))
            except Exception as error:
                name = type(layer).__name__
                if type(error) not in (RuntimeError, NotImplementedError, *NEEDS_VALUES):
                    error.add_note(f"while layer {index} ({name}) was counted on tensors without values")
                    raise
                said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
                raise UncountableError(UNCOUNTABLE.format(index=index, kind=name, error=said)) from error
    return run.counts


class _Run:
    """Layers that run one after another on tensors without values, and the storages that they have kept so far."""

    def __init__(self, *, parts: bool) -> None:
        self.counts: list[LayerCounts] = []
        self._parts = parts
        self._fakes = Fakes()
        self._kept: dict[int, torch.UntypedStorage] = {}  # by identity, which they keep while they are held
        self._origin: dict[int, torch.UntypedStorage] = {}  # by that of a copy, what it is a copy of
        self._copies: list[torch.UntypedStorage] = []
        self._stashed: dict[str, tuple[int, Tensor | None]] = {}
        # by what layers are and take: also what they hand on, and which storages of both they keep, where that is new
        self._known: dict[bytes, tuple[LayerCounts, Tree, list[bool] | None]] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        return self._fakes.like(tensor.detach()).requires_grad_(tensor.requires_grad)

    def layer(self, index: int, layer: nn.Module, value: Tree, *, is_last: bool) -> Tree:
        """Counts one layer, or takes for its costs those of one that is alike; gives what it hands on."""
        popped = {name: self._stashed[name] for name in skip_names(layer, "pop")}
        values = value, {name: tensor for name, (_, tensor) in popped.items()}
        copied = any(id(tensor.untyped_storage()) in self._origin for tensor in tensors_in(value))
        alone = is_last or copied or popped or skip_names(layer, "stash")
        key = None if alone else likeness_of(layer, value, self._kept)
        known, like, keeps = self._known.get(key or b"", (None, None, None))
        if known is not None and keeps is not None:
            made = replace_tensors(like, self.fake)
            self.counts.append(known)
            self._kept |= _storages(list(compress([*tensors_in(value), *tensors_in(made)], keeps)))
            return made
        saved: Storages = WeakValueDictionary()
        # what a quantizer made stays, and what is computed of it has no values
        with (
            untouched(layer),
            replaced_tensors(layer, lambda own: own if is_quantized(own) else self._fakes.like(own)),
        ):
            output, found = self._run(layer, values, saved, known, is_last=is_last)
        for source, tensor in popped.values():
            if tensor is not None:
                found.popped[source] = found.popped.get(source, 0.0) + _bytes(_storages([tensor]))
        self.counts.append(found)
        handed: Any = replace_tensors(output, lambda made: made.detach().requires_grad_(made.requires_grad))
        del output  # and with it what its graph keeps
        self._stashed |= {name: (index, tensor) for name, tensor in handed[1].items()}
        self._kept |= dict(saved)  # those that are alive
        if key is not None:
            every = [*tensors_in(value), *tensors_in(handed[0])]
            keeps = [id(tensor.untyped_storage()) in saved for tensor in every]
            again = isinstance(layer, SingleLayer) or not self._is_plain(tensors_in(handed[0]))
            self._known[key] = found, handed[0], None if again else keeps
        return handed[0]

    def _run(
        self, layer: nn.Module, values: Any, saved: Storages, known: LayerCounts | None, *, is_last: bool
    ) -> tuple[Values, LayerCounts]:
        """What a layer makes, and counts, if they are not `known`; what is new of what it keeps goes to `saved`."""
        own = {id(tensor.untyped_storage()) for tensor in (*layer.parameters(), *layer.buffers())}

        def save(tensor: Tensor) -> Tensor:
            storage = self._original(tensor.untyped_storage())
            if id(storage) not in own and id(storage) not in self._kept:
                saved[id(storage)] = storage
            return tensor

        def forward(copy: Callable[[Tensor], Tensor] = torch.clone) -> Values:
            given: Any = replace_tensors(values, copy)
            return run_layer(layer, given)

        def watched() -> Values:
            with saved_tensors_hooks(save, lambda tensor: tensor):
                return forward(self._copy)

        with self._fakes.inside():
            if known is not None:
                return watched(), known
            output, found = self._count(layer, values[0], watched, saved, is_last=is_last)
            found.halves = _count_halves(forward, tensors_in(values[0])) if self._parts else None
        return output, found

    def _is_plain(self, made: Sequence[Tensor]) -> bool:
        """Whether tensors of the same layouts lie in memory as these do."""
        storages = _storages(made)
        as_large = _bytes(_storages(list(map(self.fake, made)))) == _bytes(storages)
        return len(storages) == len(made) and as_large and storages.keys().isdisjoint(self._origin)

    def _count(
        self, layer: nn.Module, value: Tree, forward: Callable[[], Values], saved: Storages, *, is_last: bool
    ) -> tuple[Values, LayerCounts]:
        """Runs a layer forward and backward; the forward notes what it has `saved`."""
        entering, watch = _storages(tensors_in(value)), Watch(storage_identity)
        for parameter in layer.parameters():  # as it is behind the first micro-batch
            parameter.grad = self._fakes.like(parameter.detach()) if parameter.requires_grad else None
        with modes.flop_counter(FORMULAS) as counter, watch:
            output = forward()
            found = LayerCounts(forward=float(counter.get_total_flops()), boundary=_bytes(entering))
            leaving = _storages(tensors_in(output))
            found.keeps_input = _bytes({at: storage for at, storage in entering.items() if at in saved})
            found.activations = _bytes(saved) - found.keeps_input
            found.leaving = _bytes(leaving if is_last else {at: s for at, s in leaving.items() if at not in saved})
            watch.end(gradients=())
            before = watch.held
            run_backward(*roots_of(output))
            watch.end(gradients=())
            found.backward = counter.get_total_flops() - found.forward
        found.working = watch.peak - before
        return output, found

    def _copy(self, tensor: Tensor) -> Tensor:
        """A tensor for a layer to work on, in place too; known for what it is a copy of."""
        copy = tensor.clone()
        storage = copy.untyped_storage()
        self._copies.append(storage)
        self._origin[id(storage)] = self._original(tensor.untyped_storage())
        return copy

    def _original(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return self._origin.get(id(storage), storage)


def _count_halves(forward: Callable[[], Values], boundary: Sequence[Tensor]) -> tuple[int, int, int]:
    """Of a backward in two parts, once more: what the first leaves for the second, and what each needs beside."""
    with (watch := Watch(storage_identity)):
        roots = roots_of(forward())
        watch.end(gradients=())
        before, watch.peak = watch.held, 0
        waiting = backward_input(*roots, boundary)
        del roots
        watch.end(gradients=())
        first, late, watch.peak = watch.peak - before, watch.held, 0
        backward_weight(waiting)
        watch.end(gradients=())
    return late, first, max(0, watch.peak - late)


def _storages(tensors: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {id(storage): storage for storage in storages}


def _bytes(storages: Mapping[int, torch.UntypedStorage]) -> float:
    return float(sum(storage.nbytes() for storage in storages.values()))


def _flops_of_lstm(x: list[int], weight: list[int], recurrent: list[int], *others: Any, **more: Any) -> int:
    """Of each weight for each row of each time step."""
    return 2 * prod(x[:-1]) * (prod(weight) + prod(recurrent))


def _flops_of_bilinear(*shapes_and_new: Any, **more: Any) -> int:
    """Of all three factors, as they are broadcast: shapes, and where each has a dimension of one put in."""
    shapes = [list(shape) for shape in shapes_and_new[:3]]
    for shape, new in zip(shapes, shapes_and_new[3:6], strict=True):
        for at in sorted(new):
            shape.insert(at, 1)
    sizes: list[int] = [max(each) for each in zip(*shapes, strict=True)]
    return 2 * prod(sizes)


def _flops_of_grouped_product(a: list[int], b: list[int], *others: Any, **more: Any) -> int:
    """Of all groups: they share the rows of a matrix, or its columns, or have matrices of their own."""
    return 2 * prod(a[-2:]) * b[-1] * (a[0] if len(a) == len(b) == 3 else 1)


def _flops_of_convolution_backward(
    gradient: list[int], x: list[int], weight: list[int], *others: Any, out_shape: object
) -> int:
    """From shapes; torch's own formula takes the gradient of the weight as if there were one group."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = others
    return int(sum(wanted[:2])) * conv_flop_count(x, weight, gradient, transposed=transposed)


FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _flops_of_convolution_backward,
    modes.ATTENTION_ON_CPU: lambda *shapes, **more: sdpa_flop_count(*shapes[:3]),
    modes.ATTENTION_ON_CPU_BACKWARD: lambda *shapes, **more: sdpa_backward_flop_count(*shapes[:4]),
    modes.LSTM_ON_CPU: _flops_of_lstm,
    modes.LSTM_ON_CPU_BACKWARD: lambda *shapes, **more: 2 * _flops_of_lstm(*shapes),  # of inputs, and of weights
    torch.ops.aten.mv: lambda matrix, *others, **more: 2 * prod(matrix),
    torch.ops.aten.addmv: lambda summand, matrix, *others, **more: 2 * prod(matrix),
    modes.BILINEAR: _flops_of_bilinear,
    GROUPED_PRODUCT: _flops_of_grouped_product,
}
"""Floating-point operations of matrix products, convolutions, attention and LSTMs, where torch has no formula."""
