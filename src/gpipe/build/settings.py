"""What the user gave to `GPipe`, and what it comes to once all is checked and the defaults are filled in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import nn

from gpipe.build.arguments import (
    Mistakes,
    as_int,
    check_layers,
    count_stages,
    is_count,
    read_devices,
    read_remat,
    read_seed,
)
from gpipe.comm.mesh import Position
from gpipe.costs.counts import count_flops, count_parameters
from gpipe.costs.measure import as_in_training, measure_by, measure_seconds
from gpipe.layers.build import Layers, Outline, named_layers
from gpipe.layers.invalid_layers import find_without_values
from gpipe.layers.tied import Tied, tie
from gpipe.plan.lower import Remat
from gpipe.plan.partition import Balance, Partition, given, partition
from gpipe.plan.schedules import SCHEDULES
from gpipe.values.input_checks import find_strange_values
from gpipe.values.microbatch import count_rows, split
from gpipe.values.tree import Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Driver: TypeAlias = Literal["threads", "lockstep", "process"]
Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None


@dataclass(frozen=True, eq=False)
class Arguments:
    """What the user gave to `GPipe`, as it was given; see there."""

    layers: Layers
    partitions: int | Sequence[int]
    micro_batches: int
    costs: Costs
    sample: Tree
    balance: Balance
    devices: object
    schedule: str
    remat: object
    deferred_batch_norm: bool
    sync_batch_norm: bool
    ties: Sequence[Sequence[str]]
    seed: int | None
    intra_op_threads: int
    driver: str | None
    mesh: "DeviceMesh | None"

    @property
    def in_seconds(self) -> bool:
        """Whether costs are to be measured as time."""
        return self.costs == "time" or (self.costs is None and self.sample is not None)


@dataclass(frozen=True)
class Settings:
    """What a pipe is made of, after all has been checked."""

    layers: dict[str, nn.Module]
    partition: Partition
    in_seconds: bool  # the costs were measured
    micro_batches: int
    remat: tuple[Remat, ...]
    devices: tuple[torch.device, ...]
    schedule: str
    driver: Driver | None
    seed: int
    intra_op_threads: int
    deferred_batch_norm: bool
    sync_batch_norm: bool
    position: Position | None = None  # of this process, if there are several
    tied: Tied = ()  # over processes: where identity cannot show it

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each partition."""
        return self.partition.layers

    @property
    def costs(self) -> tuple[float, ...]:
        """What each layer costs."""
        return self.partition.chain.costs


def settle(asked: Arguments, position: Position | None = None, sketch: Outline | None = None) -> Settings:
    """Checks everything and fills in the defaults.

    With the sketch of one of several processes, layers that are given as callables stay on the meta device.

    Raises:
        ValueError: Lists every mistake, each with what to do.
    """
    mistakes = Mistakes()
    seed = read_seed(asked.seed, mistakes)
    named, wrong = named_layers(asked.layers, seed) if sketch is None else (sketch.layers, sketch.mistakes)
    known = 0 if wrong else len(named)
    _check_measurable(asked, sketch, mistakes)
    tied = check_layers(named, wrong, asked.ties, mistakes)
    _check_numbers_and_names(asked, mistakes)
    _check_costs(asked.costs, asked.sample, known, mistakes)
    mistakes.found += find_strange_values("sample", asked.sample)
    stages = count_stages(asked.partitions, known, mistakes)
    remats = read_remat(asked.remat, stages, mistakes)
    devices = read_devices(asked.devices, stages, position, mistakes)
    makers = {} if sketch is None else sketch.makers
    if all(device.type != "meta" for device in devices):
        modules = {name: layer for at, (name, layer) in enumerate(named.items()) if at not in makers}
        mistakes.found += find_without_values(modules)
    mistakes.raise_all()
    if position is None:
        tie(tied)
    return Settings(
        layers=named,
        partition=_cut(asked, list(named.values()), remats, devices[0]),
        in_seconds=asked.in_seconds,
        micro_batches=asked.micro_batches,
        remat=remats,
        devices=devices,
        schedule=asked.schedule,
        driver=asked.driver,  # type: ignore[arg-type]  # checked above
        seed=seed,
        intra_op_threads=asked.intra_op_threads,
        deferred_batch_norm=asked.deferred_batch_norm,
        sync_batch_norm=asked.sync_batch_norm,
        position=position,
    )


def _check_measurable(asked: Arguments, sketch: Outline | None, mistakes: Mistakes) -> None:
    mistakes.check(
        sketch is None or not sketch.makers or not (asked.in_seconds or callable(asked.costs)),
        "costs cannot be measured where no process has all layers; give costs=[...], 'flops' or 'params'",
    )


def _check_numbers_and_names(asked: Arguments, mistakes: Mistakes) -> None:
    m, threads = asked.micro_batches, asked.intra_op_threads
    mistakes.check(is_count(m), f"micro_batches={m!r}; give M, a whole number of at least 1{as_int(m)}")
    mistakes.check(
        is_count(threads), f"intra_op_threads={threads!r}; give a whole number of at least 1{as_int(threads)}"
    )
    mistakes.check_known("schedule", asked.schedule, SCHEDULES)
    if asked.driver is not None:
        mistakes.check_known("driver", asked.driver, get_args(Driver))
    mistakes.check_known("balance", asked.balance, get_args(Balance))


def _check_costs(costs: Costs, sample: Tree, layers: int, mistakes: Mistakes) -> None:
    by_name = isinstance(costs, str)
    if callable(costs) or (by_name and costs in ("time", "flops")):
        wanted = repr(costs) if by_name else "a function"
        mistakes.check(sample is not None, f"costs={wanted} needs sample=, an example mini-batch of inputs")
    elif isinstance(costs, Sequence) and not by_name:
        mistakes.check(
            not layers or len(costs) == layers,
            f"costs has {len(costs)} numbers for {layers} layers; give one for each",
        )
        for at, cost in enumerate(costs):
            good = isinstance(cost, (int, float)) and 0 <= cost < float("inf")
            mistakes.check(good, f"costs[{at}]={cost!r}; a cost is a finite number of at least 0")
    else:
        mistakes.check(
            costs is None or (by_name and costs == "params"),
            f"costs={costs!r}; give one number a layer, 'params', 'time', 'flops', a function, or None",
        )


def _cut(asked: Arguments, layers: Sequence[nn.Module], remats: Sequence[Remat], device: torch.device) -> Partition:
    """Which layers go together: as the user says, or by what they cost."""
    sample = _first_micro_batch(asked.sample, asked.micro_batches)
    with as_in_training(device, asked.intra_op_threads):
        costs = _find_costs("time" if asked.in_seconds else asked.costs, layers, sample, device, remats)
    if isinstance(asked.partitions, int):
        return partition(costs, asked.partitions, balance=asked.balance)
    return given(asked.partitions, costs)


def _find_costs(
    costs: Costs, layers: Sequence[nn.Module], sample: Tree, device: torch.device, remats: Sequence[Remat]
) -> Sequence[float]:
    if callable(costs):
        return measure_by(layers, sample, costs)
    match costs:
        case "time":
            return measure_seconds(layers, sample, device, recomputes="never" not in remats)
        case "flops":
            return count_flops(layers, sample)
        case None | "params":
            return count_parameters(layers)
        case _:
            return costs


def _first_micro_batch(sample: Tree, micro_batches: int) -> Tree:
    if sample is None:
        return None
    rows = count_rows(sample)
    return split(sample, rows, min(micro_batches, rows), "sample")[0]
