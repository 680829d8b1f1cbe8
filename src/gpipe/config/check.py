"""What the user gave to `GPipe`, some of it perhaps by a plan: checked, all of it together, and read.

Mistakes are raised in one error.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn

from gpipe._torch.accelerator import CPU, accelerators, numbered
from gpipe.batch.microbatch import TWO_ROWS, find_unsplittable, first_micro_batch
from gpipe.config.options import BatchNorm, Driver, Processes, Remat, read_driver
from gpipe.config.settings import Settings
from gpipe.distributed.mesh import Position, world_size
from gpipe.errors import int_remedy, is_count
from gpipe.planner.search.candidates import AUTO
from gpipe.planner.search.plan import Plan
from gpipe.schedule import lower
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import MAX_MICRO_BATCHES, Program, ScheduleError, too_many_micro_batches
from gpipe.schedule.schedules import SCHEDULES, Placement, Schedule
from gpipe.schedule.schedules.by_name import (
    Interleaved,
    Maker,
    Named,
    Sliced,
    no_table,
    schedule_of,
    schedule_of_function,
    schedule_of_program,
    unknown_schedule,
)
from gpipe.stages.invalid_layers import find_invalid_layers
from gpipe.stages.remote_layers import Outline, find_without_values
from gpipe.stages.sequence import Layers, build_layers
from gpipe.stages.shared_weights import Tied, find_ties
from gpipe.stages.skips import find_pops
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import ModelLayers, is_model, read_model, why_not_layers
from gpipe.tracing.model import TracedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None
RematOf: TypeAlias = tuple[lower.Remat, ...]  # each stage
UNSAID: dict[str, Any] = {"partitions": None, "schedule": "gpipe", "remat": "always"}
"""The arguments that a plan alone gives, as they are where the user says nothing."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of `GPipe`, as they were given, and the two that only `find_plan` adds."""

    model: Layers | nn.Module | ModelLayers
    partitions: Any
    micro_batches: Any
    sample: Tree = None
    plan: Plan | None = None
    schedule: Named | Program | Maker = "gpipe"
    remat: object = "always"
    devices: object = None
    mesh: "DeviceMesh | None" = None
    batch_norm: BatchNorm = "micro"
    ties: Sequence[Sequence[str]] = ()
    seed: int | None = None
    driver: str | Driver | None = None
    costs: Costs = None
    balance: Balance = "variance"

    @property
    def in_seconds(self) -> bool:
        """Whether the layers are timed."""
        return self.plan is None and (self.costs == "time" or (self.costs is None and self.sample is not None))

    @property
    def fits_remat(self) -> bool:
        """Whether remat is found, so that the stages fit in memory."""
        return self.remat == AUTO or isinstance(self.remat, Remat)

    @property
    def memory(self) -> Any:
        """The bytes that each rank may hold; None if that is not said."""
        return self.remat.memory if isinstance(self.remat, Remat) else None

    def follow_plan(self) -> "Arguments":
        """Returns the arguments with those that the plan has; M may be given beside a plan, and is taken instead."""
        plan = self.plan
        if plan is None:
            return self
        if not isinstance(plan, Plan):
            raise TypeError(f"plan= is a {type(plan).__name__}; give what gpipe.find_plan gave")
        said = [name for name, unsaid in UNSAID.items() if getattr(self, name) != unsaid]
        if said:
            raise ValueError(f"plan= says {', '.join(f'{name}=' for name in said)} already; leave them out, or plan=")
        return replace(
            self,
            partitions=list(plan.layers_per_partition),
            micro_batches=plan.micro_batches if self.micro_batches is None else self.micro_batches,
            schedule=plan.as_schedule(),
            remat=list(plan.remat),
        )


