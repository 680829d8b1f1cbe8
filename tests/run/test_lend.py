"""A layer that is lent the default generator draws what it draws under a visit, and nobody can tell."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.run.lane import Lane
from gpipe.run.lend import Trial, is_lent, lend, nobody_else_draws
from gpipe.run.visit import visit_key
from tests.laws import REMATS, assert_same_bits, plain_call, plain_loop, same_bits
from tests.run.test_random_layers import RANDOM, Does, data, network, run
from tests.run.test_visit import drawing_ops, drawn, equal

M, WIDTH = 3, 6
KEY = (1, 2, 3, 4)
PATIENCE = 60.0  # seconds after which something that waits is held to wait for ever


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lends, whatever threads other tests or their runner have left."""
    monkeypatch.setattr("gpipe.run.run.nobody_else_draws", lambda lanes: True)


def visited(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    with gpipe.visit(*KEY):
        return call()


def lent(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    return lend(visit_key(*KEY), call)


def tried(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    return Trial(*KEY).run(call)


def lends(pipe: gpipe.GPipe) -> list[bool | None]:
    """Of each layer, whether it is lent the default generator; None if it draws nothing."""
    layers = [layer for stage in pipe._engine.stages for layer in stage.layers]
    return [layer.lends.get(True) for layer in layers]


# Laws.


@pytest.mark.parametrize("name", drawing_ops())
def test_an_operation_draws_the_same_lent_tried_and_visited(name: str) -> None:
    op = drawing_ops()[name]

    def twice() -> list[Tensor]:
        return [*drawn(op), *drawn(op)]

    before = torch.get_rng_state()
    expected = visited(twice)
    assert equal(lent(twice), expected)
    assert equal(tried(twice), expected)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.lists(st.sampled_from(sorted(drawing_ops())), min_size=2, max_size=12))
def test_so_do_operations_in_any_order(names: list[str]) -> None:
    def all_of_them() -> list[Tensor]:
        return [tensor for name in names for tensor in drawn(drawing_ops()[name])]

    before = torch.get_rng_state()
    expected = visited(all_of_them)
    assert equal(lent(all_of_them), expected)
    trial = Trial(*KEY)
    assert equal(trial.run(all_of_them), expected)
    assert trial.lends
    assert trial.drew
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", RANDOM)
def test_pipes_run_by_one_thread_lend_and_give_the_bits_of_the_plain_loop(kind: str) -> None:
    for cut, remat, way in [([5], "never", "step"), ([2, 1, 2], "always", "step"), ([2, 3], "always", "call")]:
        layers = network(kind)
        plain = copy.deepcopy(layers)
        pipe = gpipe.GPipe(layers, cut, M, remat=remat, driver="lockstep", seed=7)
        before = torch.get_rng_state()
        for step in range(3):
            loss = run(pipe, way)
            reference = plain_loop if way == "step" else plain_call
            assert same_bits(loss, reference(plain, *data(), F.mse_loss, micro_batches=M, seed=7, step=step))
        assert_same_bits(pipe, plain)
        assert lends(pipe) == [None, True, None, True, None]
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("way", [visited, lent, tried])
def test_whatever_is_raised_the_default_generator_is_as_it_was(
    way: Callable[[Callable[[], list[Tensor]]], list[Tensor]], error: type[BaseException]
) -> None:
    def fails() -> list[Tensor]:
        torch.rand(3)
        torch.native_dropout(torch.ones(3), 0.5, True)
        raise error

    before = torch.get_rng_state()
    with pytest.raises(error):
        way(fails)
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_lent()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("outer", "inner"),  # nothing is lent where a mode is
    [(visited, visited), (tried, visited), (lent, visited), (lent, lent), (lent, tried)],
)
def test_a_visit_within_draws_from_its_own_key_and_leaves_the_outer_one_where_it_was(
    outer: Callable[[Callable[[], list[Tensor]]], list[Tensor]],
    inner: Callable[[Callable[[], list[Tensor]]], list[Tensor]],
) -> None:
    def once() -> list[Tensor]:
        x = torch.ones(8)
        return [torch.rand(8), F.dropout(x), torch.native_dropout(x, 0.5, True)[0], torch.randperm(8)]

    def nested() -> list[Tensor]:
        return [*once(), *inner(once), *once()]

    first, second = (found := visited(lambda: [*once(), *once()]))[:4], found[4:]
    assert equal(outer(nested), [*first, *visited(once), *second])


# Layers that touch the default generator themselves.


def seeds_inside_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = x + torch.rand(x.shape)
    return x + torch.rand(x.shape)


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
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


def draws_on_a_device_of_another_name(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape) + torch.rand(x.shape, device="cpu:0")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize(
    "function",
    [seeds_inside_a_fork, forks, forks_at_the_end, sets_it_back, draws_on_a_device_of_another_name],
)
def test_a_layer_that_would_notice_is_not_lent_anything(function: Callable[[Tensor], Tensor], remat: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Does(function), nn.Linear(WIDTH, 2)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 2, M, remat=remat, driver="lockstep", seed=7)
    for step in range(2):
        loss = run(pipe)
        assert same_bits(loss, plain_loop(plain, *data(), F.mse_loss, micro_batches=M, seed=7, step=step))
    assert_same_bits(pipe, plain)
    assert lends(pipe) == [None, False, None]


class Begins(nn.Module):
    """Draws, and in its last micro-batch begins to do something else."""

    def __init__(self, function: Callable[[Tensor], Tensor], after: int = 1) -> None:
        super().__init__()
        self.function = function
        self.after = after
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = F.dropout(x)
        return self.function(x) if self.forwards > self.after else x


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x + torch.rand(x.shape)


def draws_past_the_mode(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=torch.default_generator)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_layer_that_seeds_torch_itself_is_reported(driver: str, after: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Begins(seeds, after), nn.Linear(WIDTH, 2)]
    pipe = gpipe.GPipe(layers, 1, M, driver=driver, remat="never")
    with pytest.raises(RuntimeError, match=r"torch's own generator"):
        run(pipe)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_layer_that_names_the_default_generator_is_reported(driver: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Begins(draws_past_the_mode, 0), nn.Linear(WIDTH, 2)]
    with pytest.raises(RuntimeError, match=r"torch's own generator"):
        run(gpipe.GPipe(layers, 1, M, driver=driver, remat="never"))


class DrawsInBackward(torch.autograd.Function):
    """Draws where no key is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * torch.rand(gradient.shape)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_layer_that_draws_in_its_backward_is_reported(driver: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Begins(DrawsInBackward.apply, 0), nn.Linear(WIDTH, 2)]
    with pytest.raises(RuntimeError, match=r"torch's own generator"):
        run(gpipe.GPipe(layers, 1, M, driver=driver))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_layer_that_fails_while_it_is_lent_the_generator_gives_it_back(error: type[BaseException]) -> None:
    def fails(x: Tensor) -> Tensor:
        assert is_lent()
        raise error

    torch.manual_seed(0)
    layer = Begins(fails)
    plain = [nn.Linear(WIDTH, WIDTH), Begins(lambda x: x), nn.Linear(WIDTH, 2)]
    pipe = gpipe.GPipe([*copy.deepcopy(plain[:1]), layer, *copy.deepcopy(plain[2:])], 2, M, driver="lockstep", seed=7)
    before = torch.get_rng_state()
    with pytest.raises(error):
        run(pipe)
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_lent()
    layer.function, pipe.step_number = torch.nn.Identity(), 0
    pipe.zero_grad()
    assert same_bits(run(pipe), plain_loop(plain, *data(), F.mse_loss, micro_batches=M, seed=7))
    assert_same_bits(pipe, plain)


def masked(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_begins_to_checkpoint_what_it_draws_gets_the_right_gradient(use_reentrant: bool) -> None:
    # What checkpoint puts back for its recompute is then the state that the key gave.
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Begins(lambda x: checkpoint(masked, x, use_reentrant=use_reentrant))]
    plain = [copy.deepcopy(layers[0]), Begins(masked)]
    pipe = gpipe.GPipe(layers, 1, M, driver="lockstep", remat="never", seed=7)
    x = data()[0]
    assert same_bits(pipe.step(x, x, F.mse_loss), plain_loop(plain, x, x, F.mse_loss, micro_batches=M, seed=7))
    for ours, theirs in zip(pipe.parameters(), plain[0].parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert same_bits(ours.grad, theirs.grad)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_one_that_does_not_keep_the_state_for_its_recompute_is_reported(use_reentrant: bool) -> None:
    def forgetful(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(masked, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        return out

    pipe = gpipe.GPipe([nn.Linear(WIDTH, WIDTH), Begins(forgetful)], 1, M, driver="lockstep", remat="never")
    x = data()[0]
    with pytest.raises(RuntimeError, match=r"torch's own generator"):
        pipe.step(x, x, F.mse_loss)


# Other threads, other pipes.


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_where_another_thread_could_draw_nothing_is_lent_and_its_draws_are_reported(driver: str) -> None:
    asked, done = threading.Semaphore(0), threading.Semaphore(0)

    def draw() -> None:
        while asked.acquire(timeout=PATIENCE) and not over:
            torch.rand(1)
            done.release()

    def meanwhile(x: Tensor) -> Tensor:
        if disturbs:
            asked.release()
            assert done.acquire(timeout=PATIENCE)
        return F.dropout(x)

    over, disturbs = False, False
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        pipe = gpipe.GPipe([nn.Linear(WIDTH, 2), Does(meanwhile)], 1, M, driver=driver)
        run(pipe)
        assert lends(pipe) == [None, None]
        disturbs = True
        with pytest.raises(RuntimeError, match=r"torch's own generator"):
            run(pipe)
    finally:
        over = True
        asked.release()
        thread.join(PATIENCE)


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
    assert all(map(equal, alone, together))


def test_only_its_own_threads_may_be_there_for_a_layer_to_be_lent_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, cpu, gpu = threading.current_thread(), Lane(torch.device("cpu")), Lane(torch.device("meta"))
    rank, other = threading.Thread(name="gpipe rank 0"), threading.Thread(name="loader")
    for there, lanes, expected in [
        ([here], [cpu], True),
        ([here, rank], [cpu, cpu], True),
        ([here, other], [cpu], False),
        ([here], [cpu, gpu], False),
    ]:
        monkeypatch.setattr(threading, "enumerate", lambda there=there: there)
        assert nobody_else_draws(lanes) is expected


class Holds(nn.Module):
    """Draws, and then runs a pipe of its own."""

    def __init__(self, driver: str) -> None:
        super().__init__()
        self.inner = gpipe.GPipe([nn.Dropout(), nn.Dropout()], 2, 2, driver=driver, seed=3, remat="never")
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = F.dropout(x)
        self.inner.step_number = 0
        return F.dropout(self.inner(x)) if self.forwards > 1 else F.dropout(x)


@pytest.mark.usefixtures("alone")
def test_a_pipe_within_a_layer_that_is_lent_the_generator_is_keyed_by_itself_or_refused() -> None:
    x, found = torch.ones(2 * M, 64), []
    for driver in ("threads", "lockstep"):
        pipe = gpipe.GPipe([Holds("lockstep")], 1, M, driver=driver, seed=7)
        with torch.no_grad():
            found.append(pipe(x))
    assert same_bits(*found)
    with pytest.raises(ValueError, match=r"gpipe\.visit is active"), torch.no_grad():
        gpipe.GPipe([Holds("threads")], 1, M, driver="lockstep", seed=7)(x)
