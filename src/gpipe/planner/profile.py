"""Derives the costs of layers for micro-batches of any size, from costs that were counted or measured for two sizes.

Floating-point operations and bytes are counted with fake tensors. The activations of a layer are the storages that
autograd saves in its forward, except parameters and buffers. Each storage counts once, in the first layer that
saves it.
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
from gpipe.planner.measure import Values, fingerprint_of, measure_seconds, roots_of, run_layer
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
ADAM = 2  # the numbers that Adam keeps for each parameter
UNCOUNTABLE = (
    "layer {index} ({kind}) cannot run on fake tensors to count its operations ({error}). Pass partitions=, "
    "micro_batches=, costs='time' or numbers as costs=, and remat='always', 'never' or "
    "'offload'. [layer-needs-values]"
)
COUNTED_BYTES = ("boundary", "activations", "keeps_input", "working", "leaving")
_LEAST = 1e-9  # the minimum cost of a forward


class UncountableError(ValueError):
    """Raised if a layer cannot run with fake tensors, because it branches on values or creates sparse tensors."""


@dataclass
class LayerCounts:
    """The counted cost of one layer for one micro-batch, in floating-point operations and bytes.

    `gpipe.planner.search.profile.LayerProfile` describes the fields.
    """

    forward: float = 0.0
    backward: float = 0.0
    boundary: float = 0.0
    activations: float = 0.0
    keeps_input: float = 0.0
    working: float = 0.0
    leaving: float = 0.0
    halves: tuple[float, ...] | None = None
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
    """Returns the profile of consecutive layers, from the costs of one or two micro-batches.

    Args:
        layers: The layers. They can be on the meta device, unless seconds are measured.
        samples: Inputs of the first layer, by their number of rows.
        names: The names of the layers.
        optimizer_numbers: How many numbers the optimizer keeps for each element of a parameter. Default: 2, as for
            Adam.
        measured_on: The device on which seconds are measured. Default: None, operations are counted.
        at_once: The number of ranks that compute at the same time during measurements. Default: 1.
        parts: Whether to profile the input-gradient and weight-gradient passes as well. Default: False.
    """
    counted = {rows: count(layers, sample, parts=parts) for rows, sample in samples.items()}
    work = {rows: [LayerSeconds(each.forward, each.backward) for each in counts] for rows, counts in counted.items()}
    if measured_on is not None:
        measured = partial(measure_seconds, layers, device=measured_on, at_once=at_once, parts=parts)
        work = {rows: measured(sample) for rows, sample in samples.items()}
    profiles = []
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        counts = {rows: each[index] for rows, each in counted.items()}
        seconds = {rows: each[index] for rows, each in work.items()}
        profiles.append(_profile(name, layer, counts, seconds, optimizer_numbers))
    return Profile(tuple(profiles), "flops" if measured_on is None else "seconds")


def _profile(
    name: str,
    layer: nn.Module,
    counts: Mapping[int, LayerCounts],
    work: Mapping[int, LayerSeconds],
    optimizer_numbers: float,
) -> LayerProfile:
    """Returns the profile of a layer. `counts` and `work` are its costs by the number of rows."""
    are_split = all(each.inputs is not None for each in work.values())
    is_redone = all(each.recompute is not None for each in work.values())
    halves = [{rows: each.halves[index] for rows, each in counts.items() if each.halves} for index in range(3)]
    inputs, weights = (_line(work, lambda each: each.inputs or 0.0), _line(work, lambda each: each.weights or 0.0))
    popped = {rows: each.popped for rows, each in counts.items()}
    buffers = _bytes_of(layer.buffers())
    trained = _bytes_of(p for p in layer.parameters() if p.requires_grad)
    return LayerProfile(
        name=name,
        forward=_line(work, lambda each: max(_LEAST, each.forward)),
        backward=_line(work, lambda each: each.backward),
        parts=(inputs, weights) if are_split else None,
        recompute=_line(work, lambda each: each.recompute or 0.0) if is_redone else None,
        **{kind: _line(counts, attrgetter(kind)) for kind in COUNTED_BYTES},
        state=_bytes_of(stored_in([layer])) + trained * (1 + optimizer_numbers),
        weights=_bytes_of(layer.parameters()),
        gradients=trained,
        buffers=buffers,
        halves=tuple(_line(each, float) for each in halves) if halves[0] else None,
        popped=tuple((index, _line(popped, itemgetter(index))) for index in next(iter(popped.values()))),
    )


def _line(by_rows: Mapping[int, T], number: Callable[[T], float]) -> Line:
    """Returns the cost as a line through one or two points.

    If the cost at 0 rows would be negative, returns a line through 0.
    """
    (first, small), (last, large) = ((rows, number(by_rows[rows])) for rows in (min(by_rows), max(by_rows)))
    per_row = (large - small) / (last - first) if last > first else large / last
    fixed = large - per_row * last
    if fixed < 0 or per_row < 0 or last == first:
        return Line(0.0, large / last) if per_row > 0 else Line(max(small, large))
    return Line(fixed, per_row)


def _bytes_of(tensors: Iterable[Tensor]) -> float:
    return float(sum(part.nbytes for t in tensors if not is_lazy(t) for part in strided_parts(t)))


def count_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """Returns the number of parameters of each layer, at least 1."""
    return [max(1, sum(numbers_in(p) for p in layer.parameters() if not is_lazy(p))) for layer in layers]


def count_flops(layers: Sequence[nn.Module], sample: Tree) -> list[float]:
    """Returns the counted floating-point operations of the forward and backward of each layer together, at least 1.

    The count includes matrix products, convolutions, attention and LSTMs. A multiply-add counts as 2.
    """
    return [max(1.0, each.forward + each.backward) for each in count(layers, sample)]


def count(layers: Sequence[nn.Module], sample: Tree, *, parts: bool = False) -> list[LayerCounts]:
    """Returns the counted cost of each layer, with the input that the preceding layers would compute from the sample.

    Args:
        layers: The layers.
        sample: An input micro-batch of the first layer.
        parts: Whether to count the input-gradient and weight-gradient passes as well. Default: False.

    Raises:
        UncountableError: If a layer cannot run with fake tensors.
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
                    error.add_note(f"Layer {index} ({name}) was run with fake tensors to count its cost.")
                    raise
                cause = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
                raise UncountableError(UNCOUNTABLE.format(index=index, kind=name, error=cause)) from error
    return run.counts


