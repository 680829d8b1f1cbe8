"""Randomness is a function of (seed, step, layer, micro-batch), and of nothing else."""

import copy
import multiprocessing
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
from torch.utils.flop_counter import FlopCounterMode

import gpipe
from gpipe.rng import random_ops
from gpipe.rng.visit import visit_key
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits

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


OPS = pytest.mark.parametrize("name", drawing_ops())


def visited(op: Op, *key: int) -> list[Tensor]:
    with gpipe.visit(*key):
        return drawn(op)


def test_most_operations_that_draw_are_looked_at() -> None:
    assert len(drawing_ops()) > 100
    packets = {op._schema.name for op in drawing_ops().values()}
    assert packets >= {
        f"aten::{name}" for name in ("dropout", "native_dropout", "rrelu", "multinomial", "lstm", "random_")
    }


@OPS
def test_an_operation_draws_from_the_key_alone(name: str) -> None:
    op = drawing_ops()[name]
    state = torch.get_rng_state()
    first = visited(op, 1, 2, 3, 4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert equal(visited(op, 1, 2, 3, 4), first)
    for other in [(0, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (4, 3, 2, 1), (-1, 2, 3, 4)]:
        assert not equal(visited(op, *other), first)


@OPS
def test_an_operation_draws_what_torchs_generator_would_give_if_seeded_with_the_key(name: str) -> None:
    op = drawing_ops()[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(visit_key(1, 2, 3, 4))
        expected = [*drawn(op), *drawn(op)]
    with gpipe.visit(1, 2, 3, 4):
        assert equal([*drawn(op), *drawn(op)], expected)


@OPS
def test_an_operation_goes_on_where_the_one_before_stopped(name: str) -> None:
    op = drawing_ops()[name]
    with gpipe.visit(0, 0, 0, 0):
        first, second = drawn(op), drawn(op)
    with gpipe.visit(0, 0, 0, 0):
        assert equal(drawn(op), first)
        assert equal(drawn(op), second)
    assert not equal(first, second)


@pytest.mark.parametrize("name", [name for name, op in drawing_ops().items() if "generator" in arguments(op)])
def test_a_generator_of_the_users_own_is_left_alone(name: str) -> None:
    op = drawing_ops()[name]
    given = {**arguments(op), "generator": torch.Generator().manual_seed(5)}
    outside = op(**given)
    given = {**arguments(op), "generator": torch.Generator().manual_seed(5)}
    with gpipe.visit(0, 0, 0, 0):
        assert equal(pytree.tree_leaves(op(**given)), pytree.tree_leaves(outside))
        first = torch.rand(3)
    with gpipe.visit(0, 0, 0, 0):
        assert torch.equal(torch.rand(3), first)


# Whatever stands between: what a visit gives is what torch's generator gives, seeded with its key.


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return F.dropout(X) + torch.rand(3, 4)


def beside_meta() -> Tensor:
    with torch.device("meta"):
        torch.rand(3).normal_()
    return torch.rand(3, device="cpu") + torch.empty(3, device="meta").normal_().shape[0]


def under_a_mode() -> Tensor:
    with FlopCounterMode(display=False):
        return torch.native_dropout(X, 0.5, True)[0] + F.dropout(X) + torch.rand(3, 4)


def with_gradients() -> Tensor:
    x = X.clone().requires_grad_()
    mixed = F.dropout(x) * torch.rand_like(x) + torch.native_dropout(x, 0.5, True)[0]
    mixed = mixed + torch.distributions.Gamma(x.exp(), 1.0).rsample()
    return torch.autograd.grad(mixed.sum(), x)[0]


def of_a_subclass() -> Tensor:
    class Special(Tensor):
        pass

    x = X.as_subclass(Special)
    return (F.dropout(x) + torch.rand_like(x)).as_subclass(Tensor)


@torch.library.custom_op("gpipe_tests::drop", mutates_args=())
def custom(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5))


def conditional() -> Tensor:
    return torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.rand(3),))


def mapped(function: Callable[[Tensor], Tensor], randomness: str) -> Callable[[], Tensor]:
    return lambda: torch.func.vmap(function, randomness=randomness)(X)


