"""Same bits on the processor that this runs on: plain layers of odd widths through pipes, and in the plain loop.

Unlike in `tests.support.addresses`, it is the processor's own products that depend on where operands lie, or not.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.distributed import processes
from gpipe.distributed.codec import decode, encode
from gpipe.runtime.context import Context
from gpipe.stages import memory_layout
from gpipe.stages.messages import Label, Message, ReadyEvent
from tests.support.addresses import Behind, Third, in_the_middle
from tests.support.odd_layers import Fork, Join
from tests.support.plain_loop import REMATS, one_thread, plain_loop, same_bits, weights_of

WIDTHS = (3, 5, 7, 13, 33)
DRIVERS = ("threads", "lockstep", "messages")
CUTS = (1, 2, 3)
MODELS, ROWS = 30, 9
BLIND = 9  # of the models, which are also run where copies forget how their tensors lay: then this must see it


class Messages(Context):
    """Hands over what would arrive if each rank were a process."""

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        encoded = encode(message)
        super().send(rank, label, decode(encoded.layout, bytearray(b"".join(map(bytes, encoded.pieces())))), mark)


@dataclass(frozen=True)
class Outcome:
    """What is left of a training of two mini-batches."""

    found: Sequence[Tensor | None]

    def same(self, other: "Outcome") -> bool:
        return all(map(same_bits, self.found, other.found))


def layers_of(number: int) -> list[nn.Module]:
    draw = Random(number)
    width = draw.choice(WIDTHS)
    with weights_of(number):
        layers: list[nn.Module] = [nn.ReLU(inplace=True)] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 3)):
            kind = draw.randrange(6)
            layers += [
                [Third(width), nn.Linear(width, width), nn.Tanh()],
                [nn.Linear(width, width), Behind(width), nn.ReLU(inplace=True)],
                [Fork("skip", width), Join(width, width, width)],
                [nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)],
                [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()],
                [Third(width), nn.ReLU(inplace=True), Third(width)],
            ][kind]
        return [*layers, nn.Linear(width, width), nn.Tanh()]


def data_of(number: int, step: int) -> tuple[Tensor, Tensor]:
    """A mini-batch that is a slice of a data set."""
    width, ahead = Random(number).choice(WIDTHS), number % 5 + step
    data = torch.randn(ahead + ROWS, width, generator=torch.Generator().manual_seed(number))
    return data[ahead:], in_the_middle(data.sin(), number % 3)[ahead:]


def in_plain_torch(number: int) -> Outcome:
    layers = layers_of(number)

    def step(at: int) -> Tensor:
        return plain_loop(layers, *data_of(number, at), F.mse_loss, micro_batches=3, seed=0, step=at)

    return Outcome([*_trained(nn.Sequential(*layers), step)])


def through_pipe(number: int, partitions: int) -> Outcome:
    draw = Random(f"{number} {partitions}")
    driver, remat = draw.choice(DRIVERS), [draw.choice(REMATS) for _ in range(partitions)]
    context, driver = (Messages, "lockstep") if driver == "messages" else (Context, driver)
    with (
        mock.patch.object(processes, "Context", context),
        gpipe.GPipe(layers_of(number), partitions, 3, seed=0, remat=remat, driver=driver) as pipe,
    ):
        return Outcome([*_trained(pipe, lambda at: pipe.step(*data_of(number, at), F.mse_loss))])


def _trained(model: nn.Module, step: Callable[[int], Tensor]) -> Iterator[Tensor | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in (0, 1):
        yield step(at)
        yield from [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    yield from model.parameters()


@contextmanager
def forgetting() -> Iterator[None]:
    """Copies forget how their tensors lay."""
    with mock.patch.object(memory_layout, "_with_layout_of", lambda tensor, copied, **how: copied):
        yield


def count_products() -> tuple[int, int]:
    """Small products that change when an operand is moved in memory, and all that were tried."""
    moved = [
        same_bits(F.linear(x, weight), F.linear(in_the_middle(x, ahead), weight))
        for width in WIDTHS
        for rows in range(1, ROWS)
        for x, weight in [(torch.randn(rows, width), torch.randn(width, width))]
        for ahead in (1, 3, 8)
    ]
    return moved.count(False), len(moved)


def differing(plain: Sequence[Outcome], cuts: Sequence[int] = CUTS) -> list[str]:
    """The pipes that do not give the bits of the plain loop."""
    found = []
    for number, expected in enumerate(plain):
        for partitions in cuts:
            try:
                same = through_pipe(number, partitions).same(expected)
            except RuntimeError as error:
                found.append(f"model {number}, K={partitions}: {type(error).__name__}: {error}")
            else:
                found += [] if same else [f"model {number}, K={partitions}"]
    return found


@one_thread()
def main() -> int:
    """Says in a line what was found, and each difference in a further one; 1 if there is one that must not be."""
    torch.manual_seed(0)
    depend, products = count_products()
    plain = [in_plain_torch(number) for number in range(MODELS)]
    wrong = differing(plain)
    with forgetting():
        forgotten = len(differing(plain[:BLIND], [2]))
    print(
        f"{depend} of {products} products depend on alignment; of {len(CUTS) * MODELS} pipes over {MODELS} models "
        f"{len(wrong)} differ from the plain loop, and where copies forget how tensors lay {forgotten} of {BLIND}"
    )
    print(*wrong, sep="\n", end="\n" if wrong else "")
    blind = depend > 0 and not forgotten
    if blind:
        print("that no pipe differs says nothing, if none does where copies forget how tensors lay")
    return 1 if wrong or blind else 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.exit(main())
