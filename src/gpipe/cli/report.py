"""Implements `gpipe report`: shows the results of a run as a web page, in the terminal or as a picture."""

from json import JSONDecodeError
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from gpipe.cli import exit_on_user_errors
from gpipe.cli.schedule import has_colors
from gpipe.planner.search.units import format_seconds
from gpipe.profiling import Report, breakdown_lines, read_report, report_html, typical_svg, write_picture
from gpipe.profiling.breakdown import throughput_texts
from gpipe.profiling.lanes import fit_ruler, legend, panel
from gpipe.profiling.stored import NAME
from gpipe.recipes.options.training import OptionalPath

PAGE = "report.html"


def report(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    text: bool = False,
    picture: OptionalPath = None,
) -> None:
    """Shows where the time and memory of a run went, as a web page: RUN/report.html.

    Args:
        run: Folder of a run that `gpipe train` has finished, such as out/digits.
        text: Print the report in the terminal instead of writing the page.
        picture: Draw the step of median duration to this .svg or .png file instead of writing the page.
    """
    with exit_on_user_errors():
        if text and picture is not None:
            raise ValueError("--text: cannot be combined with --picture. Remove one of them.")
        if not (run / NAME).is_file():
            raise ValueError(f"{run}: contains no {NAME}. Pass the folder of a run that `gpipe train` has finished.")
        try:
            stored = read_report((run / NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            fix = " Train again." if isinstance(error, JSONDecodeError) else ""
            raise ValueError(f"{run / NAME}: cannot be read: {str(error).rstrip('.')}.{fix}") from None
        if text:
            _print_report(stored, Console(highlight=False))
            return
        file = picture or run / PAGE
        if picture is None:
            file.write_text(report_html(stored), encoding="utf-8")
        elif not stored.timelines:
            raise ValueError(f"--picture: {run} has no recorded step. Remove --picture to write the page.")
        else:
            write_picture(file, typical_svg(stored))
        print(file)


def _print_report(report: Report, console: Console) -> None:
    """Prints the predicted and the median step on the same time scale, and a table that shows where the time went."""
    colored = has_colors(console)
    drawn = {}
    if report.predicted is not None:
        drawn["predicted"] = report.predicted
    if report.timelines:
        drawn[f"step {report.typical + 1} of {len(report.timelines)}"] = report.timelines[report.typical]
    for line in filter(None, (report.title, report.sentence)):
        console.print(line, markup=False, soft_wrap=True)
    if drawn:
        ruler = fit_ruler(drawn.values(), console.width)
        for title, timeline in drawn.items():
            idle = f"{timeline.idle_share():.1%} not computing"
            console.print(f"\n{title}: {format_seconds(timeline.seconds)}, {idle}", style="bold" if colored else "")
            console.print(*panel(timeline, ruler, colored=colored, unit="ms"), sep="\n", soft_wrap=True)
        console.print(*legend(drawn.values(), colored=colored), sep="\n")
    if texts := throughput_texts(report.throughput):
        console.print(f"\nthroughput: {', '.join(texts)}")
    if report.shares and report.timelines:
        whole = [timeline.seconds + sum(timeline.other.values()) for timeline in report.timelines]
        table = breakdown_lines(report.shares, sum(whole) / len(whole), len(whole))
        console.print("", *table, sep="\n", markup=False, soft_wrap=True)
