"""What people train with: gradient scalers, gradient clipping, compiled layers. All the same for every cut."""

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, mini_batch, plain_loop, same_bits
from tests.support.shared_weights import lent

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
    """A loss of large gradients."""
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


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_step_with_infinite_gradients_is_skipped_by_the_scaler(cut: list[int]) -> None:
    layers = network()
    before = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, cut, M, seed=3)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    some = scaler(2.0**127)
    pipe.step(*data(), steep, scale=scale_of(some))
    assert not all(p.grad is not None and p.grad.isfinite().all() for p in pipe.parameters())
    some.step(optimizer)
    some.update()
    assert some.get_scale() == 2.0**126
    assert all(same_bits(p, q) for p, q in zip(pipe.parameters(), nn.Sequential(*before).parameters(), strict=True))


def test_a_power_of_two_as_scale_changes_gradients_by_just_that() -> None:
    gradients = []
    for scale in (1.0, 2.0**16):
        pipe = gpipe.GPipe(network(), 4, M, seed=3)
        pipe.step(*data(), F.mse_loss, scale=scale)
        gradients.append([p.grad for p in pipe.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        assert same_bits(one, other / 2.0**16)


def test_a_scaler_works_through_a_call_too() -> None:
    pipe, stepped = (gpipe.GPipe(network(), 2, 1, seed=3) for _ in range(2))
    some = scaler(2.0**10)
    loss = some.scale(F.mse_loss(pipe(data()[0]), data()[1]))
    assert isinstance(loss, Tensor)
    loss.backward()
    stepped.step(*data(), F.mse_loss, scale=2.0**10)
    assert all(same_bits(p.grad, q.grad) for p, q in zip(pipe.parameters(), stepped.parameters(), strict=True))


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


def test_clipping_leaves_parameters_without_gradient_out() -> None:
    layers, plain = network(), network()
    for some in (layers, plain):
        some[0].requires_grad_(False)
    pipe = gpipe.GPipe(layers, 4, M, seed=3)
    assert pipe.clip_grad_norm_(1.0) == 0
    pipe.step(*data(), F.mse_loss)
    plain_loop(plain, *data(), F.mse_loss, micro_batches=M, seed=3)
    assert same_bits(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(nn.Sequential(*plain).parameters(), 0.1))
    assert_same_bits(pipe, plain)


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


def compiled_network(compile_layer: Compile, backend: str, dropout: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Linear(W, W),
        compile_layer(Block(dropout), backend),
        nn.Dropout(0.2),
        compile_layer(Block(dropout), backend),
        nn.Linear(W, 2),
    ]


def check_compiled(make: Callable[[], list[nn.Module]], ways: Sequence[tuple[list[int], str, str]]) -> None:
    """Pipes of compiled layers against the plain loop over the same; torch's own generator stays untouched."""
    plain = make()
    expected = [plain_loop(plain, *data(), F.mse_loss, micro_batches=M, seed=3, step=step) for step in (0, 1)]
    for cut, remat, driver in ways:
        layers = make()
        with gpipe.GPipe(layers, cut, M, remat=remat, driver=driver, seed=3) as pipe:
            untouched = torch.get_rng_state()
            losses = [pipe.step(*data(), F.mse_loss) for _ in (0, 1)]
            assert torch.equal(untouched, torch.get_rng_state())
            assert all(same_bits(one, other) for one, other in zip(losses, expected, strict=True))
            assert_same_bits(pipe, plain)


WAYS = [
    ([5], "never", "lockstep"),
    ([1, 1, 1, 1, 1], "always", "threads"),
    ([2, 3], "except_last", "threads"),
    ([2, 1, 2], "always", "lockstep"),
]


@looks_at_grad
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compile_layer", [wrapped, in_place])
def test_compiled_layers_give_the_bits_of_the_plain_loop_over_them(
    compile_layer: Compile, backend: str, dropout: float
) -> None:
    check_compiled(lambda: compiled_network(compile_layer, backend, dropout), WAYS)


@looks_at_grad
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_layers_compiled_by_inductor_are_keyed_too() -> None:
    check_compiled(
        lambda: compiled_network(wrapped, "inductor", 0.5), WAYS[1:3]
    )  # it takes its time; other backends go all ways


@looks_at_grad
def test_rank_threads_may_be_the_first_to_run_compiled_layers() -> None:
    torch._dynamo.reset()
    losses = []
    for _ in range(2):
        with gpipe.GPipe(compiled_network(wrapped, "aot_eager", 0.5), 5, M, seed=3) as pipe:
            losses.append([pipe.step(*data(), F.mse_loss) for _ in range(2)])
        torch._dynamo.reset()
    assert losses[0] == losses[1]


@looks_at_grad
def test_compiled_dropout_differs_between_micro_batches_and_steps() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * F.dropout(torch.ones_like(x))

    seen: list[tuple[float, ...]] = []

    class See(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple((x != 0).float().flatten().tolist()))
            return x

    pipe = gpipe.GPipe([wrapped(Mask(), "aot_eager"), See(), nn.Linear(64, 2)], 3, M, remat="never", seed=3)
    for _ in range(2):
        pipe.step(torch.ones(2, 64), torch.ones(2, 2), F.mse_loss)
    assert len(set(seen)) == len(seen) == 2 * M


@looks_at_grad
def test_a_layer_whose_compiled_graph_breaks_at_its_dropout_is_keyed_too() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.linear(x), 0.5)
            torch._dynamo.graph_break()
            return F.dropout(x.tanh(), 0.5)

    def make(*, compiled: bool) -> list[nn.Module]:
        torch.manual_seed(0)
        layer = Broken()
        if compiled:
            layer.compile(backend="aot_eager")
        return [nn.Linear(W, W), layer, nn.Linear(W, 2)]

    check_compiled(lambda: make(compiled=True), [([3], "never", "lockstep"), ([1, 1, 1], "always", "threads")])


def test_a_module_of_torchs_own_may_be_compiled_in_place() -> None:
    # Dynamo leaves such a module alone, and traced what keys its dropout instead.
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(W, W), nn.Dropout(0.5), nn.Linear(W, W))
        layer.compile(backend="eager")
        return [nn.Linear(W, W), layer, nn.Linear(W, 2)]

    check_compiled(make, [([3], "never", "lockstep"), ([1, 1, 1], "always", "threads")])


