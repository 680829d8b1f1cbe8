"""Randomness is a function of (seed, step, layer, micro-batch), and of nothing else."""

import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import gpipe
from tests.laws import REMATS, assert_same_bits, plain_loop, same_bits

Op = OpOverload[..., Any]

NUMBERS: dict[str, object] = {
    "p": 0.5, "train": True, "training": True, "size": [4, 6], "n": 24, "low": 3, "high": 1000, "from": 3, "to": 1000,
    "num_samples": 5, "replacement": True, "mean": 0.5, "std": 2.0, "lower": 0.1, "upper": 0.3, "lambd": 1.5,
    "median": 0.0, "sigma": 1.5, "dropout_p": 0.5, "dropout": 0.5, "is_causal": False, "generator": None,
    "has_biases": True, "num_layers": 2, "bidirectional": False, "batch_first": True,
}  # fmt: skip


def tagged() -> Iterator[Op]:
    """All operations of torch that say of themselves that they draw."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name[6:].partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags:
                yield op


def arguments(op: Op) -> dict[str, object]:
    """Simple arguments for an operation, the same whenever asked for."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str) -> Tensor:
        match op._schema.name.removeprefix("aten::").split("_")[0], name:
            case "randperm", _:
                return torch.zeros(24, dtype=torch.int64)
            case "multinomial", "out":
                return torch.zeros(4, 5, dtype=torch.int64)
            case "random" | "randint", _:
                return torch.tensor(1000) if name == "high" else torch.zeros(4, 6, dtype=torch.int64)
            case ("rnn" | "gru" | "lstm"), "batch_sizes":
                return torch.full((7,), 2)
            case ("rnn" | "gru" | "lstm"), "data":
                return torch.rand(14, 3, generator=generator)
            case ("rnn" | "gru" | "lstm"), _:
                return torch.rand(2, 7, 3, generator=generator)
            case ("feature", _) | (_, "query" | "key" | "value"):
                return torch.rand(2, 3, 5, 4, generator=generator)
            case "binomial", "count":
                return torch.full((4, 6), 10.0)
            case "native", "out1":
                return torch.zeros(4, 6, dtype=torch.bool)
            case "rrelu", _:
                return -torch.rand(4, 6, generator=generator)
        return torch.rand(4, 6, generator=generator)

    def argument(name: str, kind: str) -> object:
        if name in ("hx", "params"):
            return recurrent(op, generator)[name]
        return NUMBERS[name] if name in NUMBERS and kind != "Tensor" else tensor(name)

    needed = [a for a in op._schema.arguments if not a.has_default_value() or a.name in NUMBERS]
    return {a.name: argument(a.name, str(a.type)) for a in needed}


def recurrent(op: Op, generator: torch.Generator) -> dict[str, object]:
    """State and weights of two recurrent layers, so that there is dropout between them."""
    gates = {"aten::lstm": 4, "aten::gru": 3}.get(op._schema.name, 1) * 3
    shapes = [(gates, 3), (gates, 3), (gates,), (gates,)] * 2
    state = torch.rand(2, 2, 3, generator=generator)
    return {
        "hx": [state, state.clone()] if op._schema.name == "aten::lstm" else state,
        "params": [torch.rand(shape, generator=generator) for shape in shapes],
    }


def drawn(op: Op) -> list[Tensor]:
    """What an operation gives and leaves in its arguments."""
    given = arguments(op)
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    keywords = {name: value for name, value in given.items() if name not in positional}
    found = op(*(given[name] for name in positional), **keywords)
    return [leaf.clone() for leaf in pytree.tree_leaves((found, given)) if isinstance(leaf, Tensor)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(same_bits, one, other))


@cache
def drawing_ops() -> dict[str, Op]:
    """The tagged operations that this CPU can do, and that draw with these arguments."""
    found = {}
    with torch.random.fork_rng(devices=[]):
        for op in tagged():
            try:
                torch.manual_seed(0)
                first = drawn(op)
                torch.manual_seed(1)
                if not equal(first, drawn(op)):
                    found[str(op)] = op
            except (RuntimeError, NotImplementedError, AttributeError):
                continue  # of another device
    return found
