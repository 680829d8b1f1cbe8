"""Measures the cost of each layer on a sample, in seconds or with a user's function.

Layers run one after the other. Afterwards, their gradients, buffers, other attributes and devices are restored. If
several layers are equal, only one of these layers is measured or counted.
"""

import pickle
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import keep_parameters, queues, synchronize
from gpipe._torch.dispatcher import is_fake
from gpipe._torch.modes import intra_op_threads
from gpipe.features.offload import OffloadedActivations, host_of
from gpipe.features.split_backward import backward_input, backward_weight
from gpipe.runtime.streams import DeviceStream, RankStream
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.cost import LayerSeconds
from gpipe.stages.boundary import Gradients, detach_boundary, run_backward
from gpipe.stages.buffers import Buffers, SavedBuffers, Submodules, parameters_kept, state_kept, state_of, untouched
from gpipe.stages.memory_layout import copy_of, moved
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import skip_names, unpack_stashes
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import Tree, replace_tensors, tensors_in
from gpipe.tracing.stage import Essence, SingleLayer

T = TypeVar("T")
Values: TypeAlias = tuple[Tree, Mapping[str, Tensor | None]]
"""The input of a layer and the tensors that the layer pops; or the output and the tensors that the layer stashes."""

MIN_ROUNDS, MAX_ROUNDS, PATIENCE_SECONDS = 3, 15, 0.1
"""The minimum and maximum number of rounds in which all layers are timed, after a warm-up round. After the seconds
per layer, the minimum number of rounds is enough."""


def measure_each(
    layers: Sequence[nn.Module],
    sample: Tree,
    measure: Callable[["LayerRun"], T],
    state: ReachableState | None = None,
) -> list[T]:
    """Applies `measure` to each layer, with the input that the preceding layers compute from the sample."""
    numbers: list[T] = []
    value: Tree = sample
    held: dict[str, Tensor | None] = {}
    with state_kept(*layers, state=state):
        for index, layer in enumerate(layers):
            run = LayerRun(index, layer, (value, {name: held[name] for name in skip_names(layer, "pop")}))
            with named(index, layer), parameters_kept(layer):
                numbers.append(measure(run))
                value, stashed = run.output()
            held |= stashed
    return numbers


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Runs one layer on fixed inputs."""

    index: int
    layer: nn.Module
    values: Values

    def key(self) -> object:
        """Returns a key that is the same for equal layers. A layer that cannot be compared has a unique key."""
        has_skips = self.values[1] or skip_names(self.layer, "stash")
        fingerprint = None if has_skips else fingerprint_of(self.layer, self.values[0])
        return self.index if fingerprint is None else fingerprint

    def inputs(self) -> tuple[Values, list[Tensor]]:
        """Returns a copy of the inputs, which the layer may change in place, and the leaves that get gradients."""
        leaves: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            """Returns a copy with the same `requires_grad`. The copy is not a leaf, so it can be changed in place."""
            leaves.append(tensor.detach().requires_grad_(tensor.requires_grad))
            return copy_of(leaves[-1])

        values: Any = replace_tensors(self.values, copy)
        return values, [leaf for leaf in leaves if leaf.requires_grad]

    def forward(self, inputs: Values) -> Values:
        """Runs the layer, with the same random numbers each time."""
        with rng_scope(0, 0, self.index, 0):
            return run_layer(self.layer, inputs)

    def output(self) -> Values:
        """Returns the detached output for later layers. The run also warms up the layer."""
        output = self.forward(self.inputs()[0])
        detached: Any = detach_boundary(output)[0].value
        run_backward(*roots_of(output))
        return detached  # type: ignore[no-any-return]  # the same structure with detached tensors


@contextmanager
def named(index: int, layer: nn.Module, purpose: str = "run on the sample to measure its cost") -> Iterator[None]:
    """Adds a note with the layer and the purpose of its run to exceptions."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Layer {index} ({type(layer).__name__}) was {purpose}.")
        raise


def run_layer(layer: nn.Module, values: Values) -> Values:
    """Returns the output of a layer, and the tensors that the layer stashes."""
    result = layer(values[0], **values[1])
    stash = skip_names(layer, "stash")
    return unpack_stashes(result, stash) if stash else (result, {})


def roots_of(output: Values) -> tuple[list[Tensor], Gradients]:
    """Returns the output tensors that require gradients, and a gradient of ones for each of these tensors."""
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return roots, [torch.ones_like(root) for root in roots]


@contextmanager
def as_in_training(device: torch.device, threads: int) -> Iterator[None]:
    """Sets grad mode and the number of threads per operation as in training.

    Restores torch's random generators at the end.
    """
    generators = torch.random.fork_rng([device] if queues(device) else [])
    with intra_op_threads(threads), generators, torch.inference_mode(False), torch.enable_grad():
        yield