class Mistakes(list[str]):
    """The mistakes noted so far."""

    def check(self, condition: bool, text: str) -> bool:
        if not condition:
            self.append(text)
        return condition

    def raise_all(self) -> None:
        if self:
            raise ValueError("GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in dict.fromkeys(self)))


def check(
    asked: Arguments, position: Position | None, outline: Outline | None, traced: TracedModel | None, *others: str
) -> tuple[Settings, Placement, RematOf]:
    """Reads all arguments: the settings, the rank and the remat of each stage.

    Raises:
        ValueError: If there are mistakes. It lists all of them, after `others`, each with what to do.
    """
    mistakes = Mistakes(others)
    seed = _read_seed(asked.seed, mistakes)
    layers: dict[str, nn.Module] = {}
    wrong = why_not_layers(asked.model) if traced is None else []
    mistakes += wrong
    if traced is not None:
        layers = dict(traced.layers)
        mistakes.check(not asked.ties, "ties= is for layers; a model has its parameters tied already")
    elif not is_model(asked.model):
        layers, wrong = build_layers(asked.model, seed) if outline is None else (outline.layers, outline.mistakes)
    known = len(layers) + len(wrong) if layers else 0
    tied = _check_layers(layers, wrong, asked.ties, mistakes) if traced is None else ()
    driver = _read_how_it_runs(asked, mistakes)
    cut = 0 if asked.plan is None else sum(asked.plan.layers_per_partition)
    told = f"plan= is of another network: {cut} layers, and here are {known}; plan these by gpipe.find_plan"
    mistakes.check(cut in (0, known) or not known, told)
    _check_costs(asked, known, bool(outline and outline.makers), traced, mistakes)
    mistakes += find_unsplittable("sample", asked.sample)
    schedule = read_schedule(asked, mistakes)
    placement = _read_placement(asked, schedule, known, mistakes)
    if schedule.slices > 1:
        _check_slices(asked, traced, mistakes)
    remat = _read_remat(asked, len(placement), len(set(placement)), mistakes)
    devices = _read_devices(asked.devices, len(set(placement)), position, mistakes)
    if traced is None:
        makers = {} if outline is None else outline.makers
        modules = {name: layer for at, (name, layer) in enumerate(layers.items()) if at not in makers}
        mistakes += find_without_values(modules)
    mistakes.raise_all()
    settings = Settings(layers, traced, tied, schedule, devices, driver, asked.batch_norm, seed)
    return settings, placement, remat


def read_model_of(asked: Arguments) -> TracedModel | None:
    """Traces the model on the first micro-batch of the sample; None of a sequence of layers."""
    fits = is_model(asked.model) and is_count(asked.micro_batches)
    return read_model(asked.model, first_rows(asked) if fits else asked.sample)


def first_rows(asked: Arguments) -> Tree:
    """Returns the first micro-batch of the sample."""
    return first_micro_batch(asked.sample, asked.micro_batches, least=TWO_ROWS)


def draw_seed() -> int:
    """Draws a seed from torch's generator."""
    return int(torch.randint(2**62, (), device="cpu").item())


def _read_seed(seed: int | None, mistakes: Mistakes) -> int:
    if seed is None:
        return draw_seed()
    fits = isinstance(seed, int) and -(2**63) <= seed < 2**63
    mistakes.check(fits, f"seed={seed!r}; give a whole number of 64 bits, or None to draw one from torch")
    return seed if fits else 0


def _check_layers(
    named: dict[str, nn.Module], wrong: Sequence[str], ties: Sequence[Sequence[str]], mistakes: Mistakes
) -> Tied:
    """Notes layers that cannot be run, beside what is known to be wrong; gives the slots of tied weights."""
    mistakes += wrong
    mistakes.check(bool(named) or bool(wrong), "layers is empty; give at least one layer")
    mistakes += find_invalid_layers(named)
    try:
        find_pops(list(named.values()))
    except ValueError as error:
        mistakes += str(error).splitlines()
    if not all(isinstance(name, str) for group in map(_listed, _listed(ties)) for name in group):
        mistakes.append(f"ties={ties!r}; give groups of names: [('0.weight', '5.weight')]")
        return ()
    tied, wrong_ties = find_ties(named, ties)
    mistakes += wrong_ties
    return tied


def _listed(value: object) -> list[Any]:
    """What is in a list; of what is none, None."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [None]


def _read_how_it_runs(asked: Arguments, mistakes: Mistakes) -> Driver:
    """Checks M and how ranks run; returns the driver."""
    m = asked.micro_batches
    mistakes.check(is_count(m), f"micro_batches={m!r}; give M, a whole number of at least 1{int_remedy(m)}")
    driver, wrong = read_driver(asked.driver, has_mesh=asked.mesh is not None)
    mistakes += wrong
    if asked.driver is None and asked.mesh is None and (size := world_size()) > 1:
        mistakes.append(
            f"driver= is not given, and torch.distributed has {size} processes. Pass driver='process' for one pipe "
            f"over all of them, or driver='threads' for a separate pipe in each"
        )
    if asked.mesh is not None and not isinstance(driver, Processes):
        mistakes.append(f"driver={driver.name!r} is for one process, and mesh= for several; leave one of them out")
    for name, value, known in (("batch_norm", asked.batch_norm, BatchNorm), ("balance", asked.balance, Balance)):
        words = ", ".join(map(repr, get_args(known)))
        mistakes.check(value in get_args(known), f"{name}={value!r}; known are {words}")
    if isinstance(driver, Processes) and driver.survive is True:
        synchronized = asked.batch_norm == "synchronized"
        refused = {
            "mesh= says where all replicas are: leave it out, each has its own processes": asked.mesh is not None,
            "batch_norm='synchronized' has layers of all replicas wait for each other in a collective": synchronized,
            "costs in seconds would cut each replica elsewhere; give plan= or partitions=[...], no sample=, or a "
            "plan of gpipe.find_plan(costs='params')": asked.in_seconds,
        }
        for why, is_given in refused.items():
            mistakes.check(not is_given, f"survive=True: {why}")
    return driver


def _check_costs(
    asked: Arguments, layers: int, is_spread: bool, traced: TracedModel | None, mistakes: Mistakes
) -> None:
    """Notes costs that cannot be, or cannot be measured; `is_spread`: no process has all layers."""
    costs = asked.costs
    by_name, measures = isinstance(costs, str), asked.in_seconds or callable(costs)
    if callable(costs) or (by_name and costs in ("time", "flops")):
        wanted = repr(costs) if by_name else "a function"
        mistakes.check(asked.sample is not None, f"costs={wanted} needs sample=, an example mini-batch of inputs")
    elif isinstance(costs, Sequence) and not by_name:
        told = f"costs has {len(costs)} numbers for {layers} layers; give one for each"
        mistakes.check(not layers or len(costs) == layers, told)
        for at, cost in enumerate(costs):
            good = isinstance(cost, (int, float)) and 0 <= cost < float("inf")
            mistakes.check(good, f"costs[{at}]={cost!r}; a cost is a finite number of at least 0")
            is_float = not isinstance(cost, int) or cost <= sys.float_info.max
            mistakes.check(is_float, f"costs[{at}] exceeds the largest number: take larger units")
    else:
        told = f"costs={costs!r}; give one number a layer, 'params', 'time', 'flops', a function, or None"
        mistakes.check(costs is None or (by_name and costs == "params"), told)
    told = "costs cannot be measured where no process has all layers; leave sample= out, or give plan="
    mistakes.check(not (is_spread and measures), told)
    if traced is not None:
        told = "costs='flops' counts layers that run by themselves; for a model give 'time' or 'params'"
        mistakes.check(costs != "flops", told)
        is_told = costs is not None and measures and traced.lacks_values
        mistakes.check(
            not is_told, "costs cannot be measured of a model without values; give costs=[...] or 'params'"
        )


def _one_for_each(name: str, value: object, count: int, places: str, mistakes: Mistakes) -> list[Any]:
    """What was given for each of so many places, or once for all; 0 where their number is not known."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    each = list(value) if several else [value] * max(count, 1)  # type: ignore[call-overload]  # just checked
    wrong = f"{name} has {len(each)} entries for {count} {places}; give one for each"
    mistakes.check(not count or len(each) == count, wrong)
    return each


def _read_remat(asked: Arguments, stages: int, ranks: int, mistakes: Mistakes) -> RematOf:
    """Reads the recomputation of each stage; where it is found later, for the time being everywhere."""
    remat = asked.remat
    if asked.schedule == AUTO:
        told = "schedule='auto' finds what to recompute within the memory; leave remat= out, or give gpipe.Remat(...)"
        mistakes.check(asked.fits_remat or remat == UNSAID["remat"], told)
    if asked.memory is not None or (asked.fits_remat and asked.schedule != AUTO):
        told = f"remat={remat!r} needs sample=, an example mini-batch, to count what layers keep"
        mistakes.check(asked.sample is not None, told)
    if asked.memory is not None:
        each = _one_for_each("memory", asked.memory, ranks, "partitions", mistakes)
        good = all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in each)
        told = f"memory={asked.memory!r}; give bytes, more than 0, one number or one for each partition"
        mistakes.check(good, told)
    if asked.fits_remat or asked.schedule == AUTO:
        return tuple[lower.Remat, ...](["always"]) * stages
    each = _one_for_each("remat", remat, stages, "stages", mistakes)
    number = "how many micro-batches at once keep what is inside, a whole number of at least 0"
    known = f"{', '.join(map(repr, lower.REMATS))}, or {number}; or one of these for each stage; or 'auto'"
    good = all(item >= 0 if type(item) is int else item in lower.REMATS for item in each)
    mistakes.check(good, f"remat={remat!r}; known are {known}")
    return tuple(each)


