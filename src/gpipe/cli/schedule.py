"""Implements `gpipe schedule`: draws a schedule, or two schedules to compare."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console

from gpipe.cli import exit_on_user_errors
from gpipe.profiling import timelines_svg
from gpipe.profiling.lanes import describe, find_ruler, format_peak, legend, panel
from gpipe.recipes.options.training import (
    INTEGER,
    NotNegative,
    OptionalPath,
    Positive,
    optional,
    out_of_bounds,
    raise_all,
)
from gpipe.schedule.cost import StageCost
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.lower import place_loads, place_shards
from gpipe.schedule.program import Program, Table
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import table_of
from gpipe.schedule.schedules.writing import Rows
from gpipe.schedule.simulate import Figures, figures

NAME = f"Name of the schedule: {', '.join(SCHEDULES)}."
MOST_DRAWN = 50_000  # Maximum number of stages times slices of micro-batches whose actions are drawn or listed.


class TimedSchedule(NamedTuple):
    """A schedule with its simulated timeline."""

    name: str
    table: Table
    program: Program  # Without actions if there are too many to list.
    figures: Figures

    @property
    def title(self) -> str:
        ranks = len(self.table)
        each = self.program.stages // ranks
        stages = f" of {each} stages" if each > 1 else ""
        return f"{self.name}: {ranks} rank{'s' * (ranks > 1)}{stages}, {self.program.micro_batches_text}"


def has_colors(console: Console) -> bool:
    """Whether the terminal has enough colors to distinguish kinds and stages. If not, letters are printed instead."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def schedule(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=NAME, metavar="NAME")],
    other: Annotated[str, tyro.conf.Positional, optional("[NAME2]")] = "",
    partitions: Annotated[int, tyro.conf.arg(aliases=["-k"]), INTEGER] = 4,
    micro_batches: Annotated[int, tyro.conf.arg(aliases=["-m"]), INTEGER] = 8,
    stages_per_rank: Annotated[tuple[int, ...], optional("INT [INT]")] = (),
    slices: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT]")] = (1,),
    forward: Positive = 1.0,
    backward_input: Positive = 1.0,
    backward_weight: Positive = 1.0,
    gather: NotNegative = 0.0,
    load: NotNegative = 0.0,
    svg: OptionalPath = None,
    csv: OptionalPath = None,
    rank: Annotated[int | None, optional("INT"), INTEGER] = None,
) -> None:
    """Draws a schedule with its bubble (idle time) and peak activation memory, or two schedules to compare.

    Args:
        name: The schedule.
        other: Name of a second schedule to compare with the first.
        partitions: K: the number of partitions (ranks).
        micro_batches: M: the number of micro-batches per mini-batch.
        stages_per_rank: Number of stages per rank: one number, or one number per schedule. Default: the default of
            each schedule.
        slices: S: the number of slices of each micro-batch: one number, or one number per schedule.
        forward: Duration of a stage's forward pass (F), in any unit. If the other schedule has more stages, F takes
            proportionally longer.
        backward_input: Duration of a stage's input-gradient pass (I).
        backward_weight: Duration of a stage's weight-gradient pass (W). A whole backward pass (B) takes I plus W.
        gather: Duration of all-gathering a stage's weights from replicas (UNSHARD). With 0, stages are not sharded.
        load: Duration of copying a stage's weights from the host (LOAD), and its gradients to the host (FREE). With
            0, weights stay on the devices.
        svg: Draw the schedules to this SVG file.
        csv: Write the table of one schedule to this CSV file. `Program.from_csv` reads this file.
        rank: Also print all actions of this rank in order.
    """
    with exit_on_user_errors():
        names = [name, other] if other else [name]
        times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
        problems = list(out_of_bounds(schedule, {**times, "gather": gather, "load": load}))
        for flag, numbers in (("--stages-per-rank", stages_per_rank or (0,)), ("--slices", slices)):
            if len(numbers) not in (1, len(names)):
                problems.append(f"{flag}: got {len(numbers)} numbers. Pass one number, or one number per schedule.")
        if rank is not None and not 0 <= rank < partitions:
            problems.append(f"--rank: {rank} is out of range. Choose 0 to {partitions - 1}.")
        if csv is not None and other:
            problems.append("--csv: got two schedules. Pass one schedule.")
        raise_all(problems)
        requests = zip(names, (stages_per_rank or (None,)) * len(names), slices * len(names), strict=False)
        tables = [(*table_of(each, partitions, micro_batches, held, parts), parts) for each, held, parts in requests]
        most = max(len(placement) for _, placement, _ in tables)
        many = most * micro_batches * max(slices) > MOST_DRAWN
        large = many and not gather and not load and all(isinstance(table, Rows) for table, _, _ in tables)
        if large and (svg or csv):
            raise ValueError(
                f"--svg, --csv: stages times micro-batches exceed {MOST_DRAWN}. Remove these options, or print the "
                "actions of one rank with --rank."
            )
        timed = []
        for each, (table, placement, parts) in zip(names, tables, strict=True):
            scale = most / len(placement)  # All schedules do the same work, so fewer stages take longer each.
            forwards, inputs, weights = (scale / parts * time for time in times.values())
            cost = StageCost(forwards, inputs + weights, inputs, weights, gather=scale * gather)
            costs = [replace(cost, load=scale * load, unload=scale * load)] * len(placement)
            program = Program.of(() if large else table, micro_batches * parts, rank_of=placement, slices=parts)
            program = place_shards(program, range(len(placement)) if gather else ())
            program = place_loads(program, range(len(placement)) if load else ())
            if large and isinstance(table, Rows):
                simulated = LargeTable(table, placement).figures(costs)
            else:
                simulated = figures(program, costs)
            timed.append(TimedSchedule(each, program.table if gather or load else table, program, simulated))
        if svg is not None:
            picture = timelines_svg({drawn.title: drawn.figures.timeline for drawn in timed}, unit="")
            svg.write_text(picture, encoding="utf-8")
        if csv is not None:
            csv.write_text(timed[0].program.to_csv(), encoding="utf-8")
        _print_schedules(timed, Console(highlight=False), large=large)
        if rank is not None:
            for listed in timed:
                print(f"\n{listed.name}, rank {rank}:", *listed.table[rank])


