"""Models given whole, in drawn pipes on the simulated accelerator: the bits of the model's own loop on a device."""

from collections.abc import Sequence
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.batch.losses import own_loss
from gpipe.schedule.schedules import SCHEDULES
from gpipe.tracing.model import TracedModel
from gpipe.tracing.runs import arguments
from tests.accelerator.placing import CPU, DEVICES, FIRST, moved, on_cpu, on_streams, onto, some_devices
from tests.families.catalogue import named
from tests.families.family import build
from tests.families.law import Weighing, quiet, weigh
from tests.support import beside_plain, handwritten, runs_alive
from tests.support.beside_plain import SEED, Case, count_rows, shared_names, unwrapped
from tests.support.drawn_models import IDS, drawn_model
from tests.support.open_models import batch_of, model_of
from tests.support.outcomes import Outcome, differences, noted
from tests.support.plain_loop import REMATS, Tree, accumulated, one_thread, parts_of, same_bits, weights_of
from tests.support.planned import pipe_by_costs

FAMILIES = ("llama", "gpt2", "bert", "t5", "vit")
ON_CPU = "dropped", "whole numbers", "translator", "encoder"
"""Models that make tensors on the CPU in their forward, and run on no device."""
CASES: dict[str, Case] = {name: case for name, case in handwritten.CASES.items() if name not in ON_CPU}
CASES |= {name: Case(partial(model_of, name), partial(batch_of, name, 1), None, None, deep=2) for name in FAMILIES}
ROWS = 9


@cache
def weighing_of(name: str, micro_batches: int) -> Weighing:
    """What each micro-batch's own loss counts for, and what its forward is told."""
    if name not in FAMILIES:
        rows = [count_rows(part) for part in parts_of(CASES[name].inputs(ROWS), micro_batches)]
        return Weighing(None, [count / sum(rows) for count in rows])
    given = batch_of(name, rows=ROWS)
    with quiet():
        parts: list[Any] = parts_of(given, micro_batches)
        return weigh(build(named(name), dropout=False), given, parts)


@one_thread()
def own_loop(name: str, model: nn.Module, traced: TracedModel, inputs: Tree, targets: Tree, *, step: int) -> Tensor:
    """The loop over the model itself, on the first device."""
    case = CASES[name]
    parts = [onto(part, FIRST) for part in parts_of(inputs, beside_plain.M)]
    weighing = weighing_of(name, beside_plain.M)
    wanted: Sequence[Tree] = [None] * len(parts)
    if targets is not None:
        wanted = [onto(part, FIRST) for part in parts_of(targets, beside_plain.M)]

    def loss_of(m: int, part: Tree, target: Tree) -> Tensor:
        given = arguments(model, unwrapped(part))
        with traced.rng_scope(SEED, step, m):
            output = model(*given.args, **given.kwargs, **onto(weighing.told, FIRST))
        return own_loss(output) if case.loss_fn is None else case.loss_fn(output, target)

    losses = (loss_of(m, *pair) for m, pair in enumerate(zip(parts, wanted, strict=True)))
    return accumulated(losses, weighing.shares)