class _Run:
    """Runs layers one after the other with fake tensors, and tracks the storages that autograd saves."""

    def __init__(self, *, parts: bool) -> None:
        self.counts: list[LayerCounts] = []
        self._parts = parts
        self._fakes = Fakes()
        self._kept: dict[int, torch.UntypedStorage] = {}  # by identity, which is unique while the storages exist
        self._origin: dict[int, torch.UntypedStorage] = {}  # the original of each copy, by the identity of the copy
        self._copies: list[torch.UntypedStorage] = []
        self._stashed: dict[str, tuple[int, Tensor | None]] = {}
        # By fingerprint: the counts of a layer, its output, and which storages of its input and output it saves.
        self._known: dict[bytes, tuple[LayerCounts, Tree, list[bool] | None]] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        return self._fakes.like(tensor.detach()).requires_grad_(tensor.requires_grad)

    def layer(self, index: int, layer: nn.Module, value: Tree, *, is_last: bool) -> Tree:
        """Counts one layer, or reuses the counts of an equal layer. Returns the output of the layer."""
        popped = {name: self._stashed[name] for name in skip_names(layer, "pop")}
        values = value, {name: tensor for name, (_, tensor) in popped.items()}
        copied = any(id(tensor.untyped_storage()) in self._origin for tensor in tensors_in(value))
        is_unique = is_last or copied or popped or skip_names(layer, "stash")
        key = None if is_unique else fingerprint_of(layer, value, self._kept)
        known, known_output, keeps = self._known.get(key or b"", (None, None, None))
        if known is not None and keeps is not None:
            output = replace_tensors(known_output, self.fake)
            self.counts.append(known)
            self._kept |= _storages(list(compress([*tensors_in(value), *tensors_in(output)], keeps)))
            return output
        saved: Storages = WeakValueDictionary()
        # Quantized tensors stay real, because quantizers need their values. Results of operations on them are fake.
        with (
            untouched(layer),
            replaced_tensors(layer, lambda t: t if is_quantized(t) else self._fakes.like(t)),
        ):
            attached, counts = self._run(layer, values, saved, known, is_last=is_last)
        for source, tensor in popped.values():
            if tensor is not None:
                counts.popped[source] = counts.popped.get(source, 0.0) + _bytes(_storages([tensor]))
        self.counts.append(counts)
        detached: Any = replace_tensors(attached, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        del attached  # Frees the graph and the tensors that it saves.
        output, stashed = detached
        self._stashed |= {name: (index, tensor) for name, tensor in stashed.items()}
        self._kept |= dict(saved)  # the storages that still exist
        if key is not None:
            keeps = [id(tensor.untyped_storage()) in saved for tensor in (*tensors_in(value), *tensors_in(output))]
            must_run = isinstance(layer, SingleLayer) or not self._is_plain(tensors_in(output))
            self._known[key] = counts, output, None if must_run else keeps
        return output

    def _run(
        self, layer: nn.Module, values: Any, saved: Storages, known: LayerCounts | None, *, is_last: bool
    ) -> tuple[Values, LayerCounts]:
        """Runs a layer and returns its output and its counts, which are `known` if not None.

        Adds saved storages to `saved`.
        """
        parameters = {id(tensor.untyped_storage()) for tensor in (*layer.parameters(), *layer.buffers())}

        def save(tensor: Tensor) -> Tensor:
            storage = self._original(tensor.untyped_storage())
            if id(storage) not in parameters and id(storage) not in self._kept:
                saved[id(storage)] = storage
            return tensor

        def forward(copy: Callable[[Tensor], Tensor] = torch.clone) -> Values:
            inputs: Any = replace_tensors(values, copy)
            return run_layer(layer, inputs)

        def watched() -> Values:
            with saved_tensors_hooks(save, lambda tensor: tensor):
                return forward(self._copy)

        with self._fakes.inside():
            if known is not None:
                return watched(), known
            output, counts = self._count(layer, values[0], watched, saved, is_last=is_last)
            counts.halves = _count_halves(forward, tensors_in(values[0])) if self._parts else None
        return output, counts

    def _is_plain(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether new tensors with the same layouts would use memory in the same way as these tensors."""
        storages = _storages(tensors)
        as_large = _bytes(_storages(list(map(self.fake, tensors)))) == _bytes(storages)
        return len(storages) == len(tensors) and as_large and storages.keys().isdisjoint(self._origin)

    def _count(
        self, layer: nn.Module, value: Tree, forward: Callable[[], Values], saved: Storages, *, is_last: bool
    ) -> tuple[Values, LayerCounts]:
        """Counts the forward and the backward of a layer. Adds the storages that autograd saves to `saved`."""
        entering, watch = _storages(tensors_in(value)), Watch(storage_identity)
        for parameter in layer.parameters():  # Gradients exist, as after the first micro-batch.
            parameter.grad = self._fakes.like(parameter.detach()) if parameter.requires_grad else None
        with modes.flop_counter(FORMULAS) as counter, watch:
            output = forward()
            counts = LayerCounts(forward=float(counter.get_total_flops()), boundary=_bytes(entering))
            leaving = _storages(tensors_in(output))
            counts.keeps_input = _bytes({key: storage for key, storage in entering.items() if key in saved})
            counts.activations = _bytes(saved) - counts.keeps_input
            counts.leaving = _bytes(leaving if is_last else {k: s for k, s in leaving.items() if k not in saved})
            watch.end(gradients=())
            before = watch.held
            run_backward(*roots_of(output))
            watch.end(gradients=())
            counts.backward = counter.get_total_flops() - counts.forward
        counts.working = watch.peak - before
        return output, counts

    def _copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy that a layer can change in place, and records the storage of the original."""
        copy = tensor.clone()
        storage = copy.untyped_storage()
        self._copies.append(storage)
        self._origin[id(storage)] = self._original(tensor.untyped_storage())
        return copy

    def _original(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return self._origin.get(id(storage), storage)


def _count_halves(forward: Callable[[], Values], boundary: Sequence[Tensor]) -> tuple[int, int, int]:
    """Runs a split backward.

    Returns the bytes that are kept between both passes, and the temporary bytes of each pass.
    """
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
    """Returns 2 operations per weight, row and time step."""
    return 2 * prod(x[:-1]) * (prod(weight) + prod(recurrent))


def _flops_of_bilinear(*shapes_and_new: Any, **more: Any) -> int:
    """Returns the operations of a trilinear product, from three shapes and the dimensions to insert in each."""
    shapes = [list(shape) for shape in shapes_and_new[:3]]
    for shape, new in zip(shapes, shapes_and_new[3:6], strict=True):
        for dimension in sorted(new):
            shape.insert(dimension, 1)
    sizes: list[int] = [max(each) for each in zip(*shapes, strict=True)]
    return 2 * prod(sizes)


def _flops_of_grouped_product(a: list[int], b: list[int], *others: Any, **more: Any) -> int:
    """Returns the operations of all groups. Groups divide the rows or columns of a matrix, or have a matrix each."""
    return 2 * prod(a[-2:]) * b[-1] * (a[0] if len(a) == len(b) == 3 else 1)


def _flops_of_convolution_backward(
    gradient: list[int], x: list[int], weight: list[int], *others: Any, out_shape: object
) -> int:
    """Returns the operations. With groups, torch's formula for the weight gradient would be wrong."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, wanted = others
    return int(sum(wanted[:2])) * conv_flop_count(x, weight, gradient, transposed=transposed)


FORMULAS: dict[object, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _flops_of_convolution_backward,
    modes.ATTENTION_ON_CPU: lambda *shapes, **more: sdpa_flop_count(*shapes[:3]),
    modes.ATTENTION_ON_CPU_BACKWARD: lambda *shapes, **more: sdpa_backward_flop_count(*shapes[:4]),
    modes.LSTM_ON_CPU: _flops_of_lstm,
    modes.LSTM_ON_CPU_BACKWARD: lambda *shapes, **more: (
        2 * _flops_of_lstm(*shapes)
    ),  # gradients of inputs and weights
    torch.ops.aten.mv: lambda matrix, *others, **more: 2 * prod(matrix),
    torch.ops.aten.addmv: lambda summand, matrix, *others, **more: 2 * prod(matrix),
    modes.BILINEAR: _flops_of_bilinear,
    GROUPED_PRODUCT: _flops_of_grouped_product,
}
"""The formulas for operations that `torch.utils.flop_counter` does not count, or counts incorrectly."""
