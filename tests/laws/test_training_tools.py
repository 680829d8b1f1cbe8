"""What people train with: gradient scalers, gradient clipping, compiled layers. All the same for every cut."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, mini_batch, plain_loop, same_bits

M = 2
W = 4
CUTS = ([4], [2, 2], [1, 1, 1, 1])


def network() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(W, W), nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), nn.Linear(W, W), nn.Linear(W, 2)]


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    return mini_batch(W, 2, rows)


# Gradient scalers.


def scale_of(scaler: torch.amp.GradScaler) -> float:
    """What to give as `scale=`, as the docstring of `step` has it."""
    return float(scaler.scale(torch.ones(())))


def steep(output: object, target: object) -> Tensor:
    assert isinstance(output, Tensor)
    assert isinstance(target, Tensor)
    return F.mse_loss(output, target) * 1e3


def scaler(init_scale: float, growth_interval: int = 2) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**127])
def test_a_gradient_scaler_does_what_it_does_without_a_pipe(init_scale: float, cut: list[int], remat: str) -> None:
    layers, plain = network(), network()
    pipe = gpipe.GPipe(layers, cut, M, remat=remat, seed=3)
    models = (pipe, nn.Sequential(*plain))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9) for model in models]
    scalers = [scaler(init_scale) for _ in models]
    scales = []
    for step in range(5):
        loss = pipe.step(*data(), steep, scale=scale_of(scalers[0]))
        expected = plain_loop(plain, *data(), steep, micro_batches=M, seed=3, step=step, scale=scale_of(scalers[1]))
        assert same_bits(loss, expected)
        assert loss.isfinite()
        for some, optimizer in zip(scalers, optimizers, strict=True):
            some.unscale_(optimizer)
        assert_same_bits(pipe, plain)
        for some, optimizer in zip(scalers, optimizers, strict=True):
            some.step(optimizer)
            some.update()
            optimizer.zero_grad()
        assert_same_bits(pipe, plain)
        scales.append(scalers[0].get_scale())
        assert scales[-1] == scalers[1].get_scale()
    if init_scale == 2.0**10:
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12, 2.0**12]
    else:
        assert scales == [2.0**126, 2.0**125, 2.0**124, 2.0**123, 2.0**122]  # infinite gradients were found


# Gradient clipping.


def big_network() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(W, 33), nn.Tanh(), nn.Linear(33, 65), nn.Linear(65, 2)]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, torch.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_clipping_has_the_bits_of_torchs_own_for_every_cut(cut: list[int], max_norm: float, norm_type: float) -> None:
    plain = nn.Sequential(*big_network())
    pipe = gpipe.GPipe(big_network(), cut, M, seed=3)
    pipe.step(*data(), F.mse_loss)
    plain_loop(list(plain), *data(), F.mse_loss, micro_batches=M, seed=3)
    theirs = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    norms = pipe.clip_grad_norm_(max_norm, norm_type), theirs
    assert same_bits(*norms)
    assert_same_bits(pipe, list(plain))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_clipping_gives_the_norm_of_gradients_that_are_not_finite(bad: float) -> None:
    layers, plain = network(), network()
    for some in (layers, plain):
        nn.Sequential(*some).zero_grad()
        for p in nn.Sequential(*some).parameters():
            p.grad = torch.full_like(p, bad)
    pipe = gpipe.GPipe(layers, 2, M)
    norm = pipe.clip_grad_norm_(1.0)
    assert same_bits(norm, nn.utils.clip_grad_norm_(nn.Sequential(*plain).parameters(), 1.0))
    assert_same_bits(pipe, plain)


# Compiled layers.


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begins and ends without compiled code where something is compiled."""
    if "compile" not in request.node.name:
        yield
        return
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block; what is random in it is drawn twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.linear(x).tanh(), self.dropout, self.training)
        return F.dropout(x, self.dropout, self.training)


Compile = Callable[[nn.Module, str], nn.Module]

looks_at_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo does


