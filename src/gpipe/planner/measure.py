"""Measures what each layer costs on a sample: its seconds, or what the user's function says.

Layers run one after another, and nothing of it remains: gradients, buffers and other attributes of the layers and
the devices they are on are as before. Of layers that are alike it is enough to measure, or to count, one.
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
from statistics import mean, median, median_low
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
from gpipe.stages.buffers import Buffers, SavedBuffers, parameters_kept, state_kept, state_of, untouched
from gpipe.stages.memory_layout import copy_of, moved
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import skip_names, unpack_stashes
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import Tree, replace_tensors, tensors_in
from gpipe.tracing.stage import Essence, SingleLayer

T = TypeVar("T")
Values: TypeAlias = tuple[Tree, Mapping[str, Tensor | None]]
"""What a layer takes of the main line, and what it pops; or what it returns, and what it stashes."""

FEWEST_ROUNDS, MOST_ROUNDS, PATIENCE_SECONDS = 2, 15, 0.1
"""Rounds in which all layers are timed, behind one that warms up, and seconds for each layer after which no more are
begun."""


def measure_each(
    layers: Sequence[nn.Module],
    sample: Tree,
    measure: Callable[["LayerRun"], T],
    state: ReachableState | None = None,
) -> list[T]:
    """Measures each layer on what the layers before it make of the sample."""
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
    """Runs of one layer on what it takes of the main line and pops."""

    index: int
    layer: nn.Module
    values: Values

    def key(self) -> object:
        """The same for layers that are alike; its own where that cannot be told."""
        alone = self.values[1] or skip_names(self.layer, "stash")
        found = None if alone else likeness_of(self.layer, self.values[0])
        return self.index if found is None else found

    def given(self) -> tuple[Values, list[Tensor]]:
        """What the layer takes, for it to keep, since it may work in place; and the leaves its gradients come to."""
        leaves: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            """A tensor that wants a gradient if the other does; no leaf, so that it may be changed in place."""
            leaves.append(tensor.detach().requires_grad_(tensor.requires_grad))
            return copy_of(leaves[-1])

        values: Any = replace_tensors(self.values, copy)
        return values, [leaf for leaf in leaves if leaf.requires_grad]

    def forward(self, given: Values) -> Values:
        """Runs the layer, with the same randomness each time."""
        with rng_scope(0, 0, self.index, 0):
            return run_layer(self.layer, given)

    def output(self) -> Values:
        """What later layers take, cut from its graph; the run warms the layer up."""
        output = self.forward(self.given()[0])
        found: Any = detach_boundary(output)[0].value
        run_backward(*roots_of(output))
        return found  # type: ignore[no-any-return]  # as it came, but for the tensors


@contextmanager
def named(index: int, layer: nn.Module, doing: str = "run on the sample, for its cost") -> Iterator[None]:
    """OffloadedActivations, an exception says what was done to which layer."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while layer {index} ({type(layer).__name__}) was {doing}")
        raise


def run_layer(layer: nn.Module, values: Values) -> Values:
    """What a layer returns, and what it stashes."""
    result = layer(values[0], **values[1])
    stash = skip_names(layer, "stash")
    return unpack_stashes(result, stash) if stash else (result, {})


def roots_of(output: Values) -> tuple[list[Tensor], Gradients]:
    """What of the output of a layer a backward starts at, and a gradient for each."""
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return roots, [torch.ones_like(root) for root in roots]


@contextmanager
def as_in_training(device: torch.device, threads: int) -> Iterator[None]:
    """Has layers run as in training: grad mode, so many threads an operation; torch's generators are put back."""
    generators = torch.random.fork_rng([device] if queues(device) else [])
    with intra_op_threads(threads), generators, torch.inference_mode(False), torch.enable_grad():
        yield


