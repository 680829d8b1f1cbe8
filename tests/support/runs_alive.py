"""Several runs alive at once: calls whose backwards come later, steps and evaluations between, of one pipe or two.

A story is a list of what is done, in order. It is told to pipes and to plain loops, and what both give is compared.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.support.odd_layers import Drift
from tests.support.outcomes import Outcome, noted
from tests.support.plain_loop import Loop, weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.digests import Digests, digests

M, WIDTH, SEED, CPU = 3, 6, 3, torch.device("cpu")
Act: TypeAlias = Literal["call", "chain", "backward", "drop", "step", "evaluate", "score", "peek"]
ACTS: tuple[Act, ...] = ("call", "chain", "backward", "drop", "step", "evaluate", "score", "peek")
Story: TypeAlias = Sequence[tuple[Act, int]]
"""What is done, and with which pipe, or with which of the losses that wait for their backward."""


class Model(nn.Module):
    """A model that is traced; it draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + (x.tanh() if self.training else x)
        return x * self.scale


def network(at: int) -> list[nn.Module]:
    """Layers with what differs between modes, and from forward to forward."""
    with weights_of(at):
        return [
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.4, inplace=True),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(inplace=True),
            Drift(WIDTH, in_place=True),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.4),
            nn.Linear(WIDTH, WIDTH),
        ]


def model(at: int) -> Model:
    with weights_of(at):
        return Model()


def embedding() -> nn.Module:
    with weights_of(2):
        return nn.Linear(WIDTH, WIDTH)


def gradient_of(parameter: Tensor) -> list[float]:
    assert parameter.grad is not None
    found: list[float] = parameter.grad.double().flatten().tolist()
    return found


def data(at: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 + at))


TARGET = data(99)


class Piped:
    def __init__(self, pipe: gpipe.GPipe) -> None:
        self.module = self.pipe = pipe
        self.device = CPU  # of what it is given

        self.train = pipe.train

    def call(self, x: Tensor) -> Tensor:
        return self.pipe(x, gather=True)

    def step(self, x: Tensor) -> Tensor:
        return self.pipe.step(x, TARGET.to(self.device), F.mse_loss)


class Plain(Loop):
    """A plain loop, as a story uses it: of one replica of several, perhaps."""

    def __init__(self, layers: Sequence[nn.Module], replica: int, replicas: int) -> None:
        super().__init__(layers, M, SEED, first=replica * M)
        self.share, self.device = 1 / replicas, CPU

    @property
    def module(self) -> nn.Module:
        return self[0] if len(self) == 1 else self

    call = Loop.__call__

    def step(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(x, TARGET.to(self.device), F.mse_loss, scale=self.share) * self.share


def pipes(partitions: int, **settings: Any) -> list[Piped]:
    given: dict[str, Any] = {"seed": SEED, "micro_batches": M, "costs": [1] * 8} | settings
    layers = pipe_by_costs(network(0), partitions, **given)
    given |= {"sample": TARGET, "costs": "params"}
    return [Piped(layers), Piped(pipe_by_costs(model(1), partitions, **given))]


def plain(replica: int = 0, replicas: int = 1) -> list[Plain]:
    return [Plain(network(0), replica, replicas), Plain([model(1)], replica, replicas)]


Side: TypeAlias = Piped | Plain


def state_of(sides: Sequence[Side]) -> Outcome:
    found: Outcome = {}
    for at, side in enumerate(sides):
        found |= noted(side.module, at)
    return found


def tell_replicas(
    story: Story, replicas: int, make: Callable[[int, int], list[Plain]] = plain
) -> list[tuple[list[Tensor], Outcome]]:
    """What comes of a story, and what it leaves, in each replica: losses and gradients are added up over them.

    Several replicas add up what each run gives, one alone what each micro-batch does.
    """
    if replicas == 1:
        alone = make(0, 1)
        return [(tell(story, alone), state_of(alone))]
    told = []
    for replica in range(replicas):
        runs, sides = list[list[Tensor | None]](), make(replica, replicas)
        parameters = [parameter for side in sides for parameter in side.module.parameters()]

        def note(parameters: Sequence[nn.Parameter] = parameters, runs: list[list[Tensor | None]] = runs) -> None:
            runs.append([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None

        told.append((tell(story, sides, note), sides, parameters, runs))
    for run in zip(*(runs for *_, runs in told), strict=True):
        for at, gradients in enumerate(zip(*run, strict=True)):
            if gradients[0] is not None:
                total: Tensor = sum(gradients[1:], start=gradients[0])
                for _, _, parameters, _ in told:
                    before = parameters[at].grad
                    parameters[at].grad = total.clone() if before is None else before + total
    came = [
        [sum(column[1:], start=column[0]) if not column[0].dim() else column[replica] for replica in range(replicas)]
        for column in zip(*(found for found, *_ in told), strict=True)
    ]
    return [([each[at] for each in came], state_of(sides)) for at, (_, sides, *_) in enumerate(told)]


def tell(story: Story, sides: Sequence[Side], note: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Does what a story says; gives all that came of it. Losses whose turn never came are dropped.

    `note` is called behind each backward.
    """
    waiting: list[Tensor] = []
    found: list[Tensor] = []
    for at, (act, which) in enumerate(story):
        side = sides[which % len(sides)]
        x = data(at).to(side.device)
        match act:
            case "call":
                found.append(output := side.call(x))
                waiting.append((output - TARGET.to(output.device)).square().mean())
            case "chain":  # as a GAN's generator is trained, through its critic
                found.append(output := sides[-1].call(sides[0].call(x)))
                waiting.append(output.square().sum())
            case "backward" if waiting:
                waiting.pop(which % len(waiting)).backward()
                note()
            case "drop" if waiting:
                waiting.pop(which % len(waiting))
            case "step":
                found.append(side.step(x))
                note()
            case "evaluate" | "score" | "peek":
                side.train(act == "peek")
                with torch.no_grad():
                    found.append(side.step(x) if act == "score" else side.call(x))
                side.train()
    return [tensor.detach() for tensor in found]


def tell_here(
    rank: int, world: int, stories: Sequence[Story], replicas: int, remat: str
) -> list[tuple[list[list[float]], Digests]]:
    """What came of each story of two pipes, and what it left in this process."""
    ranks = world // replicas
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))
    found = []
    for story in stories:
        sides = pipes(ranks, driver="process", mesh=mesh, remat=remat)
        came = tell(story, sides)
        found.append(([tensor.double().flatten().tolist() for tensor in came], digests(state_of(sides))))
        for side in sides:
            side.pipe.close()
    torch.distributed.barrier()
    return found


def behind_layers(rank: int, world: int) -> list[float]:
    """The gradient that a plain layer before a pipe gets in this process."""
    (side, _), before = pipes(world, driver="process"), embedding()
    (side.call(before(data(0))) - TARGET).square().mean().backward()
    side.pipe.close()
    return [number for parameter in before.parameters() for number in gradient_of(parameter)]


def other_inputs(rank: int, world: int) -> list[float]:
    """A call whose inputs have a graph of another shape on the last rank; then one that is as it should be."""
    side, _ = pipes(world, driver="process")
    rows = data(0)[: 8 if rank < world - 1 else 6].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"on rank 1, but .* on rank 0.*\[input-gradients-differ\]"):
        side.call(rows)
    found: list[float] = side.call(data(0)).flatten().tolist()
    side.pipe.close()
    return found
