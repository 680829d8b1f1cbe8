"""The arguments of `GPipe`: what the user gave, and how each is read; mistakes are noted, to be raised together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from gpipe.build.mistakes import Mistakes
from gpipe.comm.mesh import Position
from gpipe.layers.invalid_layers import find_invalid_layers, find_pipes, find_scripted
from gpipe.layers.outline import Outline
from gpipe.layers.sequence import Layers
from gpipe.layers.skips import find_pops
from gpipe.layers.tied import Tied, find_ties
from gpipe.plan.lower import REMATS, Remat
from gpipe.plan.partition import Balance
from gpipe.plan.program import Program
from gpipe.plan.schedules.given import Maker
from gpipe.plan.search.found import Plan
from gpipe.splitting.layers_of import ModelLayers
from gpipe.values.tree import Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def int_remedy(value: object) -> str:
    """The remedy for a whole number of another library, in words."""
    return (
        f", as an int: int(...), not a {type(value).__name__}"
        if hasattr(value, "__index__") and type(value) not in (int, bool)
        else ""
    )


def check_layers(
    named: dict[str, nn.Module], wrong: Sequence[str], ties: Sequence[Sequence[str]], mistakes: Mistakes
) -> Tied:
    """Notes layers that cannot be run, beside what is known to be wrong; gives the slots of tied weights."""
    mistakes.found += wrong
    mistakes.check(bool(named) or bool(wrong), "layers is empty; give at least one layer")
    mistakes.found += find_scripted(named)
    mistakes.found += [*find_pipes(named), *find_invalid_layers(named)]
    try:
        find_pops(list(named.values()))
    except ValueError as error:
        mistakes.found += str(error).splitlines()
    if isinstance(ties, str) or any(isinstance(group, str) for group in ties):
        mistakes.found.append(f"ties={ties!r}; give groups of names: [('0.weight', '5.weight')]")
        return ()
    tied, wrong_ties = find_ties(named, ties)
    mistakes.found += wrong_ties
    return tied


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
