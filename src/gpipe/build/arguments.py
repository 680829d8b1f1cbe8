"""Reads what was given to `GPipe`, one argument after another; what is wrong is noted, to be raised all at once."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gpipe.comm.mesh import Position
from gpipe.layers.build import find_scripted
from gpipe.layers.invalid_layers import find_invalid_layers, find_pipes
from gpipe.layers.skips import find_pops
from gpipe.layers.tied import Tied, find_ties
from gpipe.plan.lower import REMATS, Remat
from gpipe.plan.schedules import SCHEDULES, Schedule


class Mistakes:
    """Collects mistakes, to raise them together."""

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


def draw_seed() -> int:
    """One number from torch's generator."""
    return int(torch.randint(2**62, (), device="cpu").item())


def read_seed(seed: int | None, mistakes: Mistakes) -> int:
    """The seed, drawn if there is none."""
    if seed is None:
        return draw_seed()
    fits = isinstance(seed, int) and -(2**63) <= seed < 2**63
    mistakes.check(fits, f"seed={seed!r}; give a whole number of 64 bits, or None to draw one from torch")
    return seed if fits else 0


def is_count(value: object) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def as_int(value: object) -> str:
    """What to do with a whole number of another library."""
    return (
        f", as an int: int(...), not a {type(value).__name__}"
        if hasattr(value, "__index__") and type(value) not in (int, bool)
        else ""
    )


def check_layers(
    named: dict[str, nn.Module], wrong: Sequence[str], ties: Sequence[Sequence[str]], mistakes: Mistakes
) -> Tied:
    """Looks whether layers can be looked after, beside what is known to be wrong; gives where tied weights stand."""
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


def schedule_of(name: object) -> Schedule:
    """A schedule by its name; GPipe's where there is none, which is a mistake of its own."""
    return SCHEDULES.get(name if isinstance(name, str) else "", SCHEDULES["gpipe"])


def count_ranks(partitions: object, schedule: Schedule) -> int:
    """K, the number of ranks, as far as these can say it; else 0."""
    if isinstance(partitions, int) and is_count(partitions):
        return partitions
    stages = len(partitions) if isinstance(partitions, Sequence) and not isinstance(partitions, str) else 0
    return 0 if stages % schedule.stages_per_rank else stages // schedule.stages_per_rank


def read_placement(
    partitions: int | Sequence[int], schedule: Schedule, layers: int, mistakes: Mistakes
) -> tuple[int, ...]:
    """The rank of each stage, or nothing if it cannot be; how many layers there are is not known where that is 0."""
    ranks, each = count_ranks(partitions, schedule), schedule.stages_per_rank
    placement = schedule.placement(ranks, each) if ranks else ()
    if isinstance(partitions, Sequence) and not isinstance(partitions, str) and partitions:
        if mistakes.check(
            all(map(is_count, partitions)),
            f"partitions={list(partitions)}; each partition needs at least 1 layer",
        ):
            mistakes.check(
                not layers or sum(partitions) == layers,
                f"partitions={list(partitions)} adds up to {sum(partitions)} layers, but there are {layers}",
            )
        mistakes.check(
            ranks > 0,
            f"partitions={list(partitions)} has {len(partitions)} stages, and the schedule puts {each} on each rank; "
            f"give a multiple of that",
        )
        return placement
    if not mistakes.check(
        is_count(partitions),
        f"partitions={partitions!r}; give K, at least 1, or the layers of each partition{_as_ints(partitions)}",
    ):
        return ()
    fits = mistakes.check(
        not layers or len(placement) <= layers,
        f"partitions={partitions}, but there are only {layers} layers; give at most that, or cut the layers finer",
    )
    return placement if fits else ()


def _as_ints(partitions: object) -> str:
    return ", as a list of ints" if isinstance(partitions, (set, np.ndarray, torch.Tensor)) else as_int(partitions)


def read_remat(remat: object, stages: int, mistakes: Mistakes) -> tuple[Remat, ...]:
    """The rematerialization of each partition."""
    known = ", ".join(map(repr, REMATS))
    each = [remat] * max(stages, 1) if isinstance(remat, str) or not isinstance(remat, Sequence) else list(remat)
    mistakes.check(
        not stages or len(each) == stages, f"remat has {len(each)} entries for {stages} partitions; give one for each"
    )
    wrong = [item for item in each if item not in REMATS]
    mistakes.check(not wrong, f"remat={remat!r}; known are {known}, or one of them for each partition")
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
