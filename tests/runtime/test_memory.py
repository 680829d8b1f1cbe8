"""Memory: flat over many steps and over forwards whose backward never comes, without help from the garbage collector.

Each mini-batch makes a megabyte and more inside the layers, so that what is kept of 200 shows in the size of the
process; and cycles of references, which only the collector would free, show in the number of objects.
"""

import gc
import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.stages.boundary import BoundaryValue

M = 4
ROWS, WIDTH = 128, 256  # an eighth of a megabyte


class Inside(nn.Module):
    """Makes tensors inside that its backward needs, and keeps track of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.made: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = x * self.scale
        self.made = [ref for ref in self.made if ref() is not None]
        self.made.append(weakref.ref(inner))
        return inner.sin()

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


X = torch.ones(ROWS, WIDTH)


def network(remat: str = "always", driver: str = "threads") -> gpipe.GPipe:
    layers = [Inside(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), Inside(), nn.ReLU(inplace=True), Inside()]
    return gpipe.GPipe(layers, partitions=[2, 2, 2], micro_batches=M, remat=remat, driver=driver)


def inside(pipe: gpipe.GPipe) -> int:
    """How many tensors are alive inside the layers."""
    return sum(layer.alive for layer in pipe.children() if isinstance(layer, Inside))


def objects_of(*kinds: type) -> int:
    """How many objects of these very types exist."""
    return sum(type(item) in kinds for item in gc.get_objects())


@contextmanager
def no_collector() -> Iterator[Callable[..., int]]:
    """Without the collector; gives what counts the objects made since."""
    gc.collect()
    gc.disable()
    before = {kind: objects_of(kind) for kind in (Run, Rank, MicroBatchState, BoundaryValue)}
    try:
        yield lambda *kinds: objects_of(*kinds) - sum(before[kind] for kind in kinds)
    finally:
        gc.enable()


def megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def train(pipe: gpipe.GPipe) -> None:
    pipe.step(X, X, F.mse_loss)


def call_and_train(pipe: gpipe.GPipe) -> None:
    F.mse_loss(pipe(X), X).backward()


def call_and_drop(pipe: gpipe.GPipe) -> None:
    assert pipe(X).requires_grad


def call_and_drop_the_loss(pipe: gpipe.GPipe) -> None:
    F.mse_loss(pipe(X), X)


def evaluate(pipe: gpipe.GPipe) -> None:
    with torch.no_grad():
        pipe(X)


def fail(pipe: gpipe.GPipe) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        pipe.step(X, X, loss_fn)
    gc.collect()  # an exception and its traceback refer to each other


WAYS = [train, call_and_train, call_and_drop, call_and_drop_the_loss, evaluate]
ROUNDS, KEPT = 5, 200 * ROWS * WIDTH * 4 / 1e6


def grown_over_200(act: Callable[[], None]) -> tuple[int, float]:
    """By how many objects, and by how many megabytes, this process has grown."""
    objects, before = len(gc.get_objects()), megabytes()
    for _ in range(200):
        act()
    return len(gc.get_objects()) - objects, megabytes() - before


def settled(grown: tuple[int, float]) -> bool:
    """Whether nothing is kept of each mini-batch: one object would be 200, one tensor `KEPT` megabytes.

    What is kept shows in every round; a heap that finds its size, or the threads of other tests, in the first ones.
    """
    objects, size = grown
    return objects < 20 and size < KEPT / 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of the process from /proc")
@pytest.mark.parametrize(("remat", "driver"), [("always", "threads"), ("never", "lockstep")])
@pytest.mark.parametrize("way", WAYS)
def test_200_mini_batches_leave_memory_flat(way: Callable[[gpipe.GPipe], None], remat: str, driver: str) -> None:
    with network(remat, driver) as pipe:
        for _ in range(10):
            way(pipe)
        with no_collector():
            rounds = [grown_over_200(lambda: way(pipe))]
            while len(rounds) < ROUNDS and not settled(rounds[-1]):
                rounds.append(grown_over_200(lambda: way(pipe)))
            assert settled(rounds[-1]), rounds


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("way", [*WAYS, fail])
def test_nothing_is_left_behind(way: Callable[[gpipe.GPipe], None], driver: str) -> None:
    with network(driver=driver) as pipe, no_collector() as made:
        way(pipe)
        assert inside(pipe) == 0
        assert made(Run, Rank, MicroBatchState, BoundaryValue) == 0


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize(("remat", "kept"), [("never", 3 * M), ("except_last", 3), ("always", 0)])
def test_a_forward_keeps_what_its_backward_needs_until_its_output_is_dropped(
    remat: str, kept: int, driver: str
) -> None:
    with network(remat, driver) as pipe, no_collector() as made:
        first, second = pipe(X), pipe(X)
        assert inside(pipe) == 2 * kept
        assert made(MicroBatchState) == 2 * 3 * M
        del first
        assert inside(pipe) == kept
        assert made(MicroBatchState) == 3 * M
        second.sum().backward()
        assert inside(pipe) == made(MicroBatchState, Run, Rank) == 0
        assert second.shape == X.shape  # it may live on


def test_an_output_without_its_graph_keeps_nothing_else_alive() -> None:
    with network("never") as pipe, no_collector() as made:
        output = pipe(X).detach()
        assert inside(pipe) == made(MicroBatchState, Run, Rank) == 0
        assert output.shape == X.shape


def test_boundary_tensors_are_let_go_one_by_one() -> None:
    """In the backward a stage holds the boundaries of the micro-batches still to come, and no others."""
    arrived: list[weakref.ref[object]] = []
    alive: list[int] = []

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(arrived) < M:
                arrived.append(weakref.ref(x.untyped_storage()))
            alive.append(sum(ref() is not None for ref in arrived))
            return x * 2

    with gpipe.GPipe([Inside(), Last()], 2, M, driver="lockstep") as pipe, no_collector():
        pipe.step(X, X, F.mse_loss)  # the first step finds out what works in place, with copies
        arrived.clear()
        alive.clear()
        pipe.step(X, X, F.mse_loss)
    assert alive == [1, 2, 3, 4, 4, 3, 2, 1]
    assert not any(ref() for ref in arrived)


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_first_step_that_fails_keeps_nothing_though_its_loss_was_to_be_watched(driver: str) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError

    with gpipe.GPipe([nn.Linear(4, 4), Fails()], 2, 2, driver=driver) as pipe, no_collector():
        x = torch.ones(4, 4)
        kept = weakref.ref(x)
        with pytest.raises(torch.OutOfMemoryError):
            pipe.step(x, torch.ones(4, 4), lambda output, target: F.mse_loss(output, target))
        del x
        assert kept() is None
