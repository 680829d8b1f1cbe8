"""What the user gave to `GPipe`, some of it perhaps by a plan: checked, all of it together, and read.

Mistakes are raised in one error.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn

from gpipe._torch.accelerator import CPU, accelerators, numbered
from gpipe.distributed.mesh import Position, world_size
from gpipe.errors import int_remedy, is_count
from gpipe.planner.search.found import Plan
from gpipe.planner.search.shapes import AUTO
from gpipe.schedule.lower import REMATS, Remat
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import MOST_MICRO_BATCHES, Program, too_many
from gpipe.schedule.schedules import SCHEDULES, Placement, Schedule
from gpipe.schedule.schedules.by_name import Maker, made_by, only, unknown, unplaced, unsliced, without_table
from gpipe.stages.microbatch import find_unsplittable
from gpipe.stages.sequence import Layers, Outline, build_layers, find_invalid_layers, find_without_values
from gpipe.stages.shared_weights import Tied, find_ties
from gpipe.stages.skips import find_pops
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import ModelLayers, is_model, why_not_layers
from gpipe.tracing.model import TracedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Driver: TypeAlias = Literal["threads", "lockstep", "process"]
Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None
UNSAID: dict[str, Any] = {"partitions": None, "schedule": "gpipe", "stages_per_rank": None, "remat": "always"}
"""The arguments that a plan alone gives, as they are where the user says nothing."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """What the user gave to `GPipe`, as it was given; see there."""

    model: Layers | nn.Module | ModelLayers
    partitions: int | Sequence[int]  # None if `plan` says it, until it does
    micro_batches: int  # likewise
    costs: Costs
    sample: Tree
    blocks: Sequence[str] | None
    balance: Balance
    devices: object
    schedule: str | Program | Maker
    stages_per_rank: int | None
    remat: object
    deferred_batch_norm: bool
    sync_batch_norm: bool
    ties: Sequence[Sequence[str]]
    seed: int | None
    intra_op_threads: int
    driver: str | None
    mesh: "DeviceMesh | None"
    survive: bool = False
    verify: bool = True
    slices: int = 1
    plan: Plan | None = None
    memory: object = None

    @property
    def in_seconds(self) -> bool:
        return self.costs == "time" or (self.costs is None and self.sample is not None)

    def follow_plan(self) -> "Arguments":
        """The arguments with what the plan says of them, if there is one.

        What the plan has measured is taken for the costs of the layers, where the user gives none; what it has
        counted, if there is no sample on which to measure them. M may be given beside a plan, and is taken instead:
        a loss curve depends on it, and on nothing else in a plan.
        """
        plan = self.plan
        if plan is None:
            return self
        if not isinstance(plan, Plan):
            raise TypeError(f"plan= is a {type(plan).__name__}; give what gpipe.find_plan gave")
        said = [name for name, unsaid in UNSAID.items() if getattr(self, name) != unsaid]
        if said:
            raise ValueError(f"plan= says {', '.join(f'{name}=' for name in said)} already; leave them out, or plan=")
        own = self.micro_batches in (None, plan.micro_batches)
        takes_costs = self.costs is None and own and (plan.measured or self.sample is None)
        return replace(
            self,
            partitions=list(plan.layers_per_partition),
            micro_batches=plan.micro_batches if own else self.micro_batches,
            schedule=plan.table or plan.schedule,
            stages_per_rank=None if plan.table else plan.stages_per_rank,
            remat=list(plan.remat),
            costs=plan.work if takes_costs else self.costs,
        )


ARGUMENTS = [field.name for field in fields(Arguments)]


class Mistakes(list[str]):
    """The mistakes noted so far."""

    def check(self, condition: bool, text: str) -> bool:
        if not condition:
            self.append(text)
        return condition

    def raise_all(self) -> None:
        if self:
            raise ValueError("GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in dict.fromkeys(self)))


@dataclass(frozen=True)
class Checked:
    """What the user gave, read and without mistakes; defaults are filled in where they depend on no cost."""

    layers: dict[str, nn.Module]
    placement: Placement  # the rank of each stage
    micro_batches: int
    slices: int  # of each micro-batch
    remat: tuple[Remat, ...]  # with "auto" everything, until costs are known
    devices: tuple[torch.device, ...]
    schedule: Schedule
    driver: Driver | None
    seed: int
    intra_op_threads: int
    deferred_batch_norm: bool
    sync_batch_norm: bool
    tied: Tied


def check(
    asked: Arguments, position: Position | None, outline: Outline | None, traced: TracedModel | None, *others: str
) -> tuple[Arguments, Checked]:
    """Checks all arguments of `settle`; a ValueError lists every mistake, behind `others`, each with what to do.

    Of a model without values the arguments that it gives have costs filled in.
    """
    mistakes = Mistakes(others)
    seed = _read_seed(asked.seed, mistakes)
    layers: dict[str, nn.Module] = {}
    wrong = why_not_layers(asked.model, asked.blocks) if traced is None else []
    mistakes += wrong
    if traced is not None:
        layers = dict(traced.layers)
    elif not is_model(asked.model):
        layers, wrong = build_layers(asked.model, seed) if outline is None else (outline.layers, outline.mistakes)
    known = len(layers) + len(wrong) if layers else 0
    tied = _check_layers(layers, wrong, asked.ties, mistakes) if traced is None else ()
    _check_numbers_and_names(asked, mistakes)
    cut = 0 if asked.plan is None else sum(asked.plan.layers_per_partition)
    told = f"plan= is of another network: {cut} layers, and here are {known}; plan these by gpipe.find_plan"
    mistakes.check(cut in (0, known) or not known, told)
    _check_costs(asked.costs, asked.sample, known, mistakes)
    apart, measures = outline is not None and bool(outline.makers), asked.in_seconds or callable(asked.costs)
    told = "costs cannot be measured where no process has all layers; give costs=[...], 'flops' or 'params'"
    mistakes.check(not (apart and measures), told)
    mistakes += find_unsplittable("sample", asked.sample)
    schedule = read_schedule(asked, mistakes)
    placement = _read_placement(asked, schedule, known, mistakes)
    _check_slices(asked, schedule, traced, mistakes)
    remat = _read_remat(asked.remat, len(placement), mistakes)
    _check_memory(asked, len(set(placement)), mistakes)
    _check_searched(asked, mistakes)
    devices = _read_devices(asked.devices, len(set(placement)), position, mistakes)
    if traced is not None:
        asked = _check_for_model(asked, traced, mistakes)
    else:
        makers = {} if outline is None else outline.makers
        modules = {name: layer for at, (name, layer) in enumerate(layers.items()) if at not in makers}
        mistakes += find_without_values(modules)
    mistakes.raise_all()
    found: dict[str, Any] = {field.name: vars(asked).get(field.name) for field in fields(Checked)}
    read = {"layers": layers, "placement": placement, "remat": remat, "devices": devices, "schedule": schedule}
    return asked, Checked(**found | read | {"seed": seed, "tied": tied})


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


def _check_numbers_and_names(asked: Arguments, mistakes: Mistakes) -> None:
    counts = {
        "micro_batches": (asked.micro_batches, "M, a whole number"),
        "slices": (asked.slices, "S, a whole number"),
        "intra_op_threads": (asked.intra_op_threads, "a whole number"),
        "stages_per_rank": (1 if asked.stages_per_rank is None else asked.stages_per_rank, "a whole number"),
    }
    for name, (value, what) in counts.items():
        mistakes.check(is_count(value), f"{name}={value!r}; give {what} of at least 1{int_remedy(value)}")
    m = asked.micro_batches
    number = m * (asked.slices if is_count(asked.slices) else 1) if is_count(m) else 0
    mistakes.check(number <= MOST_MICRO_BATCHES, too_many(number))
    if asked.driver is None and asked.mesh is None and asked.survive is not True and (size := world_size()) > 1:
        mistakes.append(
            f"driver= is not given, and torch.distributed has {size} processes. Pass driver='process' for one pipe "
            f"over all of them, or driver='threads' for a separate pipe in each"
        )
    driver = "threads" if asked.driver is None else asked.driver
    for name, given, known in (("driver", driver, Driver), ("balance", asked.balance, Balance)):
        layers = isinstance(given, (list, tuple))  # torchgpipe's word for them is balance
        told = "; give the layers of each partition as partitions=" if layers and name == "balance" else ""
        words = ", ".join(map(repr, get_args(known)))
        mistakes.check(given in get_args(known), f"{name}={given!r}; known are {words}{told}")
    for name in ("deferred_batch_norm", "sync_batch_norm", "survive", "verify"):
        value = getattr(asked, name)
        mistakes.check(isinstance(value, bool), f"{name}={value!r}; give True or False")
    remedy = "with the second they are those of all replicas already, so leave out the first"
    both = f"deferred_batch_norm=True and sync_batch_norm=True both say what running statistics are; {remedy}"
    mistakes.check(not (asked.deferred_batch_norm and asked.sync_batch_norm), both)
    refused = {
        "mesh= says where all replicas are: leave it out, each has its own processes": asked.mesh is not None,
        "sync_batch_norm=True has layers of all replicas wait for each other in a collective": asked.sync_batch_norm,
        "costs in seconds would cut each replica elsewhere; give costs='params', 'flops' or [...]": asked.in_seconds,
    }
    for why, is_given in refused.items():
        mistakes.check(not (asked.survive and is_given), f"survive=True: {why}")


def _check_costs(costs: Costs, sample: Tree, layers: int, mistakes: Mistakes) -> None:
    by_name = isinstance(costs, str)
    if callable(costs) or (by_name and costs in ("time", "flops")):
        wanted = repr(costs) if by_name else "a function"
        mistakes.check(sample is not None, f"costs={wanted} needs sample=, an example mini-batch of inputs")
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


def _one_for_each(name: str, value: object, count: int, places: str, mistakes: Mistakes) -> list[Any]:
    """What was given for each of so many places, or once for all; 0 where their number is not known."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    each = list(value) if several else [value] * max(count, 1)  # type: ignore[call-overload]  # just checked
    wrong = f"{name} has {len(each)} entries for {count} {places}; give one for each"
    mistakes.check(not count or len(each) == count, wrong)
    return each


