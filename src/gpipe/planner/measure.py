"""Measures what each layer costs on a sample: its seconds, or what the user's function says.

Layers run one after another, and nothing of it remains: gradients, buffers and other attributes of the layers and
the devices they are on are as before.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from gpipe._torch.modes import intra_op_threads
from gpipe.runtime.split_backward import backward_input, backward_weight
from gpipe.schedule.cost import LayerSeconds
from gpipe.stages.boundary import Gradients, detach_boundary, run_backward
from gpipe.stages.buffers import untouched
from gpipe.stages.layout import copy_of, moved
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import skip_names, unpack_stashes
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

T = TypeVar("T")
LayerInput: TypeAlias = tuple[Tree, dict[str, Tensor | None]]
"""What a layer takes of the main line, and what it pops."""
LayerOutput: TypeAlias = tuple[Tree, Mapping[str, Tensor | None]]
"""What a layer returns, and what it stashes."""

FEWEST_ROUNDS, MOST_ROUNDS, PATIENCE_SECONDS = 2, 15, 0.1
"""Rounds in which all layers are timed, behind one that warms up, and seconds for each layer after which no more are
begun."""


def measure_each(
    layers: Sequence[nn.Module], sample: Tree, measure: Callable[["LayerRun"], T], where: str = ""
) -> list[T]:
    """Measures each layer on what the layers before it make of the sample."""
    numbers: list[T] = []
    value: Tree = sample
    held: dict[str, Tensor | None] = {}
    for index, layer in enumerate(layers):
        run = LayerRun(index, layer, value, {name: held[name] for name in skip_names(layer, "pop")})
        try:
            with untouched(layer):
                numbers.append(measure(run))
                value, stashed = run.output()
        except Exception as error:
            error.add_note(run.what + where)
            raise
        held |= stashed
    return numbers


@contextmanager
def warmed_up(layers: Sequence[nn.Module], sample: Tree) -> Iterator[list["LayerRun"]]:
    """All layers, each run once, to be run again on what the layers before it made of the sample."""
    runs = measure_each(layers, sample, lambda run: run)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(untouched(run.layer))
        yield runs


@dataclass(eq=False)
class LayerRun:
    """Runs of one layer on what it takes of the main line and pops."""

    index: int
    layer: nn.Module
    value: Tree
    popped: Mapping[str, Tensor | None]
    _output: LayerOutput | None = None

    def __post_init__(self) -> None:
        self.call: Callable[..., object] = self.layer

    @property
    def what(self) -> str:
        """What is done with it, for an exception."""
        return f"while layer {self.index} ({type(self.layer).__name__}) was run on the sample, for its cost"

    def given(self) -> LayerInput:
        """What the layer takes, for it to keep: it may work in place."""
        return self.given_with_leaves()[1]

    def given_with_leaves(self) -> tuple[list[Tensor], LayerInput]:
        """The same, behind the leaves to which its gradients come."""
        leaves: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            """A tensor that wants a gradient if the other does; no leaf, so that it may be changed in place."""
            leaves.append(tensor.detach().requires_grad_(tensor.requires_grad))
            return copy_of(leaves[-1])

        popped = {name: None if tensor is None else copy(tensor) for name, tensor in self.popped.items()}
        value = replace_tensors(self.value, copy)
        return [leaf for leaf in leaves if leaf.requires_grad], (value, popped)

    def rng_scope(self) -> rng_scope:
        """The randomness of the layer, the same in every run."""
        return rng_scope(0, 0, self.index, 0)

    def forward(self, given: LayerInput) -> LayerOutput:
        """Runs the layer on what it is given; gives what it returns, and what it stashes."""
        result = self.call(given[0], **given[1])
        stash = skip_names(self.layer, "stash")
        return unpack_stashes(result, stash) if stash else (result, {})

    def warm_up(self) -> None:
        """Runs the layer for the first time."""
        with self.rng_scope():
            output = self.forward(self.given())
        stashed = {name: detach_boundary(tensor)[0].stashed for name, tensor in output[1].items()}
        self._output = detach_boundary(output[0])[0].value, stashed
        backward_of(output)()

    def output(self) -> LayerOutput:
        """What later layers take, cut from its graph."""
        if self._output is None:
            self.warm_up()
        assert self._output is not None
        return self._output


def backward_of(output: LayerOutput) -> Callable[[], None]:
    """The backward of what a layer returned and stashed, to be called."""
    return partial(run_backward, *roots_of(output))


def roots_of(output: LayerOutput) -> tuple[list[Tensor], Gradients]:
    """What of the output of a layer a backward starts at, and a gradient for each."""
    roots = [t for t in (*tensors_in(output[0]), *output[1].values()) if t is not None and t.requires_grad]
    return roots, [torch.ones_like(root) for root in roots]


@contextmanager
def as_in_training(device: torch.device, threads: int) -> Iterator[None]:
    """Has layers run as in training: grad mode, so many threads an operation; torch's generators are put back."""
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with intra_op_threads(threads), generators, torch.inference_mode(False), torch.enable_grad():
        yield


