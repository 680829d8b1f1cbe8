"""The command `gpipe report`: what a run came to, as a page for a browser or in the terminal."""

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from gpipe.cli import ending_by_mistakes
from gpipe.cli.schedule import COLORFUL
from gpipe.planner.search.units import format_seconds
from gpipe.profiling import Report, breakdown_lines, read_report, report_html, typical_svg, write_picture
from gpipe.profiling.lanes import fitted, legend, panel
from gpipe.profiling.stored import NAME

PAGE = "report.html"


def report(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    text: bool = False,
    picture: Path | None = None,
) -> None:
    """Draws a run as one page for a browser, RUN/report.html, as text, or as a picture for a paper.

    Args:
        run: The folder of a run, such as out/digits; `gpipe train` leaves report.json there when it ends.
        text: Draws in the terminal; no file is written.
        picture: A file for the step of median length, .svg or .png, in place of the page.
    """
    with ending_by_mistakes():
        if text and picture is not None:
            raise ValueError("--text draws in the terminal and --picture in a file: choose one")
        if not (run / NAME).is_file():
            raise ValueError(
                f"{run} has no {NAME}, which `gpipe train` writes when it ends: give the folder of such a run"
            )
        try:
            found = read_report((run / NAME).read_text(encoding="utf-8"))
        except ValueError as mistake:
            raise ValueError(f"{run / NAME} cannot be read: {mistake}; train again") from None
        if text:
            _show(found, Console(highlight=False))
            return
        file = picture or run / PAGE
        if picture is None:
            file.write_text(report_html(found), encoding="utf-8")
        elif not found.timelines:
            raise ValueError("the run has no recorded step to draw: the page has all that is known of it")
        else:
            write_picture(file, typical_svg(found))
        print(file)


def _show(report: Report, console: Console) -> None:
    """Prints the typical step, the prediction above it on the same scale, and where the time went."""
    colored = console.color_system in COLORFUL and not console.no_color
    drawn = {}
    if report.predicted is not None:
        drawn["predicted"] = report.predicted
    if report.timelines:
        drawn[f"step {report.typical + 1} of {len(report.timelines)}"] = report.timelines[report.typical]
    for line in filter(None, (report.title, report.sentence)):
        console.print(line, markup=False, soft_wrap=True)
    if drawn:
        ruler = fitted(drawn.values(), console.width)
        for title, timeline in drawn.items():
            idle = f"{timeline.idle_share():.1%} not computing"
            console.print(f"\n{title}: {format_seconds(timeline.seconds)}, {idle}", style="bold" if colored else "")
            console.print(*panel(timeline, ruler, colored=colored, unit="ms"), sep="\n", soft_wrap=True)
        console.print(*legend(drawn.values(), colored=colored), sep="\n")
    if report.shares and report.timelines:
        whole = [timeline.seconds + sum(timeline.other.values()) for timeline in report.timelines]
        table = breakdown_lines(report.shares, sum(whole) / len(whole), len(whole))
        console.print("", *table, sep="\n", markup=False, soft_wrap=True)
