"""The arguments that say what each rank holds and in which order it works: partitions, schedule, stages_per_rank."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpipe.config.arguments import Arguments, Mistakes
from gpipe.errors import int_remedy, is_count
from gpipe.schedule.program import MOST_MICRO_BATCHES, Program
from gpipe.schedule.schedules import SCHEDULES, Placement, Schedule
from gpipe.schedule.schedules.by_name import GivenProgram, MadeProgram, check_given, unknown, unplaced, without_table


def read_schedule(asked: Arguments, mistakes: Mistakes) -> Schedule:
    """The schedule, by its name, as a program, or as a function that makes one; GPipe's where it is a mistake."""
    wanted, gpipe = asked.schedule, SCHEDULES["gpipe"]
    if isinstance(wanted, str):
        mistakes.check(wanted in SCHEDULES, unknown(wanted))
        return SCHEDULES.get(wanted, gpipe)
    if not isinstance(wanted, Program) and not callable(wanted):
        mistakes.found.append(f"{unknown(wanted)}, a Program, or a function of K and M that gives one")
        return gpipe
    mistakes.check(
        asked.stages_per_rank is None,
        f"stages_per_rank={asked.stages_per_rank!r} is for schedules by name; a program says it by itself",
    )
    if isinstance(wanted, Program):
        given = GivenProgram(wanted)
        return gpipe if _is_refused(lambda: check_given(wanted), mistakes) else _given("a program", given)
    made = MadeProgram(wanted, asked.micro_batches)
    return _given(getattr(wanted, "__qualname__", type(wanted).__name__), made)


def _given(name: str, given: GivenProgram | MadeProgram) -> Schedule:
    return Schedule(name, given.rows, given.placement, stages_per_rank=0)


def _is_refused(check: Callable[[], object], mistakes: Mistakes) -> bool:
    try:
        check()
    except ValueError as error:
        mistakes.found.append(f"schedule: {error}")
        return True
    return False


def count_ranks(asked: Arguments, schedule: Schedule) -> int:
    """K, the number of ranks, as far as the arguments can say it; else 0."""
    partitions = asked.partitions
    if isinstance(partitions, int):
        return partitions if is_count(partitions) else 0
    stages = len(partitions) if isinstance(partitions, Sequence) and not isinstance(partitions, str) else 0
    if each := _each(asked, schedule):
        return 0 if stages % each else stages // each
    return next((ranks for ranks in range(stages, 0, -1) if len(_place(schedule, ranks, 0)) == stages), 0)


def _each(asked: Arguments, schedule: Schedule) -> int:
    """The stages on each rank; 0 where the schedule says it by itself."""
    each = asked.stages_per_rank
    return each if schedule.stages_per_rank and is_count(each) else schedule.stages_per_rank  # type: ignore[return-value]  # a count


def _place(schedule: Schedule, ranks: int, each: int) -> Placement:
    """The placement, or nothing where there is none."""
    try:
        return schedule.placement(ranks, each) or ()
    except Exception:  # of the user's function, which need not have a program for every K
        return ()


def read_placement(asked: Arguments, schedule: Schedule, layers: int, mistakes: Mistakes) -> Placement:
    """The rank of each stage, or nothing if it cannot be; how many layers there are is not known where that is 0."""
    mistakes.check(
        asked.stages_per_rank is None or is_count(asked.stages_per_rank),
        f"stages_per_rank={asked.stages_per_rank!r}; give a whole number of at least 1"
        f"{int_remedy(asked.stages_per_rank)}, or None for what the schedule has",
    )
    ranks, each = count_ranks(asked, schedule), _each(asked, schedule)
    if not _are_counts(asked, ranks, each, layers, mistakes):
        return ()
    if layers and ranks * max(each, 1) > layers:  # before a table is built of so many
        mistakes.found.append(_too_few_layers(asked, ranks * max(each, 1), layers))
        return ()
    if not each and _is_refused(lambda: schedule.placement(ranks, each), mistakes):
        return ()
    placement = _place(schedule, ranks, each)
    if not placement:
        mistakes.found.append(_unplaced(schedule, ranks, each))
        return ()
    if (
        is_count(asked.micro_batches)
        and asked.micro_batches <= MOST_MICRO_BATCHES
        and not schedule.rows(placement, asked.micro_batches)
    ):
        mistakes.found.append(without_table(schedule, placement, asked.micro_batches))
    fits = isinstance(asked.partitions, Sequence) or mistakes.check(
        not layers or len(placement) <= layers, _too_few_layers(asked, len(placement), layers)
    )
    return placement if fits else ()


def _are_counts(asked: Arguments, ranks: int, each: int, layers: int, mistakes: Mistakes) -> bool:
    """Notes what is wrong with the number of partitions, or with the layers of each stage."""
    partitions = asked.partitions
    if isinstance(partitions, Sequence) and not isinstance(partitions, str) and partitions:
        counts = list(partitions)
        if mistakes.check(all(map(is_count, counts)), f"partitions={counts}; each partition needs at least 1 layer"):
            mistakes.check(
                not layers or sum(counts) == layers,
                f"partitions={counts} adds up to {sum(counts)} layers, but there are {layers}",
            )
        places = f"puts {each} on each rank; give a multiple of that" if each else "is of another number of stages"
        return mistakes.check(ranks > 0, f"partitions={counts} has {len(counts)} stages, and the schedule {places}")
    return mistakes.check(
        is_count(partitions),
        f"partitions={partitions!r}; give K, at least 1, or the layers of each partition{_ints_remedy(partitions)}",
    )


def _ints_remedy(partitions: object) -> str:
    return (
        ", as a list of ints" if isinstance(partitions, (set, np.ndarray, torch.Tensor)) else int_remedy(partitions)
    )


def _unplaced(schedule: Schedule, ranks: int, each: int) -> str:
    return unplaced(schedule, ranks, each) if each else f"schedule: {schedule.name} is not for K={ranks} ranks"


def _too_few_layers(asked: Arguments, stages: int, layers: int) -> str:
    several = "" if stages == asked.partitions else f", {stages} stages in all"
    return (
        f"partitions={asked.partitions}{several}, but there are only {layers} layers; give at most that, or cut the "
        f"layers finer"
    )
