"""Randomness in whole pipes: keyed by (seed, step, layer, micro-batch), the same however a pipe is cut and run."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support import plain_loop as laws
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits

M = 3
WIDTH = 6
PATIENCE = 60.0  # seconds after which something that waits is held to wait for ever


class Does(nn.Module):
    """A layer that does what a function does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def images(layer: nn.Module) -> nn.Module:
    """A layer of images of three channels."""
    return nn.Sequential(nn.Unflatten(1, (3, 2, 1)), layer, nn.Flatten())


def attend(x: Tensor) -> Tensor:
    pairs = x.view(len(x), 2, 3)
    return F.scaled_dot_product_attention(pairs, pairs.sin(), pairs, dropout_p=0.5).flatten(1)


class Attention(nn.Module):
    """torch's own, weights wanted or not: two implementations."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(3, 1, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.view(len(x), 2, 3)
        mixed: Tensor = self.attention(pairs, pairs, pairs, need_weights=self.need_weights)[0]
        return mixed.flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(3, 3, num_layers=2, dropout=0.5, batch_first=True)  # type: ignore[call-arg,arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(x.view(len(x), 2, 3))[0]
        return out.flatten(1)


class Depth(nn.Module):
    """Stochastic depth, by row or for the whole micro-batch."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.by_row = by_row
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_row:
            return x + self.inner(x) * torch.bernoulli(torch.full((len(x), 1), 0.5))
        return x + self.inner(x) if torch.rand(1).item() < 0.5 else x


def gumbel(x: Tensor) -> Tensor:
    return x + F.gumbel_softmax(x, tau=0.5)


def permuted(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))] + x[:, torch.randperm(x.shape[1])]


def multinomial(x: Tensor) -> Tensor:
    return x + x.gather(1, torch.multinomial(x.detach().softmax(1), 2)).sum(1, keepdim=True)


def in_place(x: Tensor) -> Tensor:
    noise = torch.empty_like(x)
    total = torch.zeros_like(x)
    for fill in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "bernoulli_"):
        total = total + getattr(noise, fill)().clamp(-2, 2)
    return x + 0.1 * total + torch.empty(x.shape).geometric_(0.5) + torch.empty(x.shape).random_(3)


def distributions(x: Tensor) -> Tensor:
    scale = x.detach().abs() + 0.1
    drawn = torch.distributions.Normal(x, scale).rsample()
    drawn = drawn + torch.distributions.Gamma(scale, 1.0).sample() + torch.distributions.Poisson(scale).sample()
    drawn = drawn + torch.distributions.Categorical(logits=x.detach()).sample()[:, None]
    drawn = drawn + torch.distributions.Dirichlet(scale).sample() + torch.distributions.Beta(scale, scale).sample()
    return drawn + torch.distributions.Binomial(5, scale.clamp(max=0.9) * 0 + 0.5).sample()


def like(x: Tensor) -> Tensor:
    numbers = torch.randint_like(x, 3) + torch.randint(1, 4, (len(x), 1))
    return x * (torch.rand_like(x) + torch.randn_like(x)) + numbers + torch.normal(x.detach(), 0.1)


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout in place": lambda: nn.Dropout(0.5, inplace=True),
    "dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Dropout1d(), nn.Flatten()),
    "dropout2d": lambda: images(nn.Dropout2d()),
    "dropout3d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 1, 1)), nn.Dropout3d(), nn.Flatten()),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "feature alpha dropout": lambda: images(nn.FeatureAlphaDropout(0.5)),
    "functional dropout": lambda: Does(lambda x: F.dropout(x, 0.3, training=True)),
    "rrelu": nn.RReLU,
    "rrelu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(inplace=True)),
    "scaled dot product attention": lambda: Does(attend),
    "multi-head attention": lambda: Attention(need_weights=False),
    "multi-head attention, weights": lambda: Attention(need_weights=True),
    "transformer layer": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 5, dropout=0.4, batch_first=True), nn.Flatten()
    ),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "stochastic depth": lambda: Depth(by_row=False),
    "stochastic depth by row": lambda: Depth(by_row=True),
    "fractional pooling": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.FractionalMaxPool2d(2, output_size=(1, 2)), nn.Flatten(), nn.Linear(2, WIDTH)
    ),
    "rand": lambda: Does(lambda x: x * torch.rand(len(x), 1)),
    "randn": lambda: Does(lambda x: x + torch.randn(x.shape, dtype=torch.float64).float()),
    "randint": lambda: Does(lambda x: x * torch.randint(1, 5, (len(x), 1))),
    "randperm": lambda: Does(permuted),
    "multinomial": lambda: Does(multinomial),
    "like": lambda: Does(like),
    "in place fills": lambda: Does(in_place),
    "gumbel softmax": lambda: Does(gumbel),
    "distributions": lambda: Does(distributions),
}


def network(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), RANDOM[kind](), nn.GELU(), RANDOM[kind](), nn.Linear(WIDTH, 2)]


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 2, generator=generator)