AROUND: dict[str, Callable[[], Tensor]] = {
    "inference mode": in_inference_mode,
    "meta": beside_meta,
    "a mode of the user's": under_a_mode,
    "autograd": with_gradients,
    "a subclass": of_a_subclass,
    "an operation of the user's": lambda: custom(X),
    "torch.cond": conditional,
    "torch.func.grad": lambda: torch.func.grad(lambda x: (F.dropout(x, 0.5) ** 2).sum())(X),
    "torch.func.jvp": lambda: torch.func.jvp(lambda x: F.dropout(x, 0.5) ** 2, (X,), (X,))[1],
    "scripted": lambda: torch.jit.script(nn.Dropout(0.5))(X),
    "nested": lambda: F.dropout(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)).to_padded_tensor(0.0),
    "bfloat16": lambda: F.dropout(X.bfloat16()),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "the default generator": lambda: torch.rand(3, generator=torch.default_generator),
    "positional": lambda: torch.ops.aten.binomial(torch.full((9,), 9.0), torch.rand(9), torch.default_generator),
    "initialization": lambda: nn.Linear(4, 4).weight.detach(),
    "a copy": lambda: copy.deepcopy(nn.Sequential(nn.Dropout()))(X),
    "cpu:0": lambda: torch.rand(3, device="cpu:0") + torch.rand(3),
}
VMAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(4),
    "normal_": lambda x: x.clone().normal_(),
    "randperm": lambda x: x[torch.randperm(4)],
    "twice": lambda x: torch.func.vmap(lambda y: y + torch.rand_like(y), randomness="different")(x),
}
AROUND |= {
    f"vmap of {name}, {kind}": mapped(f, kind) for name, f in VMAPPED.items() for kind in ("same", "different")
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_a_draw_changes_nothing(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(visit_key(1, 2, 3, 4))
        expected = [AROUND[name](), AROUND[name]()]
    before = torch.get_rng_state()
    with gpipe.visit(1, 2, 3, 4):
        assert equal([AROUND[name](), AROUND[name]()], expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_vmap_refuses_what_it_refuses_without_a_visit() -> None:
    with gpipe.visit(0, 0, 0, 0), pytest.raises(RuntimeError, match="randomness error mode"):
        torch.func.vmap(lambda x: x + torch.rand_like(x))(X)


# Threads, processes, contexts.


def test_other_threads_of_the_users_draw_from_torchs_generator() -> None:
    drawn: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        with gpipe.visit(0, 0, 0, 0):
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
            thread.start()
            thread.join()
    assert torch.equal(drawn[0], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_inside_of_a_visit_draws_from_its_key() -> None:
    def child() -> None:
        torch.rand(1)
        with gpipe.visit(5, 6, 7, 8):
            pipe.send(torch.rand(3).tolist())

    pipe, end = multiprocessing.Pipe()
    with gpipe.visit(1, 2, 3, 4):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
    with gpipe.visit(5, 6, 7, 8):
        assert end.recv() == torch.rand(3).tolist()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_is_raised_nothing_is_keyed_behind_a_visit(error: type[BaseException]) -> None:
    def fail() -> None:
        torch.rand(3)
        raise error

    before = torch.get_rng_state()
    with pytest.raises(error), gpipe.visit(0, 0, 0, 0), gpipe.visit(0, 0, 0, 1):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), expected)


def test_a_visit_entered_twice_goes_on() -> None:
    with gpipe.visit(0, 0, 0, 0):
        expected = torch.rand(6)
    with (keyed := gpipe.visit(0, 0, 0, 0)), keyed:
        first = torch.rand(2)
    with keyed:
        assert torch.equal(torch.cat([first, torch.rand(4)]), expected)


def test_a_torch_without_the_key_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_ops, "UNUSED_KEY", "NoSuchKey")
    with pytest.raises(RuntimeError, match=rf"{torch.__version__}.*no dispatch key NoSuchKey".replace("+", r"\+")):
        random_ops._install()


def test_two_threads_at_once_draw_what_each_draws_alone() -> None:
    def many(key: int) -> list[Tensor]:
        found = []
        for step in range(40):
            with gpipe.visit(key, step, 0, 0):
                x = torch.ones(50, requires_grad=True)
                found += [F.dropout(x), torch.rand(50), torch.native_dropout(x, 0.5, True)[0], torch.randperm(50)]
                found += [torch.multinomial(x.detach(), 5), x.detach().clone().random_()]
        return found

    alone = [many(key) for key in (1, 2)]
    together: list[list[Tensor]] = [[], []]
    start = threading.Barrier(2)

    def run(at: int) -> None:
        start.wait()
        together[at] = many(at + 1)

    state = torch.get_rng_state()
    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(equal, alone, together))


def test_an_inner_visit_has_a_key_of_its_own() -> None:
    with gpipe.visit(0, 0, 0, 0):
        once = torch.rand(3)
        after = torch.rand(3)
    with gpipe.visit(0, 0, 0, 0):
        assert torch.equal(torch.rand(3), once)
        with gpipe.visit(0, 0, 0, 0):
            assert torch.equal(torch.rand(3), once)
        assert torch.equal(torch.rand(3), after)


class Attention(nn.Module):
    """Attention over the row alone: six values as three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (3, 4))
        out: Tensor = self.attention(tokens, tokens, tokens)[0]
        return out.flatten(1)


class Function(nn.Module):
    """A function that draws."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    """Dropout between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x.unflatten(1, (3, 4)))[0]
        return out.flatten(1)


def image(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 2, 2)), layer, nn.Flatten())


def attend(x: Tensor) -> Tensor:
    tokens = x.unflatten(1, (3, 4))
    return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5).flatten(1)