def _check_slices(asked: Arguments, traced: TracedModel | None, mistakes: Mistakes) -> None:
    """Notes what cannot be given where micro-batches are cut along their tokens."""
    told = f"schedule={asked.schedule!r}"
    is_model = f"{told} is for a causal language model of transformers, given with a sample; give its schedule alone"
    mistakes.check(traced is not None, is_model)
    mistakes.check(not asked.fits_remat, f"{told}: what slices keep is not counted; say remat= of each stage")
    told = f"{told}: statistics of BatchNorm are not put together of slices; leave batch_norm= out"
    mistakes.check(asked.batch_norm == "micro", told)


def _read_devices(
    devices: object, ranks: int, position: Position | None, mistakes: Mistakes
) -> tuple[torch.device, ...]:
    """The device of each partition; that of the process if there are several."""
    if position is not None:
        told = "devices is for one process; each of several has the device of the mesh, and of LOCAL_RANK"
        mistakes.check(devices is None, told)
        return (position.device,) * ranks
    if devices is None:
        there = accelerators() or [CPU]
        return tuple(there[rank % len(there)] for rank in range(ranks))
    each = _one_for_each("devices", devices, ranks, "partitions", mistakes)
    return tuple(device for item in each if (device := _read_device(item, mistakes)) is not None)