def _read_remat(remat: object, stages: int, mistakes: Mistakes) -> tuple[Remat, ...]:
    """The rematerialization of each stage; where it is found later, for the time being everywhere."""
    if remat == AUTO:
        return tuple[Remat, ...](["always"]) * stages
    each = _one_for_each("remat", remat, stages, "stages", mistakes)
    number = "how many micro-batches at once keep what is inside, a whole number of at least 0"
    known = f"{', '.join(map(repr, REMATS))}, or {number}; or one of these for each stage; or 'auto'"
    good = all(item >= 0 if type(item) is int else item in REMATS for item in each)
    mistakes.check(good, f"remat={remat!r}; known are {known}")
    return tuple(each)


def _check_memory(asked: Arguments, ranks: int, mistakes: Mistakes) -> None:
    is_auto, memory = asked.remat == AUTO or asked.schedule == AUTO, asked.memory
    told = "remat='auto' needs sample=, an example mini-batch, to count what layers keep"
    mistakes.check(asked.remat != AUTO or asked.sample is not None, told)
    if memory is not None:
        told = "memory= is for remat='auto' and schedule='auto'; leave it out, or give one of them"
        mistakes.check(is_auto, told)
        told = "memory= needs sample=, an example mini-batch, to count what layers keep"
        mistakes.check(asked.schedule != AUTO or asked.sample is not None, told)
        each = _one_for_each("memory", memory, ranks, "partitions", mistakes)
        good = all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in each)
        mistakes.check(good, f"memory={memory!r}; give bytes, more than 0, one number or one for each partition")