def _print_schedules(timed: Sequence[TimedSchedule], console: Console, *, large: bool) -> None:
    """Prints the figures of the schedules. Also draws their actions, if there are not too many for the terminal."""
    colored = has_colors(console)
    timelines = [schedule.figures.timeline for schedule in timed]
    ruler = None if large else find_ruler(timelines, console.width, colored=colored)
    columns = ruler.columns(timelines) if ruler else 0
    if columns > console.width:
        needed = f"The picture needs {columns} columns, but the terminal has {console.width}."
        fix = f"Widen the terminal, set COLUMNS={columns}, or draw to a file with --svg FILE."
        console.print(f"{needed} {fix}\n", soft_wrap=True)
        ruler = None
    for schedule in timed:
        console.print(schedule.title, style="bold" if colored else "")
        if ruler:
            console.print(*panel(schedule.figures.timeline, ruler, colored=colored), sep="\n", soft_wrap=True)
        console.print(*describe(schedule.figures), "", sep="\n")
    if len(timed) > 1:
        console.print(_comparison(*timed), soft_wrap=True)
    if ruler:
        console.print(*legend(timelines, colored=colored), sep="\n")


def _comparison(first: TimedSchedule, second: TimedSchedule) -> str:
    names = ("the first", "the second") if first.name == second.name else (first.name, second.name)
    before, after = first.figures, second.figures
    share = 1 - after.seconds / before.seconds
    ends = "at the same time as"
    if abs(share) > 1e-9:
        ends = f"{abs(share):.1%} {'earlier' if share > 0 else 'later'} than"
    held = f"{names[0]} {format_peak(max(before.peaks))}, {names[1]} {format_peak(max(after.peaks))}"
    return f"{names[1]} ends {ends} {names[0]}; peak activations, in micro-batches: {held}"