def wrapped(layer: nn.Module, backend: str) -> nn.Module:
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def in_place(layer: nn.Module, backend: str) -> nn.Module:
    layer.compile(fullgraph=True, backend=backend)
    return layer


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.5)
        torch._dynamo.graph_break()
        return F.dropout(x.tanh(), 0.5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


def torchs_own() -> nn.Module:
    """Dynamo leaves such a module alone, and traced what keys its dropout instead."""
    return nn.Sequential(nn.Linear(W, W), nn.Dropout(0.5), nn.Linear(W, W))


def breaking(layer: nn.Module, backend: str) -> nn.Module:
    layer.compile(backend=backend)
    return layer


COMPILED: dict[str, tuple[Callable[[], nn.Module], Compile, str]] = {
    "eager": (lambda: Block(0.5), wrapped, "eager"),
    "eager, in place": (lambda: Block(0.0), in_place, "eager"),
    "aot": (lambda: Block(0.5), wrapped, "aot_eager"),
    "aot, in place": (lambda: Block(0.5), in_place, "aot_eager"),
    "batch norm": (Normed, wrapped, "aot_eager"),
    "torch's own": (torchs_own, breaking, "eager"),  # of which torch refuses fullgraph=True: it compiles no frame
    "a break": (lambda: Broken(0.5), breaking, "aot_eager"),
    "inductor": (lambda: Block(0.5), wrapped, "inductor"),
}


def check_compiled(make: Callable[[], list[nn.Module]], ways: Sequence[tuple[list[int], str, str]]) -> None:
    """Pipes of compiled layers have the bits of the reference loop; torch's own generator stays untouched."""
    found = []
    for cut, remat, driver in ways:
        layers = make()
        with gpipe.GPipe(layers, cut, M, remat=remat, driver=driver, seed=3) as pipe:
            untouched = torch.get_rng_state()
            report = pipe.verify(*data(), F.mse_loss, against="model")
            assert report.equal
            assert not report.findings
            for _ in range(2):
                pipe.step(*data(), F.mse_loss)
            assert torch.equal(untouched, torch.get_rng_state())
        found.append(layers)
    for layers in found[1:]:  # also of shared weights, whose gradients are not verified
        assert_same_bits(nn.Sequential(*layers), found[0])


WAYS = [
    ([5], "never", "lockstep"),
    ([1, 1, 1, 1, 1], "always", "threads"),
    ([2, 3], "except_last", "threads"),
    ([2, 1, 2], "always", "lockstep"),
]


@looks_at_grad
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_give_the_bits_of_the_plain_loop_over_them(name: str) -> None:
    layer, compile_layer, backend = COMPILED[name]

    def make(*, share: bool) -> list[nn.Module]:
        torch.manual_seed(0)
        first, second = layer(), layer()
        if share and isinstance(first, Block) and isinstance(second, Block):
            second.linear.weight = first.linear.weight
        compiled = [compile_layer(each, backend) for each in (first, second)]
        return [nn.Linear(W, W), compiled[0], nn.Dropout(0.2), compiled[1], nn.Linear(W, 2)]

    ways = WAYS[1:3] if backend == "inductor" else WAYS  # it takes its time
    check_compiled(lambda: make(share=backend == "aot_eager"), ways)


@pytest.mark.parametrize("compile_layer", [wrapped, in_place])
@pytest.mark.parametrize("partitions", [1, 4])
def test_a_compiled_module_that_is_two_layers_is_refused_with_what_to_do(
    partitions: int, compile_layer: Compile
) -> None:
    # Its code went on with the weights of the first use.
    block = compile_layer(Block(0.3), "eager")
    pipe = gpipe.GPipe([nn.Linear(W, W), block, nn.Tanh(), block, nn.Linear(W, 2)], partitions, M)
    with pytest.raises(ValueError, match=r"\[compiled-module-in-several-layers\]"):
        pipe.step(*data(), F.mse_loss)


@pytest.mark.parametrize("compile_layer", [wrapped, in_place])
def test_a_compiled_batch_norm_cannot_defer_its_statistics(compile_layer: Compile) -> None:
    # The code that was compiled with the lent buffers ran in the recompute as well, and counted it.
    layers = [nn.Linear(W, W), compile_layer(nn.Sequential(nn.BatchNorm1d(W)), "eager"), nn.Linear(W, 2)]
    pipe = gpipe.GPipe(layers, 2, M, batch_norm="deferred")
    with pytest.raises(ValueError, match=r"\[compiled-batchnorm\]"):
        pipe.step(*data(), F.mse_loss)
