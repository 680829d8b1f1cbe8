"""Renders pipes, plans, programs, predictions and recordings in notebooks, as a picture and a text.

The picture is an HTML image whose address contains the SVG. Therefore styles of the picture and the page do not
affect each other. Notebooks that are not trusted remove inline SVG, but show this image.
"""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

from gpipe.planner.search.plan import Plan
from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.profiling import svg
from gpipe.profiling.advice import explain
from gpipe.profiling.breakdown import NO_STEPS
from gpipe.profiling.lanes import describe
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.simulate import Prediction, figures

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe
    from gpipe.profiling.recording import Recording

MAX_ACTIONS = 10_000  # Predicting this many actions for a cell takes about a second.
MAX_LINES, COLUMNS = 60, 112  # of the text
UNITS = "One unit is the time of a forward pass or recomputation of a stage, or of half a backward pass (I or W)."
TOO_LARGE = "The prediction takes long for this many micro-batches. Call print(pipe.summary()) to see it."
ONE_STEP = "The text describes only this step. print(recording) and recording.explain() use all steps."


def program(drawn: Program) -> str:
    """Renders a program with its time in units, or the reason why the program cannot run."""
    title = f"program: {_size(drawn)}"
    try:
        result = figures(drawn)
    except ScheduleError as error:
        return _cell("", title, [str(error)])
    return _cell(svg.timelines_svg({title: result.timeline}, "", small=True), title, [*describe(result), UNITS])


def prediction(drawn: Prediction) -> str:
    """Renders the predicted timeline of a step, its duration, and the peak memory of each rank."""
    seconds, is_timed = drawn.timeline.seconds, drawn.unit == "seconds"
    title = f"predicted step: {_size(drawn.program)}"
    took = format_seconds(seconds) if is_timed else f"{seconds:,.7g} units (a layer of cost 1 takes one unit)"
    text = [f"A step takes {took}. Ranks are idle for {drawn.bubble:.1%} of it."]
    if not is_timed:
        text.append("Pass sample= to GPipe to predict seconds.")
    text += (f"Rank {rank} holds at most {format_bytes(peak)}." for rank, peak in enumerate(drawn.peak_bytes or ()))
    return _cell(svg.timelines_svg({title: drawn.timeline}, "ms" if is_timed else "", small=True), title, text)


def plan(drawn: Plan) -> str:
    """Renders the predicted timeline of a plan, and the text of `plan.explain()`."""
    title = f"plan: {_size(drawn.program)}, schedule {drawn.schedule}"
    return _cell(svg.timelines_svg({title: drawn.simulation.timeline}, small=True), title, [drawn.explain()])


def recording(drawn: "Recording") -> str:
    """Renders the recorded step of median length and its prediction, its breakdown, and advice."""
    if not drawn.runs:
        return _cell("", "", [NO_STEPS])
    report = drawn._steps("")
    step, count = report.timelines[report.typical], len(report.timelines)
    title = "measured step" if count == 1 else f"measured step (median of {count})"
    predicted = {} if report.predicted is None else {"predicted step": report.predicted}
    recorded = drawn._recorded_steps([step])
    text = [str(recorded.breakdown), explain(recorded), *[ONE_STEP][: count - 1]]
    return _cell(svg.timelines_svg({title: step, **predicted}, small=True), title, text)


def pipe(drawn: "GPipe") -> str:
    """Renders the predicted timeline of a step, and the text of `pipe.summary()`."""
    if drawn.micro_batches * len(drawn.layers_per_partition) > MAX_ACTIONS:
        return _cell("", "", [TOO_LARGE])
    title, expected = f"pipe: {_size(drawn.program, 'partition')}", drawn.prediction
    picture = svg.timelines_svg({title: expected.timeline}, "ms" if expected.unit == "seconds" else "", small=True)
    return _cell(picture, title, [drawn.summary()])


def _size(program: Program, what: str = "rank") -> str:
    return f"{program.ranks} {what}{'s' * (program.ranks != 1)}, {program.micro_batches_text}"


def _cell(picture: str, title: str, texts: Sequence[str]) -> str:
    lines = [line for text in texts for each in text.splitlines() for line in wrap(each, COLUMNS)]
    if (more := len(lines) - MAX_LINES) > 0:  # Shortens a table in the middle, and keeps the text below the table.
        lines[MAX_LINES // 2 : MAX_LINES // 2 + more] = [f"... {more} more lines ..."]
    text = "\n".join(map(_printable, lines))
    address = f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"
    image = f'<img alt="{escape(title)}" style="max-width: 100%" src="{address}"/>' if picture else ""
    return f'<div>{image}<pre style="overflow-x: auto; white-space: pre; font-family: monospace">{text}</pre></div>'


def _printable(text: str) -> str:
    """Escapes a text for XML, and replaces unprintable characters. Names of layers may contain such characters."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
