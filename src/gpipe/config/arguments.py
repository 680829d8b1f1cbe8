"""The arguments of `GPipe`: what the user gave, and how each is read; mistakes are noted, to be raised together.

Collects what is wrong with the arguments of `GPipe`, to raise all of it at once.

The arguments of `GPipe` that a plan gives, in place of the user.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from gpipe.distributed.mesh import Position
from gpipe.errors import int_remedy, is_count
from gpipe.planner.search.found import Plan
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lower import REMATS, Remat
from gpipe.schedule.partition import Balance
from gpipe.schedule.program import MOST_MICRO_BATCHES, Program, too_many
from gpipe.schedule.schedules.by_name import Maker
from gpipe.stages.outline import Outline
from gpipe.stages.sequence import Layers, find_invalid_layers
from gpipe.stages.shared_weights import Tied, find_ties
from gpipe.stages.skips import find_pops
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import ModelLayers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mistakes:
    """The mistakes noted so far."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def check(self, condition: bool, text: str) -> bool:
        """Notes a mistake unless the condition holds."""
        if not condition:
            self.found.append(text)
        return condition

    def check_known(self, name: str, value: object, known: Iterable[str]) -> None:
        """Notes a mistake unless the value is one of those known."""
        self.check(value in tuple(known), f"{name}={value!r}; known are {', '.join(map(repr, known))}")

    def raise_all(self) -> None:
        """Raises what was found, if anything.

        Raises:
            ValueError: Lists every mistake.
        """
        if self.found:
            raise ValueError(
                "GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in dict.fromkeys(self.found))
            )


Driver: TypeAlias = Literal["threads", "lockstep", "process"]
Costs: TypeAlias = Sequence[float] | Literal["params", "time", "flops"] | Callable[[nn.Module, Tree], float] | None


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
    plan: Plan | None = None
    memory: object = None

    @property
    def in_seconds(self) -> bool:
        """Whether costs are to be measured as time."""
        return self.costs == "time" or (self.costs is None and self.sample is not None)


def draw_seed() -> int:
    """Draws a seed from torch's generator."""
    return int(torch.randint(2**62, (), device="cpu").item())


def read_seed(seed: int | None, mistakes: Mistakes) -> int:
    """The seed, drawn if there is none."""
    if seed is None:
        return draw_seed()
    fits = isinstance(seed, int) and -(2**63) <= seed < 2**63
    mistakes.check(fits, f"seed={seed!r}; give a whole number of 64 bits, or None to draw one from torch")
    return seed if fits else 0


def check_layers(
    named: dict[str, nn.Module], wrong: Sequence[str], ties: Sequence[Sequence[str]], mistakes: Mistakes
) -> Tied:
    """Notes layers that cannot be run, beside what is known to be wrong; gives the slots of tied weights."""
    mistakes.found += wrong
    mistakes.check(bool(named) or bool(wrong), "layers is empty; give at least one layer")
    mistakes.found += find_invalid_layers(named)
    try:
        find_pops(list(named.values()))
    except ValueError as error:
        mistakes.found += str(error).splitlines()
    groups = [tuple(group) if _is_list(group) else (None,) for group in ties] if _is_list(ties) else [(None,)]
    if not all(isinstance(name, str) for group in groups for name in group):
        mistakes.found.append(f"ties={ties!r}; give groups of names: [('0.weight', '5.weight')]")
        return ()
    tied, wrong_ties = find_ties(named, ties)
    mistakes.found += wrong_ties
    return tied


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def read_remat(remat: object, stages: int, mistakes: Mistakes) -> tuple[Remat, ...]:
    """The rematerialization of each stage; where it is found later, for the time being everywhere."""
    if remat == "auto":
        return tuple[Remat, ...](["always"]) * stages
    known = ", ".join(map(repr, REMATS))
    each = [remat] * max(stages, 1) if isinstance(remat, str) or not isinstance(remat, Sequence) else list(remat)
    mistakes.check(
        not stages or len(each) == stages, f"remat has {len(each)} entries for {stages} stages; give one for each"
    )
    wrong = [item for item in each if not (item >= 0 if type(item) is int else item in REMATS)]
    mistakes.check(
        not wrong,
        f"remat={remat!r}; known are {known}, or how many micro-batches at once keep what is inside, a whole number "
        f"of at least 0; or one of these for each stage; or 'auto'",
    )
    return tuple(each)  # type: ignore[arg-type]  # checked above


def read_devices(
    devices: object, ranks: int, position: Position | None, mistakes: Mistakes
) -> tuple[torch.device, ...]:
    """The device of each partition; that of the process if there are several."""
    if position is not None:
        mistakes.check(
            devices is None,
            "devices is for one process; each of several has the device of the mesh, and of LOCAL_RANK",
        )
        return (position.device,) * ranks
    if devices is None:
        there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
        return tuple(there[rank % len(there)] for rank in range(ranks))
    each: list[Any] = [devices] * max(ranks, 1)
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        each = list(devices)
    mistakes.check(
        not ranks or len(each) == ranks,
        f"devices has {len(each)} entries for {ranks} partitions; give one for each",
    )
    found = [_read_device(item, mistakes) for item in each]
    return tuple(device for device in found if device is not None)