def _read_device(item: Any, mistakes: Mistakes) -> torch.device | None:
    try:
        device = torch.device(item)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("what is there has no values; gpipe.find_plan needs none")
    except Exception as error:  # torch has many kinds
        why, *_ = str(error).split("\n")
        mistakes.append(f"device {item!r} cannot be used: {why}")
        return None
    return numbered(device)


# What each rank holds and in which order it works: partitions, schedule.


def read_schedule(asked: Arguments, mistakes: Mistakes) -> Schedule:
    """Reads the schedule, whose tables are then made once each; GPipe's where it is a mistake."""
    wanted = asked.schedule
    try:
        if wanted == AUTO:
            found = SCHEDULES["gpipe"]
        elif isinstance(wanted, str | Interleaved | Sliced):
            found = schedule_of(wanted)
        elif isinstance(wanted, Program):
            found = schedule_of_program(wanted)
        elif callable(wanted):
            found = schedule_of_function(wanted, asked.micro_batches)
        else:
            mistakes.append(f"{unknown_schedule(wanted)} Or pass a Program, or a function of K and M.")
            found = SCHEDULES["gpipe"]
    except ValueError as error:
        is_program, is_name = isinstance(error, ScheduleError), isinstance(wanted, str)
        mistakes.append(f"{'schedule: ' * is_program}{error}{f', and {AUTO!r}' * is_name}")
        found = SCHEDULES["gpipe"]
    return found.once()


