"""Whatever flows between layers, a cut anywhere changes no bit."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import Tree, assert_same_bits, plain_call, plain_loop, same_bits, squares, weights_of

M = 3
KINDS = pytest.mark.parametrize(("driver", "remat"), [("lockstep", "never"), ("threads", "always")])
WAYS = pytest.mark.parametrize("way", ["step", "call"])


class Do(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Pair(NamedTuple):
    """A tuple with names."""

    main: Tensor
    side: Tensor


def linears(count: int, width: int = 6, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(width, width, dtype=dtype) for _ in range(count)]


def sandwich(*between: Callable[..., Any]) -> Callable[[], list[nn.Module]]:
    """A linear layer, then what is given, then another."""

    def build() -> list[nn.Module]:
        first, last = linears(2)
        return [first, *map(Do, between), last]

    return build


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "a tuple": sandwich(lambda x: (x, x.tanh()), lambda v: (v[1], v[0].exp()), lambda v: v[0] * v[1]),
    "a named tuple": sandwich(
        lambda x: Pair(x, x.tanh()), lambda v: Pair(v.side, v.main.exp()), lambda v: v.main * v.side
    ),
    "a dict": sandwich(lambda x: {"b": x, "a": x.tanh()}, lambda v: {"a": v["a"] * v["b"]}, lambda v: v["a"]),
    "a tree": sandwich(lambda x: [{"k": (x, [x.sin()])}, ()], lambda v: v, lambda v: v[0]["k"][0] * v[0]["k"][1][0]),
    "no tensors at all": sandwich(
        lambda x: (x, None, 3, True, "three", 0.5, torch.float32),
        lambda v: (v[0] * v[2] if v[3] and v[1] is None and v[4] == "three" else None, *v[1:]),
        lambda v: (v[0] * v[5]).to(v[6]),
    ),
    "integers and bools": sandwich(
        lambda x: (x, x.argmax(1), x > 0), lambda v: (v[0], v[1] + 1, ~v[2]), lambda v: v[0] * v[1][:, None] * v[2]
    ),
    "bfloat16": lambda: [Do(lambda x: x.bfloat16()), *linears(3, dtype=torch.bfloat16), Do(lambda x: x.float())],
    "float64": lambda: [Do(lambda x: x.double()), *linears(3, dtype=torch.float64), Do(lambda x: x.float())],
    "complex": sandwich(lambda x: torch.complex(x, x.tanh()), lambda x: x * x.conj() * (1 + 2j), lambda x: x.abs()),
    "several dtypes": sandwich(
        lambda x: (x, x.double(), x.bfloat16()), lambda v: v[::-1], lambda v: v[2] + v[1].float() * v[0]
    ),
    "views": sandwich(lambda x: x.chunk(2, 1), lambda v: (v[1].sigmoid(), v[0]), lambda v: torch.cat(v, 1)),
    "overlapping views": sandwich(
        lambda x: (x, x[:, 1:5], x[:1]), lambda v: (v[0], v[1].sum(1), v[2]), lambda v: v[0] * v[1][:, None] + v[2]
    ),
    "columns": sandwich(lambda x: x.repeat(1, 2)[:, ::2], nn.functional.gelu, lambda x: x + x.sum()),
    "transposed": sandwich(lambda x: x.t().contiguous().t(), nn.functional.silu, lambda x: x.t().cumsum(0).t()),
    "expanded": sandwich(
        lambda x: x[:, :1].expand(-1, 6), nn.functional.silu, lambda x: x.sum(1, keepdim=True).expand(-1, 6)
    ),
    "permuted": sandwich(
        lambda x: x.reshape(-1, 2, 3).permute(2, 0, 1), nn.functional.silu, lambda x: x.permute(1, 2, 0).flatten(1)
    ),
    "a gradient that is expanded": sandwich(
        nn.functional.silu, lambda x: (x, x.sum(1)), lambda v: v[0] * v[1][:, None]
    ),
    "the same tensor twice": sandwich(lambda x: (x, x), lambda v: (v[0].exp(), v[1]), lambda v: v[0] * v[1] + v[1]),
    "the same tensor thrice": sandwich(lambda x: [x] * 3, lambda v: v[0] * 1.1 + v[1].exp() * v[2]),
    "a tensor and a view of all of it": sandwich(
        lambda x: (x, x.view_as(x)), lambda v: v[0] * 1.1 + v[1].exp() * v[0]
    ),
    "what needs no gradient": sandwich(
        lambda x: (x, x.detach()), lambda v: (v[0], v[1] * 2), lambda v: (v[0] * v[1], None), lambda v: v[0]
    ),
    "nothing that needs a gradient": lambda: [
        Do(lambda x: x * 2),
        Do(lambda x: (x, x + 1)),
        Do(lambda v: v[0] * v[1]),
        *linears(2),
    ],
    "a dead end": sandwich(lambda x: (x, x.exp()), lambda v: (v[0] * 2, v[1]), lambda v: v[0]),
    "an end that is dead from its start": sandwich(lambda x: (x.detach(), x), lambda v: v[0]),
    "empty tensors": sandwich(
        lambda x: (x, x[:0], x[:, :0], torch.empty(0)),
        lambda v: (v[0], v[1] * 2, v[2].exp()),
        lambda v: v[0] + v[1].sum() + v[2].sum(),
    ),
    "without dimensions": sandwich(lambda x: (x, x.mean(), 2), lambda v: (v[0], v[1] * v[2]), lambda v: v[0] * v[1]),
    "a layer that does nothing": sandwich(lambda x: x, lambda x: x),
    "a parameter": lambda: [*linears(1), Bare(), Do(lambda v: v[0] @ v[1]), *linears(1)],
}


class Bare(nn.Module):
    """Hands its own parameter on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).reshape(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight


def check(
    build: Callable[[], list[nn.Module]],
    batches: Sequence[tuple[Tree, Tensor]],
    *,
    way: str,
    driver: str,
    remat: str,
    partitions: int | None = None,
    micro_batches: int = M,
    inputs: Callable[[Tree], Tree] = lambda given: given,
) -> None:
    """Cuts a model behind every layer, and compares some steps of training with the plain loop."""
    layers, reference = build(), build()
    plain = plain_loop if way == "step" else plain_call
    cuts = partitions or len(layers)
    with gpipe.GPipe(layers, cuts, micro_batches, driver=driver, remat=remat, seed=4) as pipe:
        for step, (given, target) in enumerate(batches):
            if way == "step":
                loss = pipe.step(inputs(given), target, squares)
            else:
                loss = squares(pipe(inputs(given)), target)
                loss.backward()
            expected = plain(reference, given, target, squares, micro_batches=micro_batches, seed=4, step=step)
            assert same_bits(loss, expected)
            assert_same_bits(pipe, reference)
            for module in (pipe, nn.Sequential(*reference)):
                torch.optim.SGD(module.parameters(), lr=0.1).step()
                module.zero_grad()


X, Y = torch.randn(7, 6), torch.randn(7, 6)


@pytest.mark.parametrize("model", MODELS)
@WAYS
@KINDS
def test_any_value_may_cross(model: str, way: str, driver: str, remat: str) -> None:
    check(MODELS[model], [(X, Y), (X + 1, Y), (X[:5], Y[:5])], way=way, driver=driver, remat=remat)


@WAYS
@KINDS
def test_each_layer_sees_tensors_as_the_plain_layers_do(way: str, driver: str, remat: str) -> None:
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def forward(self, value: Any) -> Any:
            leaves = torch.utils._pytree.tree_leaves(value)
            self.seen.append([(t.requires_grad, t.stride(), t.dtype, t.shape) for t in leaves])
            return value

    def build() -> list[nn.Module]:
        frozen, first, last = linears(3)
        frozen.requires_grad_(False)
        fork = Do(lambda x: {"y": x, "n": x.argmax(1), "d": x.detach()})
        return [
            Look(), frozen, Look(), first, fork, Look(), Do(lambda v: (v["y"][:, ::2], v["d"])), Look(),
            Do(lambda v: v[0].repeat(1, 2) + v[1]), Look(), last,
        ]  # fmt: skip

    layers, reference = build(), build()
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    with gpipe.GPipe(layers, len(layers), M, driver=driver, remat=remat, seed=4) as pipe:
        if way == "step":
            pipe.step(X, Y, squares)
        else:
            squares(pipe(X), Y).backward()
    for layer, other in zip(layers, reference, strict=True):
        if isinstance(layer, Look) and isinstance(other, Look):
            assert layer.seen == other.seen * (2 if remat == "always" else 1)


@WAYS
@KINDS
def test_a_whole_tensor_comes_to_every_micro_batch(way: str, driver: str, remat: str) -> None:
    table = torch.linspace(0, 1, 12).reshape(2, 6)

    def unwrapped(value: Any) -> Any:
        x, whole = value
        return x, whole.tensor if isinstance(whole, gpipe.Whole) else whole

    def build() -> list[nn.Module]:
        first, last = linears(2)
        return [Do(unwrapped), Do(lambda v: v), Do(lambda v: v[0] * v[1].sum(0)), first, last]

    given = (X, gpipe.Whole(table))
    check(build, [(given, Y), (given, Y)], way=way, driver=driver, remat=remat)


def test_a_target_may_be_whole_and_a_tree() -> None:
    seen = []

    def loss_fn(output: Any, target: Any) -> Tensor:
        seen.append((target["y"].shape, target["table"].shape, target["n"]))
        scale: Tensor = target["scale"]
        return squares(output, target["y"]) * scale

    target = {"y": Y, "table": gpipe.Whole(torch.ones(2, 2)), "scale": torch.tensor(0.5), "n": 3}
    gpipe.GPipe(linears(2), 2, M, driver="lockstep", remat="never").step(X, target, loss_fn)
    assert [(shape[0], table, n) for shape, table, n in seen] == [(r, (2, 2), 3) for r in (3, 2, 2)]


class Recurrent(nn.Module):
    """Works on sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out


def recurrent() -> list[nn.Module]:
    with weights_of(1):
        return [
            nn.Linear(6, 6),
            nn.ReLU(inplace=True),
            Recurrent(),
            nn.Dropout(0.3),
            Recurrent(),
            Do(lambda x: x[:, -1]),
        ]


@WAYS
@KINDS
def test_sequences_and_batches_may_change_from_step_to_step(way: str, driver: str, remat: str) -> None:
    sizes = [(7, 5), (7, 2), (3, 9), (1, 1), (8, 5), (2, 4)]
    batches = [(torch.randn(rows, length, 6), torch.randn(rows, 6)) for rows, length in sizes]
    check(recurrent, batches, way=way, driver=driver, remat=remat, micro_batches=4)


def replace_x(values: Any) -> Any:
    values["x"] = values["x"].exp() + len(values["n"])
    values["n"].append(None)
    return values


IN_PLACE: dict[str, Callable[[], list[nn.Module]]] = {
    "relu": lambda: [m for linear in linears(4) for m in (linear, nn.LayerNorm(6), nn.ReLU(inplace=True))][:-1],
    "dropout": lambda: [m for linear in linears(3) for m in (linear, nn.Dropout(0.4, inplace=True))][:-1],
    "one after the other": lambda: [
        *linears(1),
        *(nn.SiLU(inplace=True) for _ in range(2)),
        nn.Dropout(0.2, inplace=True),
        *linears(2),
    ],
    "first": lambda: [nn.ReLU(inplace=True), *linears(2), Do(lambda x: x.mul_(2)), *linears(3)[2:]],
    "last": lambda: [*linears(2), nn.ReLU(inplace=True)],
    "on a view": sandwich(lambda x: x.tanh() * 1, lambda x: x[:, 2:].mul_(3).sum(1, keepdim=True) + x),
    "on one of several": sandwich(lambda x: (x * 1, x * 2), lambda v: (v[0].add_(v[1]), v[1]), lambda v: v[0] * v[1]),
    "on a tensor in a dict": sandwich(lambda x: {"x": x * 1}, lambda v: v | {"x": v["x"].add_(1)}, lambda v: v["x"]),
    "on a dict": sandwich(lambda x: {"x": x * 1, "n": []}, replace_x, replace_x, lambda v: v.pop("x")),
    "on integers": sandwich(
        lambda x: (x, x.argmax(1)), lambda v: (v[0], v[1].add_(1)), lambda v: v[0] * v[1][:, None]
    ),
    "behind views": sandwich(
        lambda x: x * 1, lambda x: x.view(-1, 2, 3), lambda x: x.flatten(1).mul_(2), lambda x: x.exp()
    ),
    "on columns": sandwich(
        lambda x: x.repeat(1, 2)[:, ::2], lambda x: nn.functional.silu(x, inplace=True), lambda x: x + x.sum()
    ),
}


@pytest.mark.parametrize("model", IN_PLACE)
@pytest.mark.parametrize("partitions", [None, 2])
@WAYS
@KINDS
def test_a_layer_behind_any_cut_may_work_in_place(
    model: str, partitions: int | None, way: str, driver: str, remat: str
) -> None:
    x, y = X.clone(), Y.clone()
    check(IN_PLACE[model], [(x, y), (x, y)], way=way, driver=driver, remat=remat, partitions=partitions)
    assert same_bits(x, X)  # what the user gave is the user's


@pytest.mark.parametrize("before", ["eval", "no_grad", "inference_mode", "frozen"])
@KINDS
def test_what_works_in_place_is_found_whatever_ran_before(before: str, driver: str, remat: str) -> None:
    def build() -> list[nn.Module]:
        return [m for linear in linears(3) for m in (linear, nn.Dropout(0.4, inplace=True))][:-1]

    reference = build()
    with gpipe.GPipe(build(), 5, M, driver=driver, remat=remat, seed=4) as pipe:
        match before:
            case "eval":
                pipe.eval().step(X, Y, squares)
            case "no_grad" | "inference_mode":
                with getattr(torch, before)():
                    pipe.eval()(X)
                    pipe.train()(X)
            case "frozen":
                pipe.requires_grad_(False)(X)
        pipe.train().requires_grad_(True).zero_grad()
        pipe.step_number = 0
        for step in range(2):
            pipe.step(X, Y, squares)
            plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=step)
        assert_same_bits(pipe, reference)


@KINDS
def test_a_layer_that_begins_to_work_in_place_is_never_silently_wrong(driver: str, remat: str) -> None:
    class Turns(nn.Module):
        in_place = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if self.in_place else x * 2

    reference = [*linears(1), Turns(), *linears(2)]
    with gpipe.GPipe(copy.deepcopy(reference), 4, M, driver=driver, remat=remat, seed=4) as pipe:
        pipe.step(X, Y, squares)
        for layers in (reference, list(pipe.children())):
            turns = layers[1]
            assert isinstance(turns, Turns)
            turns.in_place = True
        with pytest.raises(RuntimeError, match=r"in-place|in place"):
            pipe.step(X, Y, squares)
        pipe.zero_grad()
        pipe.step_number = 0
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
        assert_same_bits(pipe, reference)


def test_a_value_that_changes_its_kind_from_micro_batch_to_micro_batch_may_flow_but_not_be_merged() -> None:
    def odd(x: Tensor) -> Any:
        return (x, x) if len(x) == 3 else x

    def even(value: Any) -> Tensor:
        out: Tensor = torch.add(*value) if isinstance(value, tuple) else value * 2
        return out

    for way in ("step", "call"):
        check(sandwich(odd, even), [(X, Y)], way=way, driver="threads", remat="always")
    with pytest.raises(TypeError, match="differ in structure; return the same structure for each"):
        gpipe.GPipe([*linears(1), Do(odd)], 2, M, driver="lockstep")(X)
