"""Tells of random numbers that no key of a visit reaches: a layer's own generators, Python's and numpy's."""

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from gpipe.findings.references import mentions_random

UNKEYED = (
    "such draws are not keyed: they depend on what was drawn before, and the recompute of a forward draws others, so "
    "that its gradients are wrong; draw by torch's functions, without a generator"
)

RandomStates: TypeAlias = Mapping[str, object]
"""The states of the generators of Python and numpy, by the name of their module."""


def find_own_generators(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Tells of generators that modules have as attributes."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    for name, layer in layers.items():
        for path, module in layer.named_modules(prefix=name):
            for attribute, value in vars(module).items():
                if isinstance(value, kinds):
                    yield f"{path}.{attribute} is a random generator of its own: {UNKEYED}"


def random_states(told: Collection[str] = ()) -> RandomStates:
    """The states of Python's and numpy's generators, but for those of which all is told; compared behind a step."""
    readers: dict[str, Callable[[], object]] = {
        "random": random.getstate,
        "numpy.random": lambda: _comparable(np.random.get_state(legacy=False)),
    }
    return {name: read() for name, read in readers.items() if name not in told}


def _comparable(state: object) -> object:
    """A state of numpy's as something that can be compared: an array cannot."""
    if isinstance(state, Mapping):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def find_unkeyed_draws(
    layers: Mapping[str, nn.Module], before: RandomStates, after: RandomStates, step: int
) -> dict[str, str]:
    """Tells, by module, that somebody drew from Python's or numpy's generator in a step."""
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