def measure_seconds(
    layers: Sequence[nn.Module], sample: Tree, device: torch.device, *, at_once: int = 1, parts: bool = False
) -> list[LayerSeconds]:
    """Seconds of the forward, the recompute and the backward of each layer on a sample micro-batch.

    A layer takes what it takes while the other ranks compute: on a CPU as many threads as there are ranks go round
    layers of their own, again and again, so that caches, the memory's bandwidth, the interpreter and the cores are
    shared as in training. On other devices a layer is measured by itself, and is on the device meanwhile. Of layers
    that are alike in all but the numbers in their tensors each thread measures one, for all of them.
    """
    once = partial(_seconds, device=device, parts=parts)
    on_device = replace_tensors(sample, lambda tensor: moved(tensor, device))
    if device.type != "cpu":  # which need not hold all layers
        known: dict[object, LayerSeconds] = {}

        def alone(run: LayerRun) -> LayerSeconds:
            key = run.key()
            keep_parameters(run.layer, device, partial(moved, device=device))
            run.layer.to(device)
            if key not in known:
                run.output()
                known[key] = _time_in_company([[run]], once)[0]
            return known[key]

        return measure_each(layers, on_device, alone)
    state = state_of(layers)
    runs = measure_each(layers, on_device, lambda run: run, state)
    count = min(at_once, len(runs))
    cuts = [len(runs) * at // count for at in range(count + 1)] if runs else []
    keys = [run.key() for run in runs]
    groups = [{keys[run.index]: run for run in reversed(runs[first:end])} for first, end in pairwise(cuts)]
    with untouched(*(run.layer for group in groups for run in group.values()), state=state):
        seconds = _time_in_company([[*group.values()] for group in groups], once)
    found: dict[object, list[LayerSeconds]] = {}
    for key, took in zip((key for group in groups for key in group), seconds, strict=True):
        found.setdefault(key, []).append(took)
    return [_combine(found[key], mean) for key in keys]


def _time_in_company(
    groups: Sequence[Sequence[LayerRun]], once: Callable[[Sequence[LayerRun]], list[LayerSeconds]]
) -> list[LayerSeconds]:
    """Times groups of layers at once, a thread for each, round after round, until all were timed often enough."""
    found: list[deque[list[LayerSeconds]]] = [deque(maxlen=MOST_ROUNDS) for _ in groups]
    enough = [False] * len(groups)
    stopped = threading.Event()
    operations, state = torch.get_num_threads(), ThreadState.here()

    def go(at: int) -> None:
        end = time.perf_counter() + PATIENCE_SECONDS * len(groups[at])
        try:
            with intra_op_threads(operations), state.around_layers():
                while not stopped.is_set():
                    one = once(groups[at])
                    if not stopped.is_set():  # a round that ends later was not in company
                        found[at].append(one)
                    late = time.perf_counter() >= end
                    enough[at] = len(found[at]) >= (FEWEST_ROUNDS if late else MOST_ROUNDS)
                    if all(enough):
                        stopped.set()
        finally:
            stopped.set()  # for the others too, where one fails

    if len(groups) == 1:
        go(0)
    else:
        with ThreadPoolExecutor(max(1, len(groups))) as pool:
            for done in [pool.submit(go, at) for at in range(len(groups))]:
                done.result()
    return [each for rounds in found for each in _typical(rounds)]


def _typical(rounds: Sequence[Sequence[LayerSeconds]]) -> list[LayerSeconds]:
    """Of each layer the median run, all in proportion so that they add up to the median round.

    What disturbs now one layer and now another is so part of the sum, but does not tell against a single layer.
    """
    middle = [_combine(runs, median_low) for runs in zip(*rounds, strict=True)]
    together = median(sum(layer.forward + layer.backward for layer in each) for each in rounds)
    scale = together / (sum(layer.forward + layer.backward for layer in middle) or 1.0)
    return [_combine([layer], lambda one: scale * one[0]) for layer in middle]


def _combine(runs: Sequence[LayerSeconds], way: Callable[[Sequence[float]], float]) -> LayerSeconds:
    """One of several, part by part; what one of them lacks it lacks."""
    parts = (None if None in part else way(part) for part in zip(*runs, strict=True))
    return LayerSeconds(*parts)  # type: ignore[arg-type]  # the first two are never None


def _seconds(runs: Sequence[LayerRun], device: torch.device, *, parts: bool) -> list[LayerSeconds]:
    """Of layers in turn, as in a stage that recomputes: all forwards, let go of, then all recomputes, all backwards.

    So memory is given back and taken anew as in training. Buffers kept for a recompute and put back count as its
    seconds. The two parts of a backward, if these are wanted, are those of another one.
    """
    took = [defaultdict[str, float](float) for _ in runs]

    def timed(at: int, part: str, do: Callable[[], T]) -> T:
        with named(runs[at].index, runs[at].layer):
            start = _now(device)
            found = do()
            took[at][part] += _now(device) - start
            return found

    buffers, kept, made = [Buffers([run.layer]) for run in runs], list[SavedBuffers](), deque[Values]()
    for at, run in enumerate(runs):
        buffers[at].find()
        kept.append(timed(at, "recompute", buffers[at].before))
        made.append(timed(at, "forward", partial(run.forward, run.given()[0])))
        timed(at, "recompute", partial(buffers[at].after, kept[at]))
    for at in range(len(runs)):
        timed(at, "recompute", partial(made.__delitem__, 0))
    for at, run in enumerate(runs):
        made.append(timed(at, "recompute", partial(_recompute, run, run.given()[0], buffers[at], kept[at])))
    last_first = range(len(runs))[::-1]
    for at in last_first:
        timed(at, "backward", partial(run_backward, *roots_of(made.pop())))
    if parts:
        given, leaves = zip(*(run.given() for run in runs), strict=True)
        made += map(LayerRun.forward, runs, given)
        late = [timed(at, "inputs", partial(backward_input, *roots_of(made.pop()), leaves[at])) for at in last_first]
        for at, waiting in zip(last_first, late, strict=True):
            timed(at, "weights", partial(backward_weight, waiting))
    return [LayerSeconds(**each) for each in took]


def _recompute(run: LayerRun, given: Values, buffers: Buffers, before: SavedBuffers) -> Values:
    with buffers.as_before(before):
        return run.forward(given)


def measure_host(device: torch.device) -> float:
    """Bytes a second to where a rank on such a device puts what it offloads, and as many back."""
    stream = DeviceStream(device) if queues(device) else RankStream(device)
    host, inside = host_of(stream), OffloadedActivations()
    with inside.watched(), torch.enable_grad():
        kept = torch.zeros(MOVED_NUMBERS, device=device, requires_grad=True).exp().exp()
    start = _now(device)
    host.offload(Action(Kind.OFFLOAD, 0, 0), inside)
    host.finish()
    host.fetch(Action(Kind.FETCH, 0, 0), inside)
    host.finish()
    took = _now(device) - start
    host.close()
    return 2 * MOVED_NUMBERS * kept.itemsize / took


MOVED_NUMBERS = 2**23


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


class _Likeness(pickle.Pickler):
    """Writes tensors by how they are laid out, and which of their storages are kept; types and functions as such."""

    def __init__(self, file: BytesIO, kept: Collection[int], essence: Essence) -> None:
        super().__init__(file)
        self._kept, self._own, self._shared = kept, essence.own, essence.shared
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: object) -> str | None:
        """What is written for such an object; None for others, of which all that they hold is written."""
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
            raise pickle.PicklingError("it cannot be told what it does")
        return None


def likeness(what: object, kept: Collection[int] = ()) -> bytes | None:
    """The same for layers, and what they take, of which all is alike but numbers in tensors; None: it is not known.

    All attributes are compared: that a layer prints like another is not enough. Of storages that are `kept`, by their
    identities, it matters that they are.

    >>> likeness(nn.Linear(2, 3)) == likeness(nn.Linear(2, 3)) != likeness(nn.Linear(2, 3, bias=False))
    True
    """
    found = BytesIO()
    try:
        essence = what if isinstance(what, Essence) else Essence(what)
        _Likeness(found, kept, essence).dump(essence.what)
    except Exception:  # what cannot be pickled raises whatever it likes
        return None
    return found.getvalue()


def likeness_of(layer: nn.Module, value: Tree, kept: Collection[int] = ()) -> bytes | None:
    """The same for layers that cost the same on values: of a model's, by what runs in them."""
    return likeness(layer.essence(value) if isinstance(layer, SingleLayer) else (layer, value), kept)