def measure_seconds(
    layers: Sequence[nn.Module], sample: Tree, device: torch.device, *, at_once: int = 1, parts: bool = False
) -> list[LayerSeconds]:
    """Seconds of the forward and of the backward of each layer on a sample micro-batch.

    A layer takes what it takes while the other ranks compute: on a CPU as many threads as there are ranks go round
    layers of their own, again and again, so that caches, the memory's bandwidth, the interpreter and the cores are
    shared as in training. On other devices a layer is measured by itself, and is on the device meanwhile.

    Args:
        layers: In order.
        sample: What the first takes.
        device: On which they run.
        at_once: How many ranks compute at once on this machine.
        parts: Whether the two parts of a backward are measured too.
    """
    once = partial(_seconds, device=device, parts=parts)
    on_device = replace_tensors(sample, lambda tensor: moved(tensor, device))
    if device.type != "cpu":  # which need not hold all layers

        def alone(run: LayerRun) -> LayerSeconds:
            run.layer.to(device)
            run.warm_up()
            return _typical(_Rounds([[run]], once).go(0))[0]

        return measure_each(layers, on_device, alone)
    with warmed_up(layers, on_device) as runs:
        groups = _in_groups(runs, at_once)
        return [found for rounds in _Rounds(groups, once).go_at_once() for found in _typical(rounds)]


def _in_groups(runs: Sequence[LayerRun], count: int) -> list[Sequence[LayerRun]]:
    """So many groups of consecutive layers at most, about as many layers in each."""
    count = min(count, len(runs))
    cuts = [len(runs) * at // count for at in range(count + 1)]
    return [runs[first:end] for first, end in pairwise(cuts)]


class _Rounds:
    """Groups of layers that are timed at once, round after round, until each group has been timed often enough."""

    def __init__(self, groups: Sequence[Sequence[LayerRun]], once: Callable[[LayerRun], LayerSeconds]) -> None:
        self.groups, self.once = groups, once
        self.found: list[deque[list[LayerSeconds]]] = [deque(maxlen=MOST_ROUNDS) for _ in groups]
        self.enough = [False] * len(groups)
        self.stopped = threading.Event()
        self.failures: list[BaseException] = []

    def go_at_once(self) -> list[deque[list[LayerSeconds]]]:
        """Times all groups, a thread for each, or the calling one for the only one."""
        if len(self.groups) == 1:
            return [self.go(0)]
        operations = torch.get_num_threads()
        threads = [threading.Thread(target=self._in_thread, args=(at, operations)) for at in range(len(self.groups))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self.stopped.set()
        if self.failures:
            raise self.failures[0]
        return self.found

    def _in_thread(self, at: int, operations: int) -> None:
        try:
            with intra_op_threads(operations):
                self.go(at)
        except BaseException as error:  # raised by the calling thread
            self.failures.append(error)
            self.stopped.set()

    def go(self, at: int) -> deque[list[LayerSeconds]]:
        """Times one group until all have been timed often enough: a round that ends later was not in company."""
        found, end = self.found[at], time.perf_counter() + PATIENCE_SECONDS * len(self.groups[at])
        while not self.stopped.is_set():
            one = [self._timed(run) for run in self.groups[at]]
            if not self.stopped.is_set():
                found.append(one)
            late = time.perf_counter() >= end
            self.enough[at] = len(found) >= (FEWEST_ROUNDS if late else MOST_ROUNDS)
            if all(self.enough):
                self.stopped.set()
        return found

    def _timed(self, run: LayerRun) -> LayerSeconds:
        try:
            return self.once(run)
        except Exception as error:
            error.add_note(run.what)
            raise


def _typical(rounds: Sequence[Sequence[LayerSeconds]]) -> list[LayerSeconds]:
    """Of each layer the median run, all in proportion so that they add up to the median round.

    What disturbs now one layer and now another is so part of the sum, but does not tell against a single layer.
    """
    middles = [_middle(each) for each in zip(*rounds, strict=True)]
    together = median(sum(map(_whole, each)) for each in rounds)
    scale = together / (sum(map(_whole, middles)) or 1.0)
    return [LayerSeconds(*(None if part is None else scale * part for part in each)) for each in middles]  # type: ignore[arg-type]  # the first two are never None


def _whole(layer: LayerSeconds) -> float:
    return layer.forward + layer.backward


def _middle(runs: Sequence[LayerSeconds]) -> LayerSeconds:
    """The median of forward and backward, and that of the parts."""
    at = (len(runs) - 1) // 2
    whole = sorted(runs, key=_whole)[at]
    if whole.inputs is None:
        return whole
    split = sorted(runs, key=lambda run: (run.inputs or 0.0) + (run.weights or 0.0))[at]
    return whole._replace(inputs=split.inputs, weights=split.weights)


def measure_by(layers: Sequence[nn.Module], sample: Tree, cost: Callable[[nn.Module, Tree], float]) -> list[float]:
    """The user's cost of each layer, given the layer and what it takes of a sample micro-batch."""
    return measure_each(layers, sample, lambda run: float(cost(run.layer, run.given()[0])))


def _seconds(run: LayerRun, device: torch.device, *, parts: bool) -> LayerSeconds:
    given = run.given()
    start = _now(device)
    with run.rng_scope():
        output = run.forward(given)
    forward = _now(device) - start
    backward = backward_of(output)
    start = _now(device)
    backward()
    whole = _now(device) - start
    return LayerSeconds(forward, whole, *(_parts(run, device) if parts else (None, None)))


def _parts(run: LayerRun, device: torch.device) -> tuple[float, float]:
    """Seconds of the backward's two parts."""
    leaves, given = run.given_with_leaves()
    with run.rng_scope():
        roots, gradients = roots_of(run.forward(given))
    start = _now(device)
    deferred = backward_input(roots, gradients, leaves)
    between = _now(device)
    backward_weight(deferred)
    return between - start, _now(device) - between


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def memory_of(device: torch.device) -> int:
    """The bytes that a device holds when it is empty; of a CPU, those of the machine.

    >>> memory_of(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
