"""Jobs with data, or arguments, as they should not be: smaller batches, other lengths, ranks that do not agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gpipe
from tests.support.jobs.training import Json
from tests.support.plain_loop import one_thread, plain_loop, run_layers, squares, weights_of

FEATURES, LAYERS, MICRO_BATCHES = 6, 4, 4


@dataclass(frozen=True)
class Turn:
    """One mini-batch.

    Attributes:
        rows: N.
        length: The length of each row's sequence; 0 for none.
        trains: Whether it is a training step; else an evaluation.
        kind: `"plain"`, `"strided"` (not contiguous), `"nan"`, `"double"` or `"whole numbers"`.
        target_rows: Of the targets, if not N.
    """

    rows: int = 10
    length: int = 0
    trains: bool = True
    kind: str = "plain"
    target_rows: int | None = None

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(seed)
        tail = ([self.length] if self.length else []) + [FEATURES]
        x = torch.randn(self.rows, *tail, generator=generator)
        y = torch.randn(self.rows if self.target_rows is None else self.target_rows, *tail, generator=generator)
        match self.kind:
            case "strided":
                x = x.mT.contiguous().mT
            case "nan":
                x[self.rows // 2] = float("nan")
            case "double":
                x = x.double()
            case "whole numbers":
                x = x.long()
        return x, y


EVALUATION = Turn(trains=False)


@dataclass(frozen=True)
class Script:
    """What the ranks do, and on which of them it must be refused.

    Attributes:
        turns: One after another.
        refused: The ranks that must raise; None for all.
        odd: The rank that differs from the others in what follows, -1 for the last.
        micro_batches: M of the odd rank.
        remat: Of the odd rank.
        extra: Turns of the odd rank behind the others.
        instead: The odd rank's turns.
    """

    turns: tuple[Turn, ...]
    refused: tuple[int, ...] | None = ()
    odd: int | None = None
    micro_batches: int = MICRO_BATCHES
    remat: str = "always"
    extra: tuple[Turn, ...] = ()
    instead: tuple[Turn, ...] = ()

    def is_odd(self, rank: int, world: int) -> bool:
        """Whether this is the rank that differs."""
        return self.odd is not None and rank == self.odd % world

    def turns_of(self, rank: int, world: int) -> tuple[Turn, ...]:
        """What a rank does."""
        return (*(self.instead or self.turns), *self.extra) if self.is_odd(rank, world) else self.turns


SCRIPTS = {
    "a smaller batch": Script((Turn(), Turn(7), Turn())),
    "a larger batch": Script((Turn(), Turn(13), Turn())),
    "a batch of fewer rows than M": Script((Turn(3), Turn(), Turn(1))),
    "a smaller batch in evaluation": Script((Turn(), Turn(4, trains=False), Turn(), EVALUATION)),
    "training after evaluation": Script((EVALUATION, Turn(), EVALUATION, Turn())),
    "other lengths": Script((Turn(length=3), Turn(length=8), Turn(length=1), Turn(length=5, trains=False))),
    "one dimension more": Script((Turn(), Turn(length=2), Turn())),
    "not contiguous": Script((Turn(kind="strided"), Turn(length=3, kind="strided"))),
    "NaN in the inputs": Script((Turn(), Turn(kind="nan"))),
    "no rows": Script((Turn(), Turn(0)), refused=None),
    "inputs of another dtype": Script((Turn(), Turn(kind="double")), refused=None),
    "whole numbers": Script((Turn(kind="whole numbers"),), refused=None),
    "targets of other rows": Script((Turn(), Turn(target_rows=8)), refused=None),
    "another M on rank 0": Script((Turn(),), None, odd=0, micro_batches=2),
    "another M on rank 1": Script((Turn(),), None, odd=1, micro_batches=2),
    "another remat on rank 1": Script((Turn(),), None, odd=1, remat="never"),
    "more rows on the last rank": Script((Turn(), Turn()), None, odd=-1, instead=(Turn(), Turn(12))),
    "evaluation on rank 1": Script((Turn(), Turn()), None, odd=1, instead=(Turn(), EVALUATION)),
    "a step more on rank 0": Script((Turn(),), (0,), odd=0, extra=(Turn(),)),
    "a step more on rank 1": Script((Turn(),), (1,), odd=1, extra=(Turn(),)),
}


def build() -> list[nn.Module]:
    """The layers, of the same weights every time."""
    with weights_of(4):
        return [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3), nn.Tanh()) for _ in range(LAYERS)]


def run(rank: int, world: int, name: str) -> Json:
    """Does what a script says; gives losses, outputs, and this rank's parameters in the end."""
    script = SCRIPTS[name]
    odd = script.is_odd(rank, world)
    pipe = gpipe.GPipe(
        build(),
        [LAYERS // world] * world,
        script.micro_batches if odd else MICRO_BATCHES,
        remat=script.remat if odd else "always",
        seed=0,
        driver="process",
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found = []
    for at, turn in enumerate(script.turns_of(rank, world)):
        x, y = turn.data(at)
        pipe.train(turn.trains)
        if turn.trains:
            found.append(pipe.step(x, y, squares).tolist())
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                found.append(pipe(x, gather=True).tolist())
    return {"found": found, "parameters": {name: p.tolist() for name, p in pipe.named_parameters()}}


@one_thread()
def reference(name: str) -> Json:
    """What it gives without a pipeline."""
    layers = build()
    whole = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    found = []
    step = 0
    for at, turn in enumerate(SCRIPTS[name].turns):
        x, y = turn.data(at)
        whole.train(turn.trains)
        if turn.trains:
            loss = plain_loop(layers, x, y, squares, micro_batches=MICRO_BATCHES, seed=0, step=step)
            found.append(loss.tolist())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        else:
            found.append(evaluate(layers, x))
    return {"found": found, "parameters": {name: p.tolist() for name, p in whole.named_parameters()}}


def evaluate(layers: Sequence[nn.Module], x: Tensor) -> Json:
    """What the layers make of each micro-batch."""
    with torch.no_grad():
        parts = x.tensor_split(min(MICRO_BATCHES, len(x)))
        made = [run_layers(layers, part, seed=0, step=0, micro_batch=m) for m, part in enumerate(parts)]
    return [row for part in made if isinstance(part, Tensor) for row in part.tolist()]