def stochastic_depth(x: Tensor) -> Tensor:
    keep = torch.rand(len(x), 1) < 0.5
    return x + torch.where(keep, x.sin(), 0.0)


def jitter(x: Tensor) -> Tensor:
    noise = (
        torch.randn_like(x) + torch.rand(x.shape) + torch.empty_like(x).normal_() + torch.normal(0.0, 1.0, x.shape)
    )
    mask = torch.bernoulli(torch.full_like(x, 0.5)) + torch.randint(3, x.shape)
    order = torch.randperm(x.shape[1])
    picked = torch.multinomial(x.detach().softmax(1), 2)
    return x[:, order] * mask + noise + x.gather(1, picked).sum(1, keepdim=True)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout_in_place": lambda: nn.Dropout(0.5, inplace=True),
    "alpha_dropout": lambda: nn.AlphaDropout(0.5),
    "dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Dropout1d(), nn.Flatten()),
    "dropout2d": lambda: image(nn.Dropout2d()),
    "dropout3d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 2, 1)), nn.Dropout3d(), nn.Flatten()),
    "feature_alpha_dropout": lambda: image(nn.FeatureAlphaDropout()),
    "rrelu": nn.RReLU,
    "rrelu_in_place": lambda: nn.RReLU(inplace=True),
    "attention": Attention,
    "scaled_dot_product": lambda: Function(attend),
    "transformer_layer": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True), nn.Flatten()
    ),
    "lstm": Recurrent,
    "stochastic_depth": lambda: Function(stochastic_depth),
    "gumbel": lambda: Function(lambda x: F.gumbel_softmax(x, dim=1)),
    "everything": lambda: Function(jitter),
    "distribution": lambda: Function(lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample()),
}


def network(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(5, 12), DRAWING[name](), nn.Linear(12, 12), DRAWING[name](), nn.Linear(12, 2)]


@pytest.mark.parametrize("name", DRAWING)
def test_the_bits_are_those_of_the_plain_loop_for_every_cut_remat_and_driver(name: str) -> None:
    reference = network(name)
    x, y = torch.randn(7, 5), torch.randn(7, 2)
    for step in (0, 1):
        plain_loop(reference, x, y, F.mse_loss, micro_batches=3, seed=9, step=step)
    state = torch.get_rng_state()
    for cut in (1, [1, 4], 5):
        for remat in REMATS:
            for driver in ("threads", "lockstep"):
                layers = network(name)
                torch.set_rng_state(state)
                with gpipe.GPipe(layers, cut, 3, seed=9, remat=remat, driver=driver) as pipe:
                    for _ in (0, 1):
                        pipe.step(x, y, F.mse_loss)
                    assert_same_bits(pipe, reference)
                assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", DRAWING)
def test_micro_batches_steps_layers_and_seeds_draw_apart(name: str) -> None:
    layers = [nn.Identity(), DRAWING[name]()]
    x = torch.randn(1, 12).repeat(60, 1)
    pipe = gpipe.GPipe(layers, 2, 3, seed=9)
    again = gpipe.GPipe(copy.deepcopy(layers), 1, 3, seed=9)
    other_seed = gpipe.GPipe(copy.deepcopy(layers), 1, 3, seed=10)
    other_layer = gpipe.GPipe([nn.Identity(), *copy.deepcopy(layers)], 1, 3, seed=9)
    with torch.no_grad():
        first, second = pipe(x), pipe(x)
        assert torch.equal(first, again(x))
        assert torch.equal(second, again(x))
        different = [*first.split(20), *second.split(20), other_seed(x)[:20], other_layer(x)[:20]]
    assert all(not torch.equal(a, b) for at, a in enumerate(different) for b in different[:at])


def test_the_step_number_says_what_is_drawn() -> None:
    pipe = gpipe.GPipe([nn.Dropout(0.5)], 1, 2, seed=9)
    x = torch.ones(4, 10)
    with torch.no_grad():
        outputs = [pipe(x) for _ in range(3)]
        assert pipe.step_number == 3
        pipe.step_number = 1
        assert torch.equal(pipe(x), outputs[1])


def test_a_seed_is_drawn_once_from_torchs_generator() -> None:
    torch.manual_seed(4)
    one = gpipe.GPipe([nn.Dropout(0.5)], 1, 2)
    two = gpipe.GPipe([nn.Dropout(0.5)], 1, 2)
    torch.manual_seed(4)
    again = gpipe.GPipe([nn.Dropout(0.5)], 1, 2)
    assert one.seed == again.seed != two.seed


class Generates(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


def test_a_layer_with_a_generator_of_its_own_draws_from_it() -> None:
    x = torch.zeros(4, 3)
    with torch.no_grad():
        output = gpipe.GPipe([nn.Identity(), Generates()], 2, 2)(x)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(output, torch.cat([torch.rand(2, 3, generator=generator) for _ in range(2)]))