def _check_searched(asked: Arguments, mistakes: Mistakes) -> None:
    """Notes what cannot be given where cuts, placement, table and remat are searched for."""
    if asked.schedule != AUTO:
        return
    told = "schedule='auto' finds"
    by_hand = not isinstance(asked.partitions, int)
    mistakes.check(not by_hand, f"{told} the cuts; give partitions=K, or another schedule")
    mistakes.check(asked.stages_per_rank is None, f"{told} how many stages a rank holds; leave stages_per_rank= out")
    remat = asked.remat in (UNSAID["remat"], AUTO)
    mistakes.check(remat, f"{told} what to recompute within memory=; leave remat= out")


def _check_slices(asked: Arguments, schedule: Schedule, traced: TracedModel | None, mistakes: Mistakes) -> None:
    """Notes what cannot be given where micro-batches are cut along their tokens."""
    if not is_count(asked.slices) or asked.slices == 1:
        return
    told = f"slices={asked.slices}"
    is_model = f"{told} is for a causal language model of transformers, given with a sample; leave it out"
    mistakes.check(traced is not None, is_model)
    searched = asked.plan is not None or AUTO in (asked.schedule, asked.remat)
    mistakes.check(not searched, f"{told}: a plan, and what is searched for, knows of none; say schedule= and remat=")
    mistakes.check(searched or schedule.sliced is not None, f"{told}: {unsliced(schedule)}")
    norms = asked.deferred_batch_norm or asked.sync_batch_norm
    apart = f"{told}: statistics of BatchNorm are not put together of slices; leave one of them out"
    mistakes.check(not norms, apart)


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


