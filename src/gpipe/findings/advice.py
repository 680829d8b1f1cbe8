"""Looks a pipe over before the first step: what will cost time or numbers, and what to do about it."""

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe.build.settings import Settings
from gpipe.findings.kept import mentions_random
from gpipe.plan.timeline import bubble

FEW_ROWS = 8  # per micro-batch: below it the statistics of a BatchNorm are mostly noise
DWARFS = 1.5  # a partition this many times the mean sets the pace for all
UNKEYED = (
    "such draws are not keyed: they depend on what was drawn before, and the recompute of a forward draws others, so "
    "that its gradients are wrong; draw by torch's functions, without a generator"
)

Draws: TypeAlias = Mapping[str, object]
"""How far the generators of Python and numpy are, by the name of their module."""


def examine(settings: Settings) -> list[str]:
    """What can be said of a pipe before it has run."""
    return [*_bubble(settings), *_empty_partitions(settings), *_giants(settings), *_own_generators(settings)]


def _bubble(settings: Settings) -> Iterator[str]:
    k, m = len(settings.layers_per_partition), settings.micro_batches
    if k > 1 and m < 4 * k:
        yield (
            f"M={m} micro-batches for K={k} partitions leave a bubble of {bubble(k, m):.0%}; with M={4 * k}, four "
            f"times K, it would be {bubble(k, 4 * k):.0%}"
        )


def _empty_partitions(settings: Settings) -> Iterator[str]:
    for stage, layers in enumerate(partitions(settings)):
        if not any(True for name in layers for _ in settings.layers[name].parameters()):
            yield (
                f"partition {stage} has no parameters; an optimizer over it alone would be refused, and it does "
                f"little work: give costs, or join its layers to a neighbour by partitions=[...]"
            )


def _giants(settings: Settings) -> Iterator[str]:
    names = list(settings.layers)
    cost = dict(zip(names, settings.costs, strict=True))
    shares = [sum(cost[name] for name in layers) for layers in partitions(settings)]
    mean = sum(shares) / len(shares)
    for stage, share in enumerate(shares):
        if mean and share > DWARFS * mean:
            largest = max(partitions(settings)[stage], key=cost.__getitem__)
            yield (
                f"partition {stage} costs {share / mean:.1f} times the mean, so the others wait for it; its largest "
                f"layer is {largest} with {cost[largest] / share:.0%} of it: cut that layer finer, use fewer "
                f"partitions, or give measured costs"
            )


def _own_generators(settings: Settings) -> Iterator[str]:
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    for name, layer in settings.layers.items():
        for path, module in layer.named_modules(prefix=name):
            for attribute, value in vars(module).items():
                if isinstance(value, kinds):
                    yield f"{path}.{attribute} is a random generator of its own: {UNKEYED}"


def draws(told: Collection[str] = ()) -> Draws:
    """How far the generators are that no key reaches, but for those of which all is told; compared behind a step."""
    readers: dict[str, Callable[[], object]] = {
        "random": random.getstate,
        "numpy.random": lambda: _words(np.random.get_state(legacy=False)),
    }
    return {name: read() for name, read in readers.items() if name not in told}


def _words(state: object) -> object:
    """A state of numpy's as something that can be compared: an array cannot."""
    if isinstance(state, Mapping):
        return {name: _words(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def examine_draws(layers: Mapping[str, nn.Module], before: Draws, after: Draws, step: int) -> dict[str, str]:
    """What can be said, by module, if somebody drew from Python's or numpy's generator in a step."""
    drawn = [name for name, state in after.items() if state != before[name]]
    if not drawn:
        return {}
    mention = [words for words, layer in layers.items() if any(map(mentions_random, layer.modules()))]
    elsewhere = ", or in another thread" if _other_threads() else ""
    where = f"perhaps in {', '.join(mention) or 'a layer or loss_fn'}{elsewhere}"
    return {name: f"something was drawn by the module {name} in step {step}, {where}: {UNKEYED}" for name in drawn}


def _other_threads() -> bool:
    """Whether there are threads that are neither this one nor a pipe's."""
    threads = set(threading.enumerate()) - {threading.current_thread()}
    return any(not thread.name.startswith("gpipe") for thread in threads)


def examine_rows(layers: Sequence[nn.Module], rows: int, deferred: bool) -> list[str]:
    """What can be said once the rows of a micro-batch are known."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, _BatchNorm) and m.training]
    if not norms or rows >= FEW_ROWS:
        return []
    remedy = "" if deferred else ", and deferred_batch_norm=True for running statistics of the whole mini-batch"
    return [
        f"BatchNorm normalizes micro-batches of {rows} rows, too few for good statistics; use fewer micro-batches or "
        f"a larger mini-batch{remedy}"
    ]


def examine_gradients(module: nn.Module) -> list[str]:
    """What can be said after the first backward."""
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return []
    return [
        f"{', '.join(unused)}: no gradient came to these parameters in the first step; take them out of the "
        f"optimizer, or freeze them with requires_grad_(False), if that is meant"
    ]


def partitions(settings: Settings) -> list[list[str]]:
    """The names of the layers of each partition."""
    names = iter(settings.layers)
    return [[next(names) for _ in range(count)] for count in settings.layers_per_partition]