def _read_device(item: Any, mistakes: Mistakes) -> torch.device | None:
    try:
        device = torch.device(item)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        mistakes.found.append(f"device {item!r} cannot be used: {str(error).splitlines()[0]}")
        return None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_measurable(asked: Arguments, outline: Outline | None, mistakes: Mistakes) -> None:
    """Notes costs that would be measured where no process has all layers."""
    mistakes.check(
        outline is None or not outline.makers or not (asked.in_seconds or callable(asked.costs)),
        "costs cannot be measured where no process has all layers; give costs=[...], 'flops' or 'params'",
    )


def check_numbers_and_names(asked: Arguments, mistakes: Mistakes) -> None:
    """Notes numbers below 1, and names of a driver or balance that are not known."""
    m, threads = asked.micro_batches, asked.intra_op_threads
    mistakes.check(is_count(m), f"micro_batches={m!r}; give M, a whole number of at least 1{int_remedy(m)}")
    if is_count(m):
        mistakes.check(m <= MOST_MICRO_BATCHES, too_many(m))
    mistakes.check(
        is_count(threads), f"intra_op_threads={threads!r}; give a whole number of at least 1{int_remedy(threads)}"
    )
    if asked.driver is not None:
        mistakes.check_known("driver", asked.driver, get_args(Driver))
    mistakes.check_known("balance", asked.balance, get_args(Balance))
    mistakes.check(
        not (asked.deferred_batch_norm and asked.sync_batch_norm),
        "deferred_batch_norm=True and sync_batch_norm=True both say what running statistics are; with the second "
        "they are those of all replicas already, so leave out the first",
    )


def check_costs(costs: Costs, sample: Tree, layers: int, mistakes: Mistakes) -> None:
    """Notes costs that are none, too few or too many, or cannot be had without a sample."""
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


AUTO = "auto"
NEEDS_SAMPLE = "remat='auto' needs sample=, an example mini-batch, to count what layers keep"
FOR_AUTO = "memory= is for remat='auto'; leave it out, or give remat='auto'"
UNSAID = {"partitions": None, "micro_batches": None, "schedule": "gpipe", "stages_per_rank": None, "remat": "always"}
"""The arguments that a plan gives, as they are where the user says nothing."""


def check_auto(asked: Arguments, ranks: int, mistakes: Mistakes) -> None:
    """Notes what `remat="auto"` lacks, and memory that is none or for nothing."""
    is_auto = asked.remat == AUTO
    mistakes.check(not is_auto or asked.sample is not None, NEEDS_SAMPLE)
    if asked.memory is None:
        return
    mistakes.check(is_auto, FOR_AUTO)
    each = list(asked.memory) if isinstance(asked.memory, Sequence) else [asked.memory]
    good = all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in each)
    mistakes.check(
        good and (not isinstance(asked.memory, Sequence) or not ranks or len(each) == ranks),
        f"memory={asked.memory!r}; give bytes, more than 0, one number or one for each of {ranks} partitions",
    )


def follow_plan(asked: Arguments) -> Arguments:
    """The arguments with what the plan says of them, if there is one.

    What the plan has measured is taken for the costs of the layers, where the user gives none; what it has counted,
    if there is no sample on which to measure them.

    M may be given beside a plan, and is taken instead: a loss curve depends on it, and on nothing else in a plan.

    Raises:
        TypeError: The plan is none.
        ValueError: The user says what the plan says.
    """
    plan = asked.plan
    if plan is None:
        return asked
    if not isinstance(plan, Plan):
        raise TypeError(f"plan= is a {type(plan).__name__}; give what gpipe.find_plan gave")
    said = [name for name, unsaid in UNSAID.items() if getattr(asked, name) != unsaid and name != "micro_batches"]
    if said:
        raise ValueError(f"plan= says {', '.join(f'{name}=' for name in said)} already; leave them out, or plan=")
    followed = replace(
        asked,
        partitions=list(plan.layers_per_partition),
        micro_batches=plan.micro_batches if asked.micro_batches is None else asked.micro_batches,
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        remat=list(plan.remat),
    )
    fits = asked.costs is None and followed.micro_batches == plan.micro_batches
    return replace(followed, costs=plan.work) if fits and (plan.measured or asked.sample is None) else followed


def planned_costs(asked: Arguments) -> tuple[StageCost, ...] | None:
    """What the plan foretells of each stage, if nothing is to be measured anew: for its M, and by its costs."""
    return asked.plan.costs if asked.plan is not None and asked.costs is asked.plan.work else None


def planned_bytes(asked: Arguments) -> tuple[StageCost, ...] | None:
    """What the plan foretells that each stage holds, if M is its own: the cuts are, whatever the layers' costs."""
    return asked.plan.costs if asked.plan is not None and asked.micro_batches == asked.plan.micro_batches else None


def has_measured(asked: Arguments) -> bool:
    """Whether what the plan foretells was measured."""
    return planned_costs(asked) is not None and asked.plan is not None and asked.plan.measured