def measure_seconds(
    layers: Sequence[nn.Module], sample: Tree, device: torch.device, *, at_once: int = 1, parts: bool = False
) -> list[LayerSeconds]:
    """Returns the seconds of the forward, the recompute and the backward of each layer on a sample micro-batch.

    - On a CPU, `at_once` threads run different layers at the same time, round after round. So the threads share
      caches, memory bandwidth, the interpreter and the cores, as ranks do in training.
    - On other devices, layers are measured one at a time. Only the measured layer is on the device.

    If layers differ only in the values of their tensors, each thread measures only one of these layers. All of these
    layers get the fastest time.

    Args:
        layers: The layers.
        sample: An input micro-batch of the first layer.
        device: The device to measure on.
        at_once: The number of ranks that compute at the same time. Default: 1.
        parts: Whether to measure the input-gradient and weight-gradient passes as well. Default: False.
    """
    once = partial(_seconds, device=device, parts=parts)
    on_device = replace_tensors(sample, lambda tensor: moved(tensor, device))
    if device.type != "cpu":  # The device may be too small for all layers together.
        known: dict[object, LayerSeconds] = {}

        def measure_on_device(run: LayerRun) -> LayerSeconds:
            key = run.key()
            keep_parameters(run.layer, device, partial(moved, device=device))
            run.layer.to(device)
            if key not in known:
                run.output()
                known[key] = _time_together([[run]], once)[0]
            return known[key]

        return measure_each(layers, on_device, measure_on_device)
    state = state_of(layers)
    runs = measure_each(layers, on_device, lambda run: run, state)
    count = min(at_once, len(runs))
    ends = [len(runs) * group // count for group in range(count + 1)] if runs else []
    keys = [run.key() for run in runs]
    groups = [{keys[run.index]: run for run in reversed(runs[first:end])} for first, end in pairwise(ends)]
    with untouched(*(run.layer for group in groups for run in group.values()), state=state):
        measured = _time_together([[*group.values()] for group in groups], once)
    by_key: dict[object, list[LayerSeconds]] = {}
    for key, seconds in zip((key for group in groups for key in group), measured, strict=True):
        by_key.setdefault(key, []).append(seconds)
    return [_combine(by_key[key], min) for key in keys]


def _time_together(
    groups: Sequence[Sequence[LayerRun]], once: Callable[[Sequence[LayerRun]], list[LayerSeconds]]
) -> list[LayerSeconds]:
    """Times groups of layers at the same time, with one thread per group, until all groups have run enough rounds."""
    rounds_of: list[deque[list[LayerSeconds]]] = [deque(maxlen=MAX_ROUNDS) for _ in groups]
    enough = [False] * len(groups)
    stopped = threading.Event()
    operations, state = torch.get_num_threads(), ThreadState.here()

    def run_rounds(group: int) -> None:
        end = time.perf_counter() + PATIENCE_SECONDS * len(groups[group])
        try:
            with intra_op_threads(operations), state.around_layers():
                while not stopped.is_set():
                    seconds = once(groups[group])
                    if not stopped.is_set():  # In a round that ends later, not all threads were running.
                        rounds_of[group].append(seconds)
                    late = time.perf_counter() >= end
                    enough[group] = len(rounds_of[group]) >= (MIN_ROUNDS if late else MAX_ROUNDS)
                    if all(enough):
                        stopped.set()
        finally:
            stopped.set()  # Also stops the other threads if this one fails.

    if len(groups) == 1:
        run_rounds(0)
    else:
        with ThreadPoolExecutor(max(1, len(groups))) as pool:
            for future in [pool.submit(run_rounds, group) for group in range(len(groups))]:
                future.result()
    return _fastest(rounds_of)


def _fastest(groups: Sequence[Sequence[Sequence[LayerSeconds]]]) -> list[LayerSeconds]:
    """Returns the fastest run of each layer, scaled so that the sum is the sum of the fastest rounds of all groups.

    Other load of the machine affects a different layer in each round. So this load does not move split points. Delays
    of every round increase the sum. The scale is the same for all groups, for the same reason.
    """
    fastest = [_combine(runs, min) for rounds in groups for runs in zip(*rounds, strict=True)]
    together = sum(min(map(_total, rounds)) for rounds in groups)
    scale = together / (_total(fastest) or 1.0)
    return [_combine([layer], lambda values: scale * values[0]) for layer in fastest]


def _total(layers: Sequence[LayerSeconds]) -> float:
    return sum(layer.forward + layer.backward for layer in layers)


def _combine(runs: Sequence[LayerSeconds], reduce: Callable[[Sequence[float]], float]) -> LayerSeconds:
    """Reduces several measurements to one, field by field. A field is None if it is None in any measurement."""
    parts = (None if None in part else reduce(part) for part in zip(*runs, strict=True))
    return LayerSeconds(*parts)  # type: ignore[arg-type]  # the first two are never None


def _seconds(runs: Sequence[LayerRun], device: torch.device, *, parts: bool) -> list[LayerSeconds]:
    """Times the layers like a stage that recomputes: all forwards, then all recomputes, then all backwards.

    Outputs are freed after the forwards, so that memory is freed and allocated as in training. Saving and restoring
    buffers counts as part of the recompute. With `parts`, the input-gradient and weight-gradient passes are timed in
    an additional run.
    """
    seconds = [defaultdict[str, float](float) for _ in runs]

    def timed(index: int, part: str, function: Callable[[], T]) -> T:
        with named(runs[index].index, runs[index].layer):
            start = _now(device)
            result = function()
            seconds[index][part] += _now(device) - start
            return result

    buffers = [Buffers(Submodules([run.layer])) for run in runs]
    kept, outputs = list[SavedBuffers](), deque[Values]()
    for i, run in enumerate(runs):
        buffers[i].modules.now()
        kept.append(timed(i, "recompute", buffers[i].before))
        outputs.append(timed(i, "forward", partial(run.forward, run.inputs()[0])))
        timed(i, "recompute", partial(buffers[i].after, kept[i]))
    for i in range(len(runs)):
        timed(i, "recompute", partial(outputs.__delitem__, 0))  # Frees the output within the timing.
    for i, run in enumerate(runs):
        outputs.append(timed(i, "recompute", partial(_recompute, run, run.inputs()[0], buffers[i], kept[i])))
    last_first = range(len(runs))[::-1]
    for i in last_first:
        timed(i, "backward", partial(run_backward, *roots_of(outputs.pop())))
    if parts:
        inputs, leaves = zip(*(run.inputs() for run in runs), strict=True)
        outputs += map(LayerRun.forward, runs, inputs)
        late = [timed(i, "inputs", partial(backward_input, *roots_of(outputs.pop()), leaves[i])) for i in last_first]
        for i, waiting in zip(last_first, late, strict=True):
            timed(i, "weights", partial(backward_weight, waiting))
    return [LayerSeconds(**each) for each in seconds]


def _recompute(run: LayerRun, inputs: Values, buffers: Buffers, before: SavedBuffers) -> Values:
    with buffers.as_before(before):
        return run.forward(inputs)


def measure_host(device: torch.device) -> float:
    """Returns the speed at which activations move to host memory and back, in bytes per second."""
    stream = DeviceStream(device) if queues(device) else RankStream(device)
    host, activations = host_of(stream), OffloadedActivations()
    with activations.watched(), torch.enable_grad():
        kept = torch.zeros(OFFLOADED_NUMBERS, device=device, requires_grad=True).exp().exp()
    start = _now(device)
    host.offload(Action(Kind.OFFLOAD, 0, 0), activations)
    host.finish()
    host.fetch(Action(Kind.FETCH, 0, 0), activations)
    host.finish()
    seconds = _now(device) - start
    host.close()
    return 2 * OFFLOADED_NUMBERS * kept.itemsize / seconds


OFFLOADED_NUMBERS = 2**23


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


class _FingerprintPickler(pickle.Pickler):
    """Pickles objects for a comparison: tensors by their layout, types and functions by their identity."""

    def __init__(self, file: BytesIO, kept: Collection[int], essence: Essence) -> None:
        super().__init__(file)
        self._kept, self._own, self._shared = kept, essence.own, essence.shared
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: object) -> str | None:
        """Returns a text for tensors, types and functions, and None for other objects, whose contents are pickled."""
        if isinstance(item, (type, FunctionType, BuiltinFunctionType)) or id(item) in self._shared:
            return str(id(item))
        if type(item) is int and item == self._own:
            return "its own number"
        if isinstance(item, Tensor) and (type(item) in (Tensor, nn.Parameter) or is_fake(item)):
            storage = item.untyped_storage()
            which = [self._numbers.setdefault(id(each), len(self._numbers)) for each in (item, storage)]
            layout = type(item), item.shape, item.stride(), item.dtype, item.requires_grad, item.storage_offset()
            return str((which, layout, storage.nbytes(), id(storage) in self._kept))
        if isinstance(item, (Tensor, torch.jit.ScriptModule)):
            raise pickle.PicklingError("The behavior of this object is not known.")
        return None


def fingerprint(value: object, kept: Collection[int] = ()) -> bytes | None:
    """Returns bytes that are equal for objects that differ only in the values of their tensors.

    Returns None if the objects cannot be compared. All attributes of layers are compared, not only their printed
    form. A storage whose identity is in `kept` differs from a storage that is not.

    >>> fingerprint(nn.Linear(2, 3)) == fingerprint(nn.Linear(2, 3)) != fingerprint(nn.Linear(2, 3, bias=False))
    True
    """
    file = BytesIO()
    try:
        essence = value if isinstance(value, Essence) else Essence(value)
        _FingerprintPickler(file, kept, essence).dump(essence.what)
    except Exception:  # Objects that cannot be pickled can raise any exception.
        return None
    return file.getvalue()


def fingerprint_of(layer: nn.Module, value: Tree, kept: Collection[int] = ()) -> bytes | None:
    """Returns a fingerprint of a layer and its input. For traced models, it includes the code of the layer."""
    return fingerprint(layer.essence(value) if isinstance(layer, SingleLayer) else (layer, value), kept)