@looks_at_grad
@pytest.mark.parametrize("compile_layer", [wrapped, in_place])
def test_compiled_layers_may_share_weights(compile_layer: Compile) -> None:
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        first, second = Block(0.3), Block(0.3)
        second.linear.weight = first.linear.weight
        return [
            nn.Linear(W, W),
            compile_layer(first, "aot_eager"),
            compile_layer(second, "aot_eager"),
            nn.Linear(W, 2),
        ]

    plain = make()
    with lent(plain) as own:
        expected = plain_loop(own, *data(), F.mse_loss, micro_batches=M, seed=3)
    for cut, remat in (([4], "never"), ([2, 2], "always")):
        pipe = gpipe.GPipe(make(), cut, M, remat=remat, seed=3)
        assert same_bits(pipe.step(*data(), F.mse_loss), expected)
        assert_same_bits(pipe, plain)


@pytest.mark.parametrize("compile_layer", [wrapped, in_place])
@pytest.mark.parametrize("partitions", [1, 4])
def test_a_compiled_module_that_is_two_layers_is_refused_with_what_to_do(
    partitions: int, compile_layer: Compile
) -> None:
    # Its code went on with the weights of the first use.
    block = compile_layer(Block(0.3), "eager")
    pipe = gpipe.GPipe([nn.Linear(W, W), block, nn.Tanh(), block, nn.Linear(W, 2)], partitions, M)
    with pytest.raises(ValueError, match=r"compiled .* is several layers.* a module of its own"):
        pipe.step(*data(), F.mse_loss)


@pytest.mark.parametrize("compile_layer", [wrapped, in_place])
def test_a_compiled_batch_norm_cannot_defer_its_statistics(compile_layer: Compile) -> None:
    # The code that was compiled with the lent buffers ran in the recompute as well, and counted it.
    layers = [nn.Linear(W, W), compile_layer(nn.Sequential(nn.BatchNorm1d(W)), "eager"), nn.Linear(W, 2)]
    pipe = gpipe.GPipe(layers, 2, M, deferred_batch_norm=True)
    with pytest.raises(ValueError, match=r"cannot reach a BatchNorm inside of a compiled module"):
        pipe.step(*data(), F.mse_loss)


@looks_at_grad
@pytest.mark.parametrize("remat", REMATS)
def test_a_compiled_batch_norm_keeps_statistics_as_the_plain_loop_does(remat: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(W)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(x)

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(W, W), wrapped(Normed(), "aot_eager"), nn.Linear(W, 2)]

    check_compiled(make, [([1, 2], remat, "threads"), ([3], remat, "lockstep")])
