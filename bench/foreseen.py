"""Compares the predicted time and memory of a step with the measured ones: `python -m bench.foreseen`.

Costs and steps are measured in turns, so that both see the same load by other processes, which is printed with them.
Memory is counted, and does not depend on the load.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.makespans import Sleeper
from bench.report import describe, table, with_time_left, write
from bench.workloads import sleepers, squared_error, token_loss
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.planner.other_processes import Meter
from gpipe.planner.profile import profile_layers
from gpipe.planner.search.profile import bounds
from gpipe.schedule.simulate import simulate

STEPS = 5
"""Of each round, behind one that warms up."""


@dataclass(frozen=True)
class Network:
    """Layers, a mini-batch and a loss."""

    build: Callable[[], list[nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    sleeps: bool = False


def _tokens(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _vectors(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def _images(rows: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(10, (rows,))


def _mlp() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(8)]


def _conv() -> list[nn.Module]:
    inner = [
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(8)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return [nn.Conv2d(3, 32, 3, padding=1), *inner, head]


NETWORKS = {
    "transformer": Network(
        partial(transformer_lm, layers=6, model_dim=128, ffn_dim=512, heads=4, vocab=1000, dropout=0.0),
        partial(_tokens, 16, 64, 1000),
        token_loss,
    ),
    "amoebanet": Network(
        partial(amoebanet_d, layers=6, filters=32, classes=10, dropout=0.0), partial(_images, 32, 64), F.cross_entropy
    ),
    "mlp": Network(_mlp, partial(_vectors, 1024, 256), squared_error),
    "conv": Network(_conv, partial(_images, 32, 32), F.cross_entropy),
    "sleeping": Network(partial(sleepers, [0.003] * 8), partial(_vectors, 32, 4), squared_error, sleeps=True),
    "sleeping unevenly": Network(
        partial(sleepers, [0.002, 0.004, 0.003, 0.002, 0.005, 0.003, 0.002, 0.003]),
        partial(_vectors, 32, 4), squared_error, sleeps=True,
    ),
    "sleeping in parts": Network(
        lambda: [Sleeper(0.005) for _ in range(8)], partial(_vectors, 32, 4), squared_error, sleeps=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """The settings of a training."""

    network: str
    partitions: int
    micro_batches: int
    remat: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.network} K={self.partitions} M={self.micro_batches} {self.schedule} remat {self.remat}"


def _each(text: str) -> Iterator[Configuration]:
    for line in text.strip().splitlines():
        network, k, m, remat, schedule = line.rsplit(maxsplit=4)
        yield Configuration(network.strip(), int(k), int(m), remat, schedule)


CONFIGURATIONS = list(
    _each("""
        transformer        1  4 never       gpipe
        transformer        2  4 never       gpipe
        transformer        2  8 always      gpipe
        transformer        2  8 always      1f1b
        transformer        2 16 except_last 1f1b
        amoebanet          1  8 always      gpipe
        amoebanet          2  2 never       gpipe
        amoebanet          2  8 always      gpipe
        amoebanet          2  8 never       1f1b
        amoebanet          2 16 always      1f1b
        mlp                1  8 never       gpipe
        mlp                2  8 always      1f1b
        mlp                2 16 never       gpipe
        mlp                2  8 never       zb_h1
        conv               1  4 except_last gpipe
        conv               2  4 never       gpipe
        conv               2  8 always      1f1b
        conv               2 16 never       interleaved
        sleeping           8 16 always      gpipe
        sleeping           8 32 never       1f1b
        sleeping           4 16 never       interleaved
        sleeping unevenly  4 16 always      1f1b
        sleeping unevenly  8 16 except_last gpipe
        sleeping in parts  8 16 never       zb_h1
        sleeping in parts  4 16 never       zb_v
    """)
)
HELD = list(
    _each("""
        transformer        2  8 never       zb_h1
        transformer        2  8 never       interleaved
        transformer        2  8 always      interleaved
        transformer        2  8 never       zb_v
        amoebanet          2  8 never       zb_h1
        amoebanet          2  8 never       interleaved
        mlp                2  8 never       interleaved
        mlp                2  8 always      interleaved
        mlp                2  8 never       zb_v
        mlp                2  8 never       interleaved_zb
        conv               2  8 never       zb_h1
        conv               2  8 always      interleaved
        conv               2  8 never       zb_v
    """)
)
"""Further ones, of which bytes alone are compared."""


@dataclass
class Seen:
    """Predictions and measurements of one configuration, by round."""

    pipe: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # the median of each round
    others: list[float] = field(default_factory=list)  # cores
    foretold_bytes: tuple[int, ...] = ()
    measured_bytes: tuple[int, ...] = ()

    def error(self, foretold: Sequence[float]) -> float:
        """Returns the relative difference of prediction and measurement in the same round."""
        return median(told / real for told, real in zip(foretold, self.steps, strict=True)) - 1

    @property
    def byte_errors(self) -> list[float]:
        """Returns the relative error of the predicted memory of each rank."""
        return [told / real - 1 for told, real in zip(self.foretold_bytes, self.measured_bytes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.foreseen", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--keep", default="foreseen")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in CONFIGURATIONS if options.only in str(each)]
    seen = {each: Seen() for each in (*CONFIGURATIONS, *HELD) if options.only in str(each)}
    for each in seen:
        compare_bytes(each, seen[each])
    about = facts()
    turns = [each for _ in range(options.rounds) for each in chosen]
    for each in with_time_left(turns, "foreseen"):
        compare_seconds(each, seen[each])
        if each is chosen[-1]:  # a round is done
            text = f"# A step foretold and measured\n\n{describe(about)}\n\n{_seconds(seen)}\n\n{_bytes(seen)}"
            kept = [asdict(one) | asdict(found) for one, found in seen.items()]
            write(options.keep, text, {"facts": about, "options": vars(options), "configurations": kept})


def _plan(each: Configuration, layers: list[nn.Module], inputs: Tensor, *, measure: bool) -> gpipe.Plan:
    k = each.partitions
    return gpipe.find_plan(
        layers, inputs, k, partitions=k, micro_batches=each.micro_batches, schedule=each.schedule, measure=measure
    )


def _pipe(each: Configuration, layers: list[nn.Module], plan: gpipe.Plan, **more: Any) -> gpipe.GPipe:
    return gpipe.GPipe(
        layers,
        list(plan.layers_per_partition),
        each.micro_batches,
        schedule=plan.as_schedule(),
        remat=each.remat,
        seed=0,
        **more,
    )


def compare_seconds(each: Configuration, seen: Seen) -> None:
    """Predicts the time of a step, and measures steps."""
    network = NETWORKS[each.network]
    torch.manual_seed(0)
    layers, (inputs, targets) = network.build(), network.batch()
    plan = _plan(each, layers, inputs, measure=True)
    with _pipe(each, layers, plan, sample=inputs) as pipe:
        seen.pipe.append(pipe.prediction.timeline.seconds)
        seen.plan.append(simulate(pipe.program, plan.costs).timeline.seconds)
        pipe.step(inputs, targets, network.loss_fn)
        meter, taken = Meter(), []
        for _ in range(STEPS):
            pipe.zero_grad()
            start = time.perf_counter()
            pipe.step(inputs, targets, network.loss_fn)
            taken.append(time.perf_counter() - start)
        seen.steps.append(median(taken))
        if (others := meter.others()) is not None:
            seen.others.append(others.cores)


def compare_bytes(each: Configuration, seen: Seen) -> None:
    """Predicts and measures the peak memory of each rank, without weights, gradients and optimizer state.

    The mini-batch is not included, because the caller holds it. The first step is not measured, because it includes
    verification.
    """
    network = NETWORKS[each.network]
    torch.manual_seed(0)
    layers, (inputs, targets) = network.build(), network.batch()
    plan = _plan(each, layers, inputs, measure=False)
    rows = len(inputs) // each.micro_batches
    sized = profile_layers(layers, {rows: inputs[:rows]}, [""] * len(layers), parts=True).of_micro_batch(rows)
    costs = [replace(sized.cost(*run, speed=1.0), state=0) for run in bounds(plan.layers_per_partition)]
    inputs_of_stage = sized.entering(0, plan.layers_per_partition[0])
    costs[0] = replace(costs[0], boundary=costs[0].boundary - round(inputs_of_stage))
    with _pipe(each, layers, plan, driver="lockstep") as pipe:
        seen.foretold_bytes = simulate(pipe.program, costs).peak_bytes
        pipe.step(inputs, targets, network.loss_fn)
        with gpipe.record(pipe, memory=True) as recording:
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(inputs, targets, network.loss_fn)
        seen.measured_bytes = tuple(held.activations or 0 for held in recording.memory().values())


def _seconds(seen: dict[Configuration, Seen]) -> str:
    header = ["", "step, ms", "`pipe.prediction`, ms", "error", "`find_plan`, ms", "error", "others' cores"]
    lines = [
        [
            str(each),
            f"{1e3 * median(found.steps):.1f}",
            *(f"{1e3 * median(found.pipe):.1f}", f"{found.error(found.pipe):+.1%}"),
            *(f"{1e3 * median(found.plan):.1f}", f"{found.error(found.plan):+.1%}"),
            f"{median(found.others or [0.0]):.2f}",
        ]
        for each, found in seen.items()
        if found.steps
    ]
    ends = [
        f"{name}: {_summary([abs(one.error(told(one))) for one in seen.values() if one.steps])} (goal: 10 % and 20 %)"
        for name, told in (("`pipe.prediction`", attrgetter("pipe")), ("`find_plan`", attrgetter("plan")))
    ]
    return "\n\n".join(["## Seconds", SECONDS, table(header, lines), "  \n".join(ends)])


SECONDS = """The median of steps, round after round; what the pipe foretells of itself by its `sample`, and by what
`find_plan(measure=True)` finds of its layers; errors are those of the same round, the median of them."""


def _bytes(seen: dict[Configuration, Seen]) -> str:
    awake = {each: found for each, found in seen.items() if not NETWORKS[each.network].sleeps}
    header = ["", "measured, KiB by rank", "foretold, KiB by rank", "errors"]
    lines = [
        [
            str(each),
            " ".join(f"{size / 2**10:.0f}" for size in found.measured_bytes),
            " ".join(f"{size / 2**10:.0f}" for size in found.foretold_bytes),
            " ".join(f"{error:+.1%}" for error in found.byte_errors),
        ]
        for each, found in awake.items()
    ]
    ends = _summary([abs(error) for found in awake.values() for error in found.byte_errors])
    return "\n\n".join(["## Bytes of activations at the peak", table(header, lines), f"{ends} (goal: 5 %)"])


def _summary(errors: Sequence[float]) -> str:
    if len(errors) < 2:
        return "too few"
    return f"median error {median(errors):.1%}, 90th percentile {quantiles(errors, n=10)[-1]:.1%}, of {len(errors)}"


if __name__ == "__main__":
    main()
