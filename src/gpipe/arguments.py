"""Reads what the user gave to `GPipe`, and refuses what cannot be, all mistakes at once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from gpipe.plan.lower import REMATS, Remat
from gpipe.plan.partition import Balance, Partition, given, partition
from gpipe.plan.schedules import SCHEDULES
from gpipe.run.layers import Layers, Outline, find_scripted, named_layers
from gpipe.run.measure import as_in_training, count_flops, measure_by, measure_seconds
from gpipe.run.microbatch import Tree, count_rows, split
from gpipe.run.place import Place
from gpipe.run.shared import Tied, find_ties, tie
from gpipe.run.skips import find_pops

Driver: TypeAlias = Literal["threads", "lockstep", "process"]
Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None


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
    place: Place | None = None  # of this process, if there are several
    tied: Tied = ()  # over processes: where identity cannot show it

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each partition."""
        return self.partition.layers

    @property
    def costs(self) -> tuple[float, ...]:
        """What each layer costs."""
        return self.partition.chain.costs


class Mistakes:
    """Collects mistakes, to raise them together."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def check(self, condition: bool, text: str) -> bool:
        """Notes a mistake unless the condition holds."""
        if not condition:
            self.found.append(text)
        return condition

    def raise_all(self) -> None:
        """Raises what was found, if anything.

        Raises:
            ValueError: Lists every mistake.
        """
        if self.found:
            raise ValueError("GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in self.found))


def settle(
    layers: Layers,
    partitions: int | Sequence[int],
    micro_batches: int,
    *,
    costs: Costs,
    sample: Tree,
    balance: Balance,
    devices: object,
    schedule: str,
    remat: object,
    driver: str | None,
    ties: Sequence[Sequence[str]],
    seed: int | None,
    intra_op_threads: int,
    place: Place | None = None,
    sketch: Outline | None = None,
) -> Settings:
    """Checks everything and fills in the defaults.

    With the sketch of one of several processes, layers that are given as callables stay on the meta device.

    Raises:
        ValueError: Lists every mistake, each with what to do.
    """
    mistakes = Mistakes()
    seed = _read_seed(seed, mistakes)
    named, wrong = named_layers(layers, seed) if sketch is None else (sketch.layers, sketch.mistakes)
    in_seconds = costs == "time" or (costs is None and sample is not None)
    mistakes.check(
        sketch is None or not sketch.makers or not (in_seconds or callable(costs)),
        "costs cannot be measured where no process has all layers; give costs=[...], 'flops' or 'params'",
    )
    mistakes.found += wrong
    mistakes.check(bool(named) or bool(wrong), "layers is empty; give at least one layer")
    mistakes.found += find_scripted(named)
    _check_skips(named, mistakes)
    tied, wrong_ties = find_ties(named, ties)
    mistakes.found += wrong_ties
    mistakes.check(_is_count(micro_batches), f"micro_batches={micro_batches!r}; give M, a whole number of at least 1")
    mistakes.check(
        _is_count(intra_op_threads), f"intra_op_threads={intra_op_threads!r}; give a whole number of at least 1"
    )
    known = isinstance(schedule, str) and schedule in SCHEDULES
    mistakes.check(known, f"schedule={schedule!r}; known are {', '.join(map(repr, SCHEDULES))}")
    drivers = get_args(Driver)
    mistakes.check(driver in (None, *drivers), f"driver={driver!r}; known are {', '.join(map(repr, drivers))}")
    mistakes.check(
        balance in get_args(Balance), f"balance={balance!r}; known are {', '.join(map(repr, get_args(Balance)))}"
    )
    _check_costs(costs, sample, 0 if wrong else len(named), mistakes)
    stages = _count_stages(partitions, 0 if wrong else len(named), mistakes)
    remats = _read_remat(remat, stages, mistakes)
    places = _read_devices(devices, stages, mistakes) if place is None else (place.device,) * stages
    mistakes.check(
        place is None or devices is None,
        "devices is for one process; each of several has the device of the mesh, and of LOCAL_RANK",
    )
    mistakes.raise_all()
    if place is None:
        tie(tied)
    part = _first_micro_batch(sample, micro_batches)
    with as_in_training(places[0], intra_op_threads):
        numbers = _find_costs("time" if in_seconds else costs, list(named.values()), part, places[0], remats)
    if isinstance(partitions, int):
        cuts = partition(numbers, partitions, balance=balance)
    else:
        cuts = given(partitions, numbers)
    return Settings(
        named,
        cuts,
        in_seconds,
        micro_batches,
        remats,
        places,
        schedule,
        driver,  # type: ignore[arg-type]  # checked above
        seed,
        intra_op_threads,
        place,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _read_seed(seed: int | None, mistakes: Mistakes) -> int:
    if seed is None:
        return int(torch.randint(2**62, (), device="cpu").item())
    fits = isinstance(seed, int) and -(2**63) <= seed < 2**63
    mistakes.check(fits, f"seed={seed!r}; give a whole number of 64 bits, or None to draw one from torch")
    return seed if fits else 0


def _check_skips(named: dict[str, nn.Module], mistakes: Mistakes) -> None:
    try:
        find_pops(list(named.values()))
    except ValueError as error:
        mistakes.found += str(error).splitlines()


def _count_stages(partitions: int | Sequence[int], layers: int, mistakes: Mistakes) -> int:
    if isinstance(partitions, Sequence) and not isinstance(partitions, str) and partitions:
        if mistakes.check(
            all(map(_is_count, partitions)),
            f"partitions={list(partitions)}; each partition needs at least 1 layer",
        ):
            mistakes.check(
                not layers or sum(partitions) == layers,
                f"partitions={list(partitions)} adds up to {sum(partitions)} layers, but there are {layers}",
            )
        return len(partitions)
    if not mistakes.check(
        _is_count(partitions), f"partitions={partitions!r}; give K, at least 1, or the layers of each partition"
    ):
        return 0
    assert isinstance(partitions, int)
    if not mistakes.check(
        not layers or partitions <= layers,
        f"partitions={partitions}, but there are only {layers} layers; give at most that, or cut the layers finer",
    ):
        return 0
    return partitions


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
            return [max(1, sum(p.numel() for p in layer.parameters())) for layer in layers]
        case _:
            return costs


def _first_micro_batch(sample: Tree, micro_batches: int) -> Tree:
    if sample is None:
        return None
    rows = count_rows(sample)
    return split(sample, rows, min(micro_batches, rows), "sample")[0]


def _read_remat(remat: object, stages: int, mistakes: Mistakes) -> tuple[Remat, ...]:
    known = ", ".join(map(repr, REMATS))
    each = [remat] * max(stages, 1) if isinstance(remat, str) or not isinstance(remat, Sequence) else list(remat)
    mistakes.check(
        not stages or len(each) == stages, f"remat has {len(each)} entries for {stages} partitions; give one for each"
    )
    wrong = [item for item in each if item not in REMATS]
    mistakes.check(not wrong, f"remat={remat!r}; known are {known}, or one of them for each partition")
    return tuple(each)  # type: ignore[arg-type]  # checked above


def _read_devices(devices: object, stages: int, mistakes: Mistakes) -> tuple[torch.device, ...]:
    if devices is None:
        there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
        return tuple(there[stage % len(there)] for stage in range(stages))
    each: list[Any] = [devices] * max(stages, 1)
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        each = list(devices)
    mistakes.check(
        not stages or len(each) == stages,
        f"devices has {len(each)} entries for {stages} partitions; give one for each",
    )
    found = []
    for item in each:
        try:
            device = torch.device(item)
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:
            mistakes.found.append(f"device {item!r} cannot be used: {str(error).splitlines()[0]}")
            continue
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        found.append(device)
    return tuple(found)
