"""Measures what each layer costs on a sample: its seconds, or what the user's function says."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gpipe.costs.layer_run import LayerRun, backward_of, measure_each
from gpipe.intra_op import intra_op_threads
from gpipe.values.layout import moved
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

    def seconds(run: LayerRun) -> float:
        run.layer.to(device)
        run.warm_up()
        rounds: list[float] = []
        end = time.perf_counter() + PATIENCE
        while len(rounds) < FEWEST or (len(rounds) < MOST and time.perf_counter() < end):
            rounds.append(_seconds(run, device, recomputes=recomputes))
        return sorted(rounds)[(len(rounds) - 1) // 2]

    return measure_each(layers, replace_tensors(sample, lambda tensor: moved(tensor, device)), seconds)


def measure_by(layers: Sequence[nn.Module], sample: Tree, cost: Callable[[nn.Module, Tree], float]) -> list[float]:
    """The user's cost of each layer, given the layer and what it takes of a sample micro-batch."""
    return measure_each(layers, sample, lambda run: float(cost(run.layer, run.given()[0])))


def _seconds(run: LayerRun, device: torch.device, *, recomputes: bool) -> float:
    """Seconds of a forward, a recompute if there will be one, and a backward."""
    given = run.given()
    start = _now(device)
    with run.keyed():
        output = run.forward(given)
    forward = _now(device) - start
    backward = backward_of(output)
    start = _now(device)
    backward()
    return (2 * forward if recomputes else forward) + _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