def run(pipe: gpipe.GPipe, way: str = "step") -> Tensor:
    return laws.train(pipe, *data(), F.mse_loss, way)


def run_plainly(layers: Sequence[nn.Module], way: str = "step", step: int = 0) -> Tensor:
    return laws.train_plainly(layers, *data(), F.mse_loss, way, micro_batches=M, seed=7, step=step)


@pytest.mark.parametrize("kind", RANDOM)
def test_a_random_layer_gives_the_bits_of_the_plain_loop_for_every_cut_remat_and_driver(kind: str) -> None:
    ways = [
        ([5], "never", "lockstep", "step"),
        ([5], "always", "threads", "call"),
        ([1, 1, 1, 1, 1], "always", "threads", "step"),
        ([2, 3], "except_last", "threads", "call"),
        ([2, 1, 2], "always", "lockstep", "call"),
    ]
    for cut, remat, driver, way in ways:
        layers = network(kind)
        plain = copy.deepcopy(layers)
        with gpipe.GPipe(layers, cut, M, remat=remat, driver=driver, seed=7) as pipe:
            untouched = torch.get_rng_state()
            for step in (0, 1):
                assert same_bits(run(pipe, way), run_plainly(plain, way, step))
                assert_same_bits(pipe, plain)
            assert torch.equal(untouched, torch.get_rng_state())


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_run_twice_it_draws_the_same(driver: str) -> None:
    losses = []
    for _ in range(2):
        pipe = gpipe.GPipe(network("transformer layer"), 3, M, driver=driver, seed=7)
        losses.append([run(pipe) for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


class Mask(nn.Module):
    """Keeps the masks that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64))
        self.masks.append(mask)
        return x * mask[:WIDTH] * self.scale


def masks(seed: int, *, steps: int = 2, layers: int = 2) -> list[list[Tensor]]:
    made = [Mask() for _ in range(layers)]
    pipe = gpipe.GPipe(made, 1, M, remat="never", driver="lockstep", seed=seed)
    for _ in range(steps):
        pipe.step(data()[0], data()[0], F.mse_loss)
    return [layer.masks for layer in made]


def all_different(drawn: Sequence[Tensor]) -> bool:
    return len({tuple(mask.tolist()) for mask in drawn}) == len(drawn)


def test_every_micro_batch_step_layer_and_seed_draws_its_own() -> None:
    drawn = [mask for seed in (0, 1) for of_layer in masks(seed) for mask in of_layer]
    assert len(drawn) == 2 * 2 * 2 * M
    assert all_different(drawn)


def test_a_step_number_set_back_draws_the_same_again() -> None:
    layer = Mask()
    pipe = gpipe.GPipe([layer], 1, M, remat="never", seed=0)
    for number in (5, 6, 5):
        pipe.step_number = number
        pipe.step(data()[0], data()[0], F.mse_loss)
    assert all(torch.equal(one, other) for one, other in zip(layer.masks[:M], layer.masks[2 * M :], strict=True))
    assert all_different(layer.masks[: 2 * M])


def test_a_call_keys_its_recompute_by_its_own_step() -> None:
    layer = Mask()
    pipe = gpipe.GPipe([layer], 1, M, remat="always", driver="lockstep", seed=0)
    first, second = pipe(data()[0]), pipe(data()[0])
    second.sum().backward()
    first.sum().backward()
    forwards, recomputes = layer.masks[: 2 * M], layer.masks[2 * M :]
    assert all_different(forwards)
    again = [*recomputes[M:], *recomputes[:M]]
    assert all(torch.equal(one, other) for one, other in zip(forwards, again, strict=True))


def test_evaluation_draws_nothing_from_dropout_and_noise_is_keyed_there_too() -> None:
    noise = Does(lambda x: x + torch.randn_like(x))
    pipe = gpipe.GPipe([nn.Linear(WIDTH, WIDTH), nn.Dropout(), noise], 2, M, seed=0).eval()
    untouched = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(pipe(data()[0]), pipe(data()[0]))
    assert torch.equal(untouched, torch.get_rng_state())


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("remat", REMATS)
def test_a_random_loss_is_keyed_like_a_layer_behind_the_last(remat: str, partitions: int) -> None:
    def loss_fn(output: Any, target: Any) -> Tensor:
        return F.mse_loss(F.dropout(output, 0.5), target + torch.rand(2))

    layers = network("dropout")
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, partitions, M, remat=remat, seed=7)
    untouched = torch.get_rng_state()
    for step in (0, 1):
        loss = pipe.step(*data(), loss_fn)
        assert same_bits(loss, plain_loop(plain, *data(), loss_fn, micro_batches=M, seed=7, step=step))
        assert_same_bits(pipe, plain)
    assert torch.equal(untouched, torch.get_rng_state())


# A layer that begins to draw.


class Later(nn.Module):
    """Draws only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * torch.rand(len(x), 1) if self.draws else x


@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_layer_that_begins_to_draw_is_keyed_from_its_first_draw(partitions: int, driver: str, way: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Later(), nn.Linear(WIDTH, 2)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, partitions, M, driver=driver, seed=7)
    for step in range(4):
        for some in (layers, plain):
            some[1].draws = step % 2 == 1  # type: ignore[assignment]
        assert same_bits(run(pipe, way), run_plainly(plain, way, step))
        assert_same_bits(pipe, plain)


def test_a_dropout_whose_rate_rises_from_zero_just_works() -> None:
    layers = network("dropout")
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 3, M, seed=7)
    for step, rate in enumerate((0.0, 0.1, 0.5, 0.0)):
        for layer in (layers[1], plain[1]):
            layer.p = rate  # type: ignore[assignment]
        assert same_bits(run(pipe), run_plainly(plain, step=step))
        assert_same_bits(pipe, plain)


def test_a_loss_that_begins_to_draw_is_keyed_from_its_first_draw() -> None:
    draws = False

    def loss_fn(output: Any, target: Any) -> Tensor:
        return F.mse_loss(F.dropout(output) if draws else output, target)

    layers = network("dropout")
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 2, M, seed=7)
    for step in (0, 1):
        draws = step == 1
        loss = pipe.step(*data(), loss_fn)
        assert same_bits(loss, plain_loop(plain, *data(), loss_fn, micro_batches=M, seed=7, step=step))


