"""The command `gpipe schedule`: draws a schedule, or two of them to compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console

from gpipe.cli import ending_by_mistakes
from gpipe.profiling import timelines_svg
from gpipe.profiling.lanes import find_ruler, legend, panel, peak_in_words, words
from gpipe.recipes.options.training import NotNegative, Positive, out_of_bounds, refuse
from gpipe.schedule.cost import StageCost
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.lower import place_shards
from gpipe.schedule.program import Program, Table
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import table_of
from gpipe.schedule.schedules.writing import Rows
from gpipe.schedule.simulate import Figures, figures

COLORFUL = ("256", "truecolor")  # rich's words for colours enough to tell kinds and stages apart; others have letters

KNOWN = f"The schedule: {', '.join(SCHEDULES)}."


MOST_DRAWN = 50_000  # stages times slices of micro-batches; of more no action is drawn


class Drawn(NamedTuple):
    """A schedule, timed."""

    name: str
    table: Table
    program: Program  # without the table where that is too much to be listed
    figures: Figures

    @property
    def title(self) -> str:
        ranks = len(self.table)
        each = self.program.stages // ranks
        held = f" of {each} stages" if each > 1 else ""
        return f"{self.name}: {ranks} rank{'s' * (ranks > 1)}{held}, {self.program.micro_batches_text}"


def schedule(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=KNOWN, metavar="NAME")],
    other: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME2]")] = "",
    partitions: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 4,
    micro_batches: Annotated[int, tyro.conf.arg(aliases=["-m"])] = 8,
    stages_per_rank: tuple[int, ...] = (),
    slices: tuple[int, ...] = (1,),
    forward: Positive = 1.0,
    backward_input: Positive = 1.0,
    backward_weight: Positive = 1.0,
    gather: NotNegative = 0.0,
    svg: Path | None = None,
    csv: Path | None = None,
    rank: int | None = None,
) -> None:
    """Draws a schedule by its name, with its bubble and what each rank holds, or two of them to compare.

    Args:
        name: One of those that are known.
        other: Another, to compare it with.
        partitions: K: how many ranks there are.
        micro_batches: M: how many micro-batches a mini-batch is split into.
        stages_per_rank: How many stages each rank holds, one number for all schedules or one for each; by default
            what each has.
        slices: S: how many slices each micro-batch is cut into, one number for all schedules or one for each.
        forward: How long F of a stage takes, in any unit. Of two schedules, stages of the one with fewer take longer.
        backward_input: How long I takes, the gradients of inputs.
        backward_weight: How long W takes, the gradients of weights; a whole backward, B, takes as long as I and W.
        gather: How long replicas take to gather the weights of a stage, by UNSHARD; if 0, no stage is sharded.
        svg: A file for the picture.
        csv: A file for the table of one schedule, as `Program.from_csv` reads it.
        rank: One whose row is written out: all that it does, in order.
    """
    with ending_by_mistakes():
        names = [name, other] if other else [name]
        times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
        problems = list(out_of_bounds(schedule, {**times, "gather": gather}))
        if len(stages_per_rank) not in (0, 1, len(names)):
            problems.append(f"--stages-per-rank has {len(stages_per_rank)} numbers: give one, or one for each")
        if len(slices) not in (1, len(names)):
            problems.append(f"--slices has {len(slices)} numbers: give one, or one for each")
        if rank is not None and not 0 <= rank < partitions:
            problems.append(f"--rank is {rank}: choose 0 to {partitions - 1}")
        if csv is not None and other:
            problems.append("--csv is for one schedule")
        refuse(problems)
        requests = zip(names, (stages_per_rank or (None,)) * len(names), slices * len(names), strict=False)
        tables = [(*table_of(one, partitions, micro_batches, each, cut), cut) for one, each, cut in requests]
        most = max(len(placement) for _, placement, _ in tables)
        many = most * micro_batches * max(slices) > MOST_DRAWN
        large = many and not gather and all(isinstance(table, Rows) for table, _, _ in tables)
        if large and (svg or csv):
            refuse(["that is too much to be drawn or listed as a whole: leave --svg and --csv out; --rank has a row"])
        drawn = []
        for one, (table, placement, cut) in zip(names, tables, strict=True):  # each with the same work for a rank
            ahead, inputs, weights = (most / len(placement) / cut * time for time in times.values())
            cost = StageCost(ahead, inputs + weights, inputs, weights, gather=most / len(placement) * gather)
            costs = [cost] * len(placement)
            rows = () if large else table
            program = Program.of(rows, micro_batches * cut, rank_of=placement, slices=cut)
            program = place_shards(program, range(len(placement)) if gather else ())
            if large and isinstance(table, Rows):
                timed = LargeTable(table, placement).figures(costs)
            else:
                timed = figures(program, costs)
            drawn.append(Drawn(one, program.table if gather else table, program, timed))
        if svg is not None:
            picture = timelines_svg({one.title: one.figures.timeline for one in drawn}, unit="")
            svg.write_text(picture, encoding="utf-8")
        if csv is not None:
            csv.write_text(drawn[0].program.to_csv(), encoding="utf-8")
        _show(drawn, Console(highlight=False), large=large)
        if rank is not None:
            for each in drawn:
                print(f"\n{each.name}, rank {rank}:", *each.table[rank])


def _show(drawn: Sequence[Drawn], console: Console, *, large: bool) -> None:
    """Prints the lanes, unless they are large or there is no room for them, and what can be said of them."""
    colored = console.color_system in COLORFUL and not console.no_color
    timelines = [one.figures.timeline for one in drawn]
    ruler = None if large else find_ruler(timelines, console.width, colored=colored)
    least = ruler.columns(timelines) if ruler else 0
    if least > console.width:
        remedy = f"widen the terminal, set COLUMNS={least}, or have a picture by --svg FILE\n"
        narrow = f"no lanes: they have at least {least} columns, and there are {console.width}"
        console.print(f"{narrow}; {remedy}", soft_wrap=True)
        ruler = None
    for one in drawn:
        console.print(one.title, style="bold" if colored else "")
        if ruler:
            console.print(*panel(one.figures.timeline, ruler, colored=colored), sep="\n", soft_wrap=True)
        console.print(*words(one.figures), "", sep="\n")
    if len(drawn) > 1:
        console.print(_comparison(*drawn))
    if ruler:
        console.print(*legend(timelines, colored=colored), sep="\n")


def _comparison(first: Drawn, second: Drawn) -> str:
    names = ("the first", "the second") if first.name == second.name else (first.name, second.name)
    before, after = first.figures, second.figures
    sooner = 1 - after.seconds / before.seconds
    ends = f"{abs(sooner):.1%} {'sooner' if sooner > 0 else 'later'} than" if abs(sooner) > 1e-9 else "as soon as"
    held = f"{peak_in_words(max(after.peaks))} micro-batches, {names[0]} {peak_in_words(max(before.peaks))}"
    return f"{names[1]} ends {ends} {names[0]}; at most it holds {held}"
