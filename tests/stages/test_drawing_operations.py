"""Every operation of torch that draws, draws from the key of its scope, and from nothing else."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import gpipe
from gpipe.stages import rng
from gpipe.stages.rng import rng_seed
from tests.support.plain_loop import all_same_bits

Op = OpOverload[..., Any]

NUMBERS: dict[str, object] = {
    "p": 0.5, "train": True, "training": True, "size": [4, 6], "n": 24, "low": 3, "high": 1000, "from": 3, "to": 1000,
    "num_samples": 5, "replacement": True, "mean": 0.5, "std": 2.0, "lower": 0.1, "upper": 0.3, "lambd": 1.5,
    "median": 0.0, "sigma": 1.5, "dropout_p": 0.5, "dropout": 0.5, "is_causal": False, "generator": None,
    "has_biases": True, "num_layers": 2, "bidirectional": False, "batch_first": True,
}  # fmt: skip


def tagged() -> Iterator[Op]:
    """Returns all operations of torch that are tagged as random."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name[6:].partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags:
                yield op


def arguments(op: Op) -> dict[str, object]:
    """Returns simple arguments for an operation, the same in each call."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str) -> Tensor:
        match op._schema.name.removeprefix("aten::").split("_")[0], name:
            case "randperm", _:
                return torch.zeros(24, dtype=torch.int64)
            case "multinomial", "out":
                return torch.zeros(4, 5, dtype=torch.int64)
            case "random" | "randint", _:
                return torch.tensor(1000) if name == "high" else torch.zeros(4, 6, dtype=torch.int64)
            case (("rnn" | "gru" | "lstm"), "batch_sizes"):
                return torch.full((7,), 2)
            case (("rnn" | "gru" | "lstm"), "data"):
                return torch.rand(14, 3, generator=generator)
            case (("rnn" | "gru" | "lstm"), _):
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
    """Returns the state and weights of two recurrent layers, with dropout between them."""
    gates = {"aten::lstm": 4, "aten::gru": 3}.get(op._schema.name, 1) * 3
    shapes = [(gates, 3), (gates, 3), (gates,), (gates,)] * 2
    state = torch.rand(2, 2, 3, generator=generator)
    return {
        "hx": [state, state.clone()] if op._schema.name == "aten::lstm" else state,
        "params": [torch.rand(shape, generator=generator) for shape in shapes],
    }


def drawn(op: Op) -> list[Tensor]:
    """Returns the result of an operation and its arguments afterwards."""
    given = arguments(op)
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    keywords = {name: value for name, value in given.items() if name not in positional}
    found = op(*(given[name] for name in positional), **keywords)
    return [leaf.clone() for leaf in pytree.tree_leaves((found, given)) if isinstance(leaf, Tensor)]


@cache
def drawing_ops() -> dict[str, Op]:
    """Returns the tagged operations that run on this CPU and draw with these arguments."""
    found = {}
    with torch.random.fork_rng(devices=[]):
        for op in tagged():
            try:
                torch.manual_seed(0)
                first = drawn(op)
                torch.manual_seed(1)
                if not all_same_bits(first, drawn(op)):
                    found[str(op)] = op
            except (RuntimeError, NotImplementedError, AttributeError):
                continue  # of another device
    return found


def drawn_in_scope(op: Op, *key: int) -> list[Tensor]:
    with gpipe.rng_scope(*key):
        return drawn(op)


def test_most_operations_that_draw_are_looked_at() -> None:
    assert len(drawing_ops()) > 100
    packets = {op._schema.name for op in drawing_ops().values()}
    assert packets >= {
        f"aten::{name}" for name in ("dropout", "native_dropout", "rrelu", "multinomial", "lstm", "random_")
    }


def test_an_operation_draws_from_the_key_alone() -> None:
    for name, op in drawing_ops().items():
        state = torch.get_rng_state()
        first = drawn_in_scope(op, 1, 2, 3, 4)
        assert torch.equal(torch.get_rng_state(), state), name
        torch.rand(1)
        assert all_same_bits(drawn_in_scope(op, 1, 2, 3, 4), first), name
        for other in [(0, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (4, 3, 2, 1), (-1, 2, 3, 4)]:
            assert not all_same_bits(drawn_in_scope(op, *other), first), name


def test_an_operation_draws_what_torchs_generator_would_give_if_seeded_with_the_key() -> None:
    for name, op in drawing_ops().items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng_seed(1, 2, 3, 4))
            expected = [*drawn(op), *drawn(op)]
        with gpipe.rng_scope(1, 2, 3, 4):
            assert all_same_bits([*drawn(op), *drawn(op)], expected), name


def test_a_generator_of_the_users_own_is_left_alone() -> None:
    for name, op in drawing_ops().items():
        if "generator" not in arguments(op):
            continue
        given = {**arguments(op), "generator": torch.Generator().manual_seed(5)}
        outside = op(**given)
        given = {**arguments(op), "generator": torch.Generator().manual_seed(5)}
        with gpipe.rng_scope(0, 0, 0, 0):
            assert all_same_bits(pytree.tree_leaves(op(**given)), pytree.tree_leaves(outside)), name
            first = torch.rand(3)
        with gpipe.rng_scope(0, 0, 0, 0):
            assert torch.equal(torch.rand(3), first), name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_without_dropout_is_given_no_generator(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    """On a GPU a key's generator stands in for the default one, under a lock; where nothing is drawn none does."""
    asked = []

    def device_of(*_: object) -> torch.device:
        asked.append(1)
        return torch.device("cpu")

    monkeypatch.setattr(rng, "_device_of", device_of)
    x = torch.ones(1, 2, 4, 8)
    with gpipe.rng_scope(1, 2, 3, 4), pytest.raises(NotImplementedError):  # the CPU has no kernel of it
        torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, False, dropout)
    assert len(asked) == (dropout > 0)