def trained(draw: Random) -> tuple[list[str], str]:
    """Two steps of a model, in any cut, schedule, remat and driver, and an evaluation between."""
    name = draw.choice([*CASES])
    case, schedule = CASES[name], draw.choice([*SCHEDULES])
    ranks = draw.randint(1, case.deep // SCHEDULES[schedule].stages_per_rank)
    settings: dict[str, Any] = {
        "schedule": schedule,
        "devices": some_devices(draw, ranks),
        "remat": draw.choice(REMATS),
        "driver": draw.choice(["threads", "lockstep"]),
    }
    places = [draw.choice([*DEVICES, CPU]) for _ in range(2)]
    said = f"{name}, {settings}, {places}"
    plain, model = case.model(), case.model()
    moved([plain], FIRST)
    given = case.inputs(ROWS), None if case.target is None else case.target(ROWS)
    # a part of a mini-batch lies as it does where it was copied to, not as a part of a copy
    beside = [onto(tree, place if place == CPU else FIRST) for tree, place in zip(given, places, strict=True)]
    sample = unwrapped(parts_of(case.inputs(5) if case.sample is None else case.sample, beside_plain.M)[0])
    traced = TracedModel(plain, onto(sample, FIRST), case.blocks)
    wrong: list[str] = []
    with on_streams(draw):
        pipe = case.pipe(model, ranks, **settings)
        shared = shared_names(pipe)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (plain, model)]
        for at, trains in enumerate((True, False, True)):
            plain.train(trains)
            pipe.train(trains)
            with torch.set_grad_enabled(trains):
                found = beside_plain.train_piped(case, pipe, *map(onto, given, places))
                expected = own_loop(name, plain, traced, *beside, step=at // 2)
            wrong += [] if same_bits(found.cpu(), expected.cpu()) else [f"{at} loss"]
            wrong += unlike(on_cpu(noted(model, at)), on_cpu(noted(plain, at)), shared)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if shared:
                plain.load_state_dict(model.state_dict())
        pipe.close()
    return wrong, said


def unlike(found: Outcome, expected: Outcome, shared: set[str]) -> list[str]:
    """By what they differ; of what several layers use, gradients are added up in another order, and are near."""

    def is_near(name: str) -> bool:
        one, other = found[name], expected[name]
        if name.split(" ")[-1] not in shared or one is None or other is None:
            return False
        return float((one - other).abs().max()) <= 4e-6 * (float(other.abs().max()) or 1.0)

    return [name for name in differences(found, expected) if not is_near(name)]


class Own(runs_alive.Plain):
    """The loop over a model itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([model], 0, 1)
        moved([model], FIRST)
        self.device = FIRST
        self.traced = TracedModel(model, parts_of(runs_alive.TARGET.to(FIRST), runs_alive.M)[0], None)

    def run(self, m: int, part: Tree, held: object) -> Any:
        with self.traced.rng_scope(runs_alive.SEED, self.step_number, m):
            return self.module(part)


NAMES = ("collections", "in place", "constants", "other methods")
"""Models that take vectors, and give some that are as long."""


def told(draw: Random) -> tuple[list[str], str]:
    """Calls whose backwards come later, steps and evaluations between, of pipes of two models."""
    story = [(draw.choice(runs_alive.ACTS), draw.randrange(4)) for _ in range(draw.randint(3, 9))]
    settings: dict[str, Any] = {
        "sample": runs_alive.TARGET,
        "costs": "params",
        "seed": runs_alive.SEED,
        "schedule": draw.choice(["gpipe", "1f1b", "zb_h1"]),
        "devices": some_devices(draw, 2),
        "remat": draw.choice(REMATS),
        "driver": draw.choice(["threads", "lockstep"]),
    }
    choices: list[str | int] = [*NAMES, draw.randrange(1000)]
    names = [draw.choice(choices) for _ in range(2)]
    if settings["remat"] == "offload" and not set(names) <= set(NAMES):
        settings["remat"] = "never"  # a mixture needs values to be counted
    plain = [Own(vector_model(name)) for name in names]
    expected = [tensor.cpu() for tensor in runs_alive.tell(story, plain)]
    with on_streams(draw):
        pipes = [pipe_by_costs(vector_model(name), 2, runs_alive.M, **settings) for name in names]
        sides = list(map(runs_alive.Piped, pipes))
        for side in sides:
            side.device = draw.choice(DEVICES)
        found = [tensor.cpu() for tensor in runs_alive.tell(story, sides)]
        shared = {name for pipe in pipes for name in shared_names(pipe)}
        state = on_cpu(runs_alive.state_of(sides))
        for pipe in pipes:
            pipe.close()
    wrong = [
        f"{at} of the story"
        for at, (one, two) in enumerate(zip(found, expected, strict=True))
        if not same_bits(one, two)
    ]
    return wrong + unlike(state, on_cpu(runs_alive.state_of(plain)), shared), f"{names}, {story}, {settings}"


def vector_model(name: str | int) -> nn.Module:
    if isinstance(name, str):
        return CASES[name].model()
    with weights_of(name):
        return OfVectors(drawn_model(name))


class OfVectors(nn.Module):
    """A drawn model without its tokens: the vectors decide them."""

    def __init__(self, drawn: nn.Module) -> None:
        super().__init__()
        self.drawn = drawn

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.drawn(x, (10 * x[:, 0]).long() % IDS)
        return made
