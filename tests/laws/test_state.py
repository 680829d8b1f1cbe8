"""Layers with state of any kind, with parameters frozen, unused or not there: the bits of the plain loop."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import gpipe
from tests.support.odd_layers import LowRank
from tests.support.plain_loop import REMATS, assert_same_bits, one_thread, run_layers, same_bits
from tests.support.stateful import Experts, M, W, data, train, train_plainly


class Symmetric(nn.Module):
    """A parametrization without state."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Annealed(nn.Module):
    """A parametrization with state: it shrinks the weight with every forward in training."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9)
        return x * self.scale.clone()


def parametrized(*parametrizations: nn.Module) -> nn.Module:
    layer = nn.Linear(W, W)
    for parametrization in parametrizations:
        parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(W, W), "weight", amount=0.4)


def of_old(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The normalizations that work by hooks, which torch deprecates and people still have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make(nn.Linear(W, W))


class Ema(nn.Module):
    """Follows its input in a buffer, in place; writes another by assignment, and a third behind torch's back."""

    mean: Tensor
    last: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))
        self.register_buffer("last", torch.zeros(W), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        given = x.detach()
        before = self.mean.clone() + self.last * 0.1 + self.count * 0.01
        if self.training:
            self.mean.lerp_(given.mean(0), 0.3)
            self.last = given[-1].clone()
            self.count.data += 1
        return x + before


class Remembers(nn.Module):
    """Has state in its weights' place: a parameter that is written in forward and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.register_buffer("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        assert self.empty is None
        out: Tensor = self.linear(x)
        return out


def norms(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: spectral_norm(nn.Linear(W, W)),
    "spectral norm, several": lambda: norms(
        spectral_norm(nn.Linear(W, W), n_power_iterations=3), spectral_norm(nn.Linear(W, W))
    ),
    "spectral norm of old": lambda: of_old(torch.nn.utils.spectral_norm),
    "weight norm": lambda: weight_norm(nn.Linear(W, W)),
    "weight norm of old": lambda: of_old(torch.nn.utils.weight_norm),
    "orthogonal": lambda: orthogonal(nn.Linear(W, W)),
    "parametrized": lambda: parametrized(Symmetric()),
    "parametrized with state": lambda: parametrized(Annealed(), Symmetric()),
    "pruned": pruned,
    "buffers": Ema,
    "no buffer": Remembers,
    "batch norm inside": lambda: norms(nn.BatchNorm1d(W), nn.Linear(W, W), nn.BatchNorm1d(W, momentum=None)),
    "frozen": lambda: nn.Linear(W, W).requires_grad_(False),
    "low rank": lambda: LowRank(W),
    "experts": Experts,
    "no parameters": lambda: norms(nn.Tanh(), nn.Hardtanh()),
    "embedding with a norm": lambda: norms(nn.Linear(W, W, bias=False), nn.LayerNorm(W, elementwise_affine=False)),
}


def network(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(W, W), LAYERS[name](), nn.Dropout(0.2), LAYERS[name](), nn.Linear(W, 2)]


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_state_gives_the_bits_of_the_plain_loop(name: str, remat: str, way: str) -> None:
    plain = network(name)
    losses = []
    optimizer = torch.optim.Adam(nn.Sequential(*plain).parameters(), lr=0.1)
    for step in (0, 1, 2):
        losses.append(train_plainly(plain, way, step))
        optimizer.step()
        optimizer.zero_grad()
    nn.Sequential(*plain).eval()
    parts = enumerate(data()[0].tensor_split(M))
    with torch.no_grad(), one_thread():
        expected = [run_layers(plain, part, seed=5, step=3, micro_batch=m) for m, part in parts]
    for cut, driver in (([5], "lockstep"), ([1, 1, 1, 1, 1], "threads"), ([2, 3], "threads")):
        layers = network(name)
        with gpipe.GPipe(layers, cut, M, remat=remat, driver=driver, seed=5) as pipe:
            optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
            for step in (0, 1, 2):
                assert same_bits(train(pipe, way), losses[step])
                optimizer.step()
                optimizer.zero_grad()
            assert_same_bits(pipe, plain)
            assert list(pipe.state_dict()) == list(nn.Sequential(*plain).state_dict())
            with torch.no_grad():
                output = pipe.eval()(data()[0])
            assert same_bits(output, torch.cat([part for part in expected if isinstance(part, Tensor)]))


@pytest.mark.parametrize("remat", REMATS)
def test_buffers_that_begin_to_change_later(remat: str) -> None:
    class Wakes(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(W))
            self.awake = False

        def forward(self, x: Tensor) -> Tensor:
            if self.awake:
                self.mean.lerp_(x.detach().mean(0), 0.3)
            return x * self.mean.clone()

    torch.manual_seed(0)
    layers = [nn.Linear(W, W), Wakes(), nn.Linear(W, 2)]
    pipe = gpipe.GPipe(layers, 3, M, remat=remat, seed=5)
    train(pipe)
    assert isinstance(layers[1], Wakes)
    layers[1].awake = True
    pipe.zero_grad()
    plain = copy.deepcopy(layers)
    loss = train(pipe)
    assert same_bits(loss, train_plainly(plain, step=1))
    assert_same_bits(pipe, plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_modules_are_refused_with_the_reason() -> None:
    scripted = torch.jit.script(nn.BatchNorm1d(W))
    with pytest.raises(ValueError, match=r"layer 1 \(Sequential\) is of TorchScript, .*; give the plain module"):
        gpipe.GPipe([nn.Linear(W, W), nn.Sequential(scripted)], 99, M)


# Hooks.


class Heard:
    """Hooks of every kind on a module, and what they heard."""

    def __init__(self, module: nn.Module) -> None:
        self.events: list[tuple[str, float]] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._behind)
        module.register_full_backward_pre_hook(self._backward_before)
        module.register_full_backward_hook(self._backward_behind)
        for parameter in module.parameters():
            parameter.register_hook(self._gradient)
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _note(self, what: str, value: object) -> None:
        tensors = value if isinstance(value, tuple) else (value,)
        self.events.append((what, sum(float(t.detach().sum()) for t in tensors if isinstance(t, Tensor))))

    def _before(self, module: nn.Module, args: object) -> None:
        self._note("before", args)

    def _behind(self, module: nn.Module, args: object, output: object) -> None:
        self._note("behind", output)

    def _backward_before(self, module: nn.Module, gradients: object) -> None:
        self._note("backward before", gradients)

    def _backward_behind(self, module: nn.Module, gradients: object, outputs: object) -> None:
        self._note("backward behind", gradients)

    def _gradient(self, gradient: Tensor) -> None:
        self._note("gradient", gradient)

    def _accumulated(self, parameter: Tensor) -> None:
        self._note("accumulated", parameter.grad)


@pytest.mark.parametrize("cut", [[3], [1, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_without_recompute_hooks_hear_what_they_hear_on_the_plain_layer(driver: str, cut: list[int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 2)]
    plain = copy.deepcopy(layers)
    heard, expected = Heard(layers[1]), Heard(plain[1])
    train(gpipe.GPipe(layers, cut, M, remat="never", driver=driver, seed=5))
    train_plainly(plain)
    ahead = {"before", "behind"}  # forwards go ahead of backwards, each of them in the order of the micro-batches
    assert heard.events[: 2 * M] == [event for event in expected.events if event[0] in ahead]
    assert heard.events[2 * M :] == [event for event in expected.events if event[0] not in ahead]
    assert len(heard.events) == M * 8


def test_with_recompute_forward_hooks_are_called_again_and_backward_hooks_are_not() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 2)]
    plain = copy.deepcopy(layers)
    heard, expected = Heard(layers[1]), Heard(plain[1])
    train(gpipe.GPipe(layers, 2, M, remat="always", seed=5))
    train_plainly(plain)
    forwards = [event for event in expected.events if event[0] in ("before", "behind")]
    backwards = [event for event in expected.events if event not in forwards]
    assert heard.events[: len(forwards)] == forwards
    assert [event for event in heard.events if event[0] not in ("before", "behind")] == backwards
    again = [event for event in heard.events[len(forwards) :] if event[0] in ("before", "behind")]
    assert again == forwards


@pytest.mark.parametrize("remat", REMATS)
def test_hooks_that_change_what_they_see(remat: str) -> None:
    def hook(layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        layer.register_forward_hook(lambda module, args, output: output + 1)
        layer.register_full_backward_hook(lambda module, gradients, outputs: (gradients[0] * 3,))  # type: ignore[index]

    torch.manual_seed(0)
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 2)]
    plain = copy.deepcopy(layers)
    hook(layers[1])
    hook(plain[1])
    pipe = gpipe.GPipe(layers, 3, M, remat=remat, seed=5)
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)


def test_hooks_that_pytorch_calls_for_every_module_are_called_in_rank_threads_too() -> None:
    heard: list[str] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            heard.append(f"{module.out_features}")

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        train(gpipe.GPipe([nn.Linear(W, W), nn.Linear(W, 2)], 2, M, remat="never"))
    finally:
        handle.remove()
    assert sorted(heard) == ["2"] * M + ["4"] * M
