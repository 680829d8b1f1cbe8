"""Shared weights: one Parameter that several layers use, or a module that is several layers, wherever they are."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import gpipe
from tests.support import plain_loop as laws
from tests.support.odd_layers import Drift, OfPairs
from tests.support.plain_loop import REMATS, assert_same_bits, mini_batch, same_bits
from tests.support.shared_weights import lent

M = 3
W = 4
Build = Callable[[], list[nn.Module]]


def use_one(*modules: nn.Module, name: str = "weight") -> None:
    """Makes the parameters of this name one."""
    for module in modules[1:]:
        setattr(module, name, getattr(modules[0], name))


def two_uses() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.Linear(W, W)]
    use_one(layers[0], layers[3])
    return layers


def three_uses() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Linear(W, W), nn.Dropout(0.2), nn.Linear(W, W), nn.GELU()]
    use_one(layers[0], layers[1], layers[3])
    use_one(layers[0], layers[3], name="bias")
    return layers


def neighbours() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)]
    use_one(*layers[:2])
    return layers


def inside_a_layer_too() -> list[nn.Module]:
    inner = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
    last = nn.Linear(W, W)
    use_one(inner[0], inner[2], last)
    return [nn.Linear(W, W), inner, nn.Tanh(), last]


def a_module_twice() -> list[nn.Module]:
    layer = nn.Linear(W, W)
    return [layer, nn.Tanh(), nn.Linear(W, W), layer, nn.Tanh()]


def a_module_three_times() -> list[nn.Module]:
    layer = nn.Sequential(nn.LayerNorm(W), nn.Linear(W, W), nn.Dropout(0.3))
    return [layer, layer, nn.Linear(W, W), layer]


def a_submodule_twice() -> list[nn.Module]:
    inner = nn.Linear(W, W)
    return [nn.Sequential(inner, nn.Tanh()), nn.Linear(W, W), nn.Sequential(nn.Tanh(), inner)]


def an_lstm_twice() -> list[nn.Module]:
    cells = nn.LSTM(W, W, num_layers=2, dropout=0.2, batch_first=True)
    return [OfPairs(cells), nn.Linear(W, W), OfPairs(cells)]


def grus_of_one_weight() -> list[nn.Module]:
    first, second = nn.GRU(W, W, batch_first=True), nn.GRU(W, W, batch_first=True)
    use_one(first, second, name="weight_hh_l0")
    return [OfPairs(first), nn.Linear(W, W), OfPairs(second)]


def weight_norms() -> list[nn.Module]:
    layers: list[nn.Module] = [weight_norm(nn.Linear(W, W)), nn.Tanh(), weight_norm(nn.Linear(W, W))]
    use_one(layers[0].parametrizations.weight, layers[2].parametrizations.weight, name="original1")  # type: ignore[union-attr, arg-type]
    return layers


def frozen() -> list[nn.Module]:
    layers = two_uses()
    layers[0].weight.requires_grad_(False)
    return layers


def an_attention_twice() -> list[nn.Module]:
    cells = nn.MultiheadAttention(W, 2, dropout=0.2, batch_first=True)
    return [OfPairs(cells, 3, need_weights=False), nn.Linear(W, W), OfPairs(cells, 3, need_weights=False)]


BUILDS: list[Build] = [
    two_uses, three_uses, neighbours, inside_a_layer_too, a_module_twice, a_module_three_times, a_submodule_twice,
    an_lstm_twice, grus_of_one_weight, weight_norms, frozen, an_attention_twice,
]  # fmt: skip
every_build = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)


def made(build: Build) -> list[nn.Module]:
    torch.manual_seed(0)
    return build()


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return mini_batch(W, W, rows)


def train(pipe: gpipe.GPipe, way: str = "step") -> Tensor:
    return laws.train(pipe, *data(), F.mse_loss, way)


def train_plainly(layers: Sequence[nn.Module], way: str = "step", step: int = 0) -> Tensor:
    """The plain loop, each layer on leaves of its own of what it shares; their sums are added in layer order."""
    with lent(layers) as own:
        return laws.train_plainly(own, *data(), F.mse_loss, way, micro_batches=M, seed=5, step=step)


# A shared weight is one parameter to everybody.


@every_build
def test_the_modules_hold_their_own_parameters_after_every_step_and_after_a_failed_one(build: Build) -> None:
    layers = made(build)
    held = [(module, dict(module._parameters)) for layer in layers for module in layer.modules()]

    def fail(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError

    def fail_backward(output: Tensor, target: Tensor) -> Tensor:
        def hook(gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

        output = output * 1
        output.register_hook(hook)
        return F.mse_loss(output, target)

    with gpipe.GPipe(layers, len(layers), M, seed=5) as pipe:
        for run in (
            lambda: train(pipe),
            lambda: pipe.step(*data(), fail),
            lambda: pipe.step(*data(), fail_backward),
            lambda: train(pipe, "call"),
        ):
            with suppress(ZeroDivisionError):
                run()
            for module, parameters in held:
                assert list(module._parameters) == list(parameters)
                assert all(module._parameters[name] is p for name, p in parameters.items())
                for name, p in parameters.items():
                    assert getattr(module, name) is p
                if isinstance(module, nn.RNNBase):
                    named = zip(module._flat_weights, module._flat_weights_names, strict=True)
                    assert all(weight is parameters[name] for weight, name in named)
        pipe.zero_grad()
        pipe.step_number = 0
        plain = made(build)
        train(pipe)
        train_plainly(plain)
        assert_same_bits(pipe, plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ],
)
def test_optimizers_and_clipping_count_a_shared_weight_once(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    plain = nn.Sequential(*made(three_uses))
    pipe = gpipe.GPipe(made(three_uses), 5, M, seed=5)
    optimizers = make(pipe.parameters()), make(plain.parameters())
    for step in (0, 1, 2):
        train(pipe)
        train_plainly(list(plain), step=step)
        norms = pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert same_bits(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(pipe, list(plain))


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_hooks_on_a_shared_parameter_fire_once_a_step_with_the_whole_gradient(partitions: int) -> None:
    layers = made(three_uses)
    weight = layers[0].weight
    assert isinstance(weight, nn.Parameter)
    seen: list[Tensor] = []
    behind: list[Tensor] = []
    handles = [
        weight.register_hook(lambda gradient: seen.append(gradient.clone())),
        weight.register_post_accumulate_grad_hook(lambda p: behind.append(p.grad.clone())),
    ]
    pipe = gpipe.GPipe(layers, partitions, M, seed=5)
    plain = made(three_uses)
    train(pipe)
    train_plainly(plain)
    for handle in handles:
        handle.remove()
    assert len(seen) == len(behind) == 1
    expected = plain[0].weight.grad
    assert isinstance(expected, Tensor)
    assert same_bits(seen[0], expected)
    assert same_bits(behind[0], expected)


def test_a_pipe_of_shared_weights_can_be_copied_and_loaded() -> None:
    pipe = gpipe.GPipe(made(three_uses), 3, M, seed=5)
    train(pipe)
    other = copy.deepcopy(pipe)
    layers = list(other.children())
    assert layers[0].weight is layers[1].weight is layers[3].weight
    assert layers[0].weight is not next(iter(pipe.children())).weight
    plain = nn.Sequential(*made(three_uses))
    plain.load_state_dict(pipe.state_dict())
    other.load_state_dict(plain.state_dict())
    for some in (pipe, other):
        some.zero_grad()
        some.step_number = 1
        train(some)
    assert_same_bits(other, list(pipe.children()))


# A module that is several layers.


class Empty(nn.Linear):
    """Has a length, which is 0, and so is not true."""

    def __len__(self) -> int:
        return 0


def around(layer: nn.Module) -> list[nn.Module]:
    return [nn.Linear(W, W), layer, nn.Linear(W, W), layer, nn.Linear(W, W)]


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: spectral_norm(nn.Linear(W, W)),
    "a buffer written in place": lambda: Drift(W, in_place=True),
    "a buffer replaced": lambda: Drift(W, in_place=False),
}


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize(
    ("make", "cut"),
    [
        (lambda: nn.ReLU(inplace=True), [1] * 5),
        (lambda: Empty(W, W), [5]),
        (lambda: Empty(W, W), [1] * 5),
        *((make, [1, 3, 1]) for make in STATEFUL.values()),
        (lambda: STATEFUL["spectral norm"]().eval(), [2, 3]),
    ],
)
def test_a_module_that_is_two_layers_gives_the_bits_of_the_plain_loop(
    make: Callable[[], nn.Module], cut: list[int], remat: str
) -> None:
    torch.manual_seed(0)
    layers = around(make())
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, cut, M, remat=remat, seed=5)
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)


@contextmanager
def counted(module: nn.Module) -> Iterator[list[str]]:
    """What its hooks hear."""
    heard: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_: heard.append("before")),
        module.register_forward_hook(lambda *_: heard.append("forward")),
        module.register_full_backward_hook(lambda *_: heard.append("backward")),
    ]
    yield heard
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("partitions", [1, 6])
def test_hooks_of_a_module_that_is_two_layers_fire_for_each(partitions: int) -> None:
    layers = [nn.Linear(W, W), *made(a_module_twice)]
    pipe = gpipe.GPipe(layers, partitions, M, remat="never", driver="lockstep")
    with counted(layers[1]) as heard:
        train(pipe)
    assert {what: heard.count(what) for what in set(heard)} == dict.fromkeys(("before", "forward", "backward"), 2 * M)


# Refusals.


@pytest.mark.parametrize(
    ("ties", "texts"),
    [
        ([("0.weight",)], ["('0.weight',) is not a group of different parameters"]),
        ([("0.weight", "1.bias"), ("", "0.weight")], ["of one shape", "no parameter ''"]),
    ],
)
def test_ties_that_cannot_be_are_refused_all_at_once(ties: list[tuple[str, ...]], texts: list[str]) -> None:
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 3)]
    with pytest.raises(ValueError, match="cannot be built") as caught:
        gpipe.GPipe(layers, 2, M, ties=ties)
    assert all(text in str(caught.value) for text in texts)