def _check_for_model(asked: Arguments, traced: TracedModel, mistakes: Mistakes) -> Arguments:
    """Checks what a model cannot be given; the arguments with the costs of one without values filled in."""
    apart = "costs='flops' counts layers that run by themselves; for a model give 'time' or 'params'"
    mistakes.check(asked.costs != "flops", apart)
    mistakes.check(not asked.ties, "ties= is for layers; a model has its parameters tied already")
    if not traced.lacks_values:
        return asked
    told = "costs cannot be measured of a model without values; give costs=[...] or 'params'"
    mistakes.check(not callable(asked.costs) and asked.costs != "time", told)
    return replace(asked, costs="params" if asked.costs is None else asked.costs)


# What each rank holds and in which order it works: partitions, schedule, stages_per_rank.


def read_schedule(asked: Arguments, mistakes: Mistakes) -> Schedule:
    """The schedule, by its name, as a program, or as a function that makes one; GPipe's where it is a mistake."""
    wanted, gpipe = asked.schedule, SCHEDULES["gpipe"]
    if isinstance(wanted, str):
        mistakes.check(wanted in (*SCHEDULES, AUTO), f"{unknown(wanted)}, and {AUTO!r}")
        return SCHEDULES.get(wanted, gpipe)
    if not isinstance(wanted, Program) and not callable(wanted):
        mistakes.append(f"{unknown(wanted)}, a Program, or a function of K and M that gives one")
        return gpipe
    told = "is for schedules by name; a program says it by itself"
    mistakes.check(asked.stages_per_rank is None, f"stages_per_rank={asked.stages_per_rank!r} {told}")
    if not isinstance(wanted, Program):
        return made_by(wanted, asked.micro_batches)
    try:
        return only(wanted)
    except ValueError as error:
        mistakes.append(f"schedule: {error}")
        return gpipe


def count_ranks(asked: Arguments, schedule: Schedule) -> int:
    """K, the number of ranks, as far as the arguments can say it; else 0."""
    partitions, each = asked.partitions, _stages_of_each(asked, schedule)
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


def _stages_of_each(asked: Arguments, schedule: Schedule) -> int:
    """The stages on each rank; 0 where the schedule says it by itself."""
    each = asked.stages_per_rank
    return each if each is not None and schedule.stages_per_rank and is_count(each) else schedule.stages_per_rank


def _read_placement(asked: Arguments, schedule: Schedule, layers: int, mistakes: Mistakes) -> Placement:
    """The rank of each stage, or nothing if it cannot be; how many layers there are is not known where that is 0."""
    partitions, m = asked.partitions, asked.micro_batches
    ranks, each = count_ranks(asked, schedule), _stages_of_each(asked, schedule)
    placed = mistakes.check(not each or schedule.placement(1, each) is not None, unplaced(schedule, each))
    if not _are_counts(partitions, ranks if placed else 1, each, layers, mistakes) or not placed:
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
    if placement is None:
        mistakes.append(f"schedule: {schedule.name} is not for K={ranks} ranks")
    elif is_count(m) and m <= MOST_MICRO_BATCHES and not schedule.table(placement, m):
        mistakes.append(without_table(schedule, placement, m))
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
