"""A scope: what is drawn inside is what torch's generator gives, seeded with the key, whatever stands around it."""

import copy
import multiprocessing
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gpipe
from gpipe._torch.accelerator import CPU, standing_in
from gpipe.stages.rng import rng_seed, unseeded
from tests.support.plain_loop import all_same_bits

# Whatever stands between: what a scope gives is what torch's generator gives, seeded with its key.


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
        torch.manual_seed(rng_seed(1, 2, 3, 4))
        expected = [AROUND[name](), AROUND[name]()]
    before = torch.get_rng_state()
    with gpipe.rng_scope(1, 2, 3, 4):
        assert all_same_bits([AROUND[name](), AROUND[name]()], expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_vmap_refuses_what_it_refuses_without_a_scope() -> None:
    with gpipe.rng_scope(0, 0, 0, 0), pytest.raises(RuntimeError, match="randomness error mode"):
        torch.func.vmap(lambda x: x + torch.rand_like(x))(X)


# Threads, processes, contexts.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_inside_of_a_scope_draws_from_its_key() -> None:
    def child() -> None:
        torch.rand(1)
        with gpipe.rng_scope(5, 6, 7, 8):
            pipe.send(torch.rand(3).tolist())

    pipe, end = multiprocessing.Pipe()
    with gpipe.rng_scope(1, 2, 3, 4):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
    with gpipe.rng_scope(5, 6, 7, 8):
        assert end.recv() == torch.rand(3).tolist()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_is_raised_nothing_is_keyed_behind_a_scope(error: type[BaseException]) -> None:
    def fail() -> None:
        torch.rand(3)
        raise error

    before = torch.get_rng_state()
    with pytest.raises(error), gpipe.rng_scope(0, 0, 0, 0), gpipe.rng_scope(0, 0, 0, 1):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), expected)


def test_two_threads_at_once_draw_what_each_draws_alone() -> None:
    def many(key: int) -> list[Tensor]:
        found = []
        for step in range(40):
            with gpipe.rng_scope(key, step, 0, 0):
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
    assert all(map(all_same_bits, alone, together))


def test_a_run_that_begins_while_another_draws_waits_for_the_generator_of_its_own() -> None:
    """It noted the state of the key that stood in, and put that back behind a layer that seeds."""
    keyed, before = torch.Generator().manual_seed(5), torch.default_generator.get_state()

    def run() -> None:
        with unseeded([CPU]):
            torch.manual_seed(9)

    other = threading.Thread(target=run)
    with standing_in(keyed):
        other.start()
        other.join(0.3)
        assert other.is_alive()
        drawn = torch.rand(3)
    other.join()
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.default_generator.get_state(), before)