# Layers that touch torch's own generator: what they draw is keyed all the same.


def seeds_inside_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = x + torch.rand(x.shape)
    return x + torch.rand(x.shape)


def forks_at_the_end(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.rand(x.shape)


def sets_it_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = F.dropout(x)
    torch.set_rng_state(state)
    return F.dropout(x)


def names_it(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=torch.default_generator) + torch.rand(x.shape)


def names_its_device(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, device="cpu:0") + torch.rand(x.shape)


def seeds_it(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x + torch.rand(x.shape)


TOUCHING = [seeds_inside_a_fork, forks_at_the_end, sets_it_back, names_it, names_its_device, seeds_it]


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("function", TOUCHING)
def test_a_layer_that_touches_torchs_generator_draws_from_the_key_and_leaves_it_to_others(
    function: Callable[[Tensor], Tensor], remat: str, driver: str
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Does(function), Does(function), nn.Linear(WIDTH, 2)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 3, M, remat=remat, driver=driver, seed=7)
    before = torch.get_rng_state()
    for step in (0, 1):
        loss = run(pipe)
        assert torch.equal(torch.get_rng_state(), before)
        assert same_bits(loss, run_plainly(plain, step=step))
        assert_same_bits(pipe, plain)
        torch.set_rng_state(before)


# Other threads.


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_another_thread_may_draw_during_a_step_and_neither_notices(driver: str) -> None:
    asked, done = threading.Semaphore(0), threading.Semaphore(0)
    drawn: list[Tensor] = []

    def draw() -> None:
        while asked.acquire(timeout=PATIENCE) and not over:
            drawn.append(torch.rand(1))
            done.release()

    def meanwhile(x: Tensor) -> Tensor:
        x = F.dropout(x)
        if disturbed:
            asked.release()
            assert done.acquire(timeout=PATIENCE)
        return F.dropout(x)

    over, disturbed = False, True
    layers = [nn.Linear(WIDTH, WIDTH), Does(meanwhile), nn.Linear(WIDTH, 2)]
    plain = copy.deepcopy(layers)
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        torch.manual_seed(3)
        pipe = gpipe.GPipe(layers, 2, M, driver=driver, seed=7)
        for step in (0, 1):
            disturbed = True
            loss = run(pipe)
            disturbed = False
            assert same_bits(loss, run_plainly(plain, step=step))
        assert_same_bits(pipe, plain)
    finally:
        over = True
        asked.release()
        thread.join(PATIENCE)
    torch.manual_seed(3)
    assert len(drawn) > M
    assert same_bits(torch.cat(drawn), torch.cat([torch.rand(1) for _ in drawn]))


def test_two_pipes_in_two_threads_draw_what_each_draws_alone() -> None:
    def train(pipe: gpipe.GPipe, losses: list[Tensor]) -> None:
        losses += [run(pipe) for _ in range(10)]

    def pipes() -> list[gpipe.GPipe]:
        return [gpipe.GPipe(network("multi-head attention"), 2, M, driver="lockstep", seed=seed) for seed in (0, 1)]

    alone: list[list[Tensor]] = [[], []]
    together: list[list[Tensor]] = [[], []]
    for pipe, losses in zip(pipes(), alone, strict=True):
        train(pipe, losses)
    jobs = zip(pipes(), together, strict=True)
    threads = [threading.Thread(target=train, args=job, daemon=True) for job in jobs]
    before = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(all(map(same_bits, *losses)) for losses in zip(alone, together, strict=True))
