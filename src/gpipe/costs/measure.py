"""Measures what each layer costs on a sample: its seconds, or what the user's function says."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gpipe.costs.layer_run import LayerRun, backward_of, measure_each, roots_of
from gpipe.intra_op import intra_op_threads
from gpipe.plan.cost import BackwardCost
from gpipe.values.layout import moved
from gpipe.values.split_backward import backward_input, backward_weight
from gpipe.values.tree import Tree, replace_tensors

FEWEST, MOST, PATIENCE = 2, 7, 0.1
"""Timed runs of a layer, behind one that warms up, and seconds after which no more are begun; the median counts."""


@contextmanager
def as_in_training(device: torch.device, threads: int) -> Iterator[None]:
    """Has layers run as in training: grad mode, so many threads an operation; torch's generators are put back."""
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with intra_op_threads(threads), generators, torch.inference_mode(False), torch.enable_grad():
        yield


def measure_seconds(
    layers: Sequence[nn.Module], sample: Tree, device: torch.device, *, recomputes: bool
) -> list[float]:
    """Seconds of forward, recompute and backward of each layer on a sample micro-batch.

    Each layer is on `device` while it is measured.
    """
    times = measure_directions(layers, sample, device)
    return [(2 * forward if recomputes else forward) + backward for forward, backward in times]


def measure_directions(layers: Sequence[nn.Module], sample: Tree, device: torch.device) -> list[tuple[float, float]]:
    """Seconds of the forward and of the backward of each layer on a sample micro-batch: those of the median run.

    Each layer is on `device` while it is measured.
    """

    def seconds(run: LayerRun) -> tuple[float, float]:
        run.layer.to(device)
        run.warm_up()
        rounds: list[tuple[float, float]] = []
        end = time.perf_counter() + PATIENCE
        while len(rounds) < FEWEST or (len(rounds) < MOST and time.perf_counter() < end):
            rounds.append(_seconds(run, device))
        return sorted(rounds, key=sum)[(len(rounds) - 1) // 2]

    return measure_each(layers, replace_tensors(sample, lambda tensor: moved(tensor, device)), seconds)


def measure_backwards(layers: Sequence[nn.Module], sample: Tree, device: torch.device) -> list[BackwardCost]:
    """Seconds of the backward of each layer on a sample micro-batch: whole, and in its two parts."""

    def seconds(run: LayerRun) -> BackwardCost:
        run.layer.to(device)
        run.warm_up()
        return BackwardCost(*(sorted(some)[len(some) // 2] for some in zip(*_rounds(run), strict=True)))

    def _rounds(run: LayerRun) -> list[tuple[float, float, float]]:
        end = time.perf_counter() + PATIENCE
        rounds: list[tuple[float, float, float]] = []
        while len(rounds) < FEWEST + 1 or (len(rounds) < MOST and time.perf_counter() < end):
            rounds.append((_backward_seconds(run, device), *_parts_seconds(run, device)))
        return rounds[1:]  # the first split warms up

    return measure_each(layers, replace_tensors(sample, lambda tensor: moved(tensor, device)), seconds)


def _backward_seconds(run: LayerRun, device: torch.device) -> float:
    with run.keyed():
        backward = backward_of(run.forward(run.given()))
    start = _now(device)
    backward()
    return _now(device) - start


def _parts_seconds(run: LayerRun, device: torch.device) -> tuple[float, float]:
    leaves, given = run.given_with_leaves()
    with run.keyed():
        roots, gradients = roots_of(run.forward(given))
    start = _now(device)
    deferred = backward_input(roots, gradients, leaves)
    between = _now(device)
    backward_weight(deferred)
    return between - start, _now(device) - between


def measure_by(layers: Sequence[nn.Module], sample: Tree, cost: Callable[[nn.Module, Tree], float]) -> list[float]:
    """The user's cost of each layer, given the layer and what it takes of a sample micro-batch."""
    return measure_each(layers, sample, lambda run: float(cost(run.layer, run.given()[0])))


def _seconds(run: LayerRun, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    given = run.given()
    start = _now(device)
    with run.keyed():
        output = run.forward(given)
    forward = _now(device) - start
    backward = backward_of(output)
    start = _now(device)
    backward()
    return forward, _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