def count_ranks(asked: Arguments, schedule: Schedule) -> int:
    """K, the number of ranks, as far as the arguments can say it; else 0."""
    partitions, each = asked.partitions, schedule.stages_per_rank
    if isinstance(partitions, int):
        return partitions if is_count(partitions) else 0
    stages = len(partitions) if isinstance(partitions, Sequence) and not isinstance(partitions, str) else 0
    if each:
        return 0 if stages % each else stages // each

    def fits(ranks: int) -> bool:
        try:
            return len(schedule.placement(ranks, 0) or ()) == stages
        except Exception:  # of the user's function, which need not have a program for every K
            return False

    return next(filter(fits, range(stages, 0, -1)), 0)


def _read_placement(asked: Arguments, schedule: Schedule, layers: int, mistakes: Mistakes) -> Placement:
    """Reads the rank of each stage; nothing if it cannot be. `layers` is 0 where their number is not known."""
    partitions, m = asked.partitions, asked.micro_batches
    ranks, each = count_ranks(asked, schedule), schedule.stages_per_rank
    if asked.schedule == AUTO:
        told = "schedule='auto' finds the cuts; give partitions=K, or another schedule"
        mistakes.check(isinstance(partitions, int), told)
    if not _are_counts(partitions, ranks, each, layers, mistakes):
        return ()
    stages = ranks * max(each, 1)
    if layers and stages > layers:  # before a table is built of so many
        several = "" if stages == partitions else f", {stages} stages in all"
        remedy = "give at most that, or cut the layers finer"
        mistakes.append(f"partitions={partitions}{several}, but there are only {layers} layers; {remedy}")
        return ()
    try:
        placement = schedule.placement(ranks, each)
    except ValueError as error:  # of the user's function, say
        mistakes.append(f"schedule: {error}")
        return ()
    number = m * schedule.slices if is_count(m) else 0
    if placement is None:
        mistakes.append(f"schedule: {schedule.name} is not for K={ranks} ranks")
    elif number > MAX_MICRO_BATCHES:
        mistakes.append(too_many_micro_batches(number))
    elif number and schedule.slices == 1 and not schedule.table(placement, m):
        mistakes.append(no_table(schedule, placement, m))
    return placement or ()


def _are_counts(partitions: Any, ranks: int, each: int, layers: int, mistakes: Mistakes) -> bool:
    if isinstance(partitions, Sequence) and not isinstance(partitions, str) and partitions:
        counts = list(partitions)
        if mistakes.check(all(map(is_count, counts)), f"partitions={counts}; each partition needs at least 1 layer"):
            told = f"partitions={counts} adds up to {sum(counts)} layers, but there are {layers}"
            mistakes.check(not layers or sum(counts) == layers, told)
        places = f"puts {each} on each rank; give a multiple of that" if each else "is of another number of stages"
        return mistakes.check(ranks > 0, f"partitions={counts} has {len(counts)} stages, and the schedule {places}")
    several = isinstance(partitions, (set, np.ndarray, torch.Tensor))
    remedy = ", as a list of ints" if several else int_remedy(partitions)
    told = f"partitions={partitions!r}; give K, at least 1, or the layers of each partition{remedy}"
    return mistakes.check(is_count(partitions), told)
