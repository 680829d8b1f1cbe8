"""What a notebook shows as the value of a cell: a picture, and under it the words that `print` has for it.

The picture is an image whose address is the SVG itself. So it takes no style from the page and leaves none there, and
is seen in a notebook that is opened but not trusted too, of which other SVG is taken out.
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
from gpipe.profiling.breakdown import NOTHING
from gpipe.profiling.lanes import words
from gpipe.schedule.program import Program, ScheduleError
from gpipe.schedule.simulate import Prediction, figures

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe
    from gpipe.profiling.recording import Recording

MOST_ACTIONS = 10_000  # that a cell goes through for its words: about a second
MOST_LINES, COLUMNS = 60, 112  # of words, and in each of these lines
UNITS = "one unit is a forward or recompute of a stage, or half a backward (I: for inputs, W: for weights)"
TOO_LARGE = "what is predicted of so many micro-batches takes long to find: print(pipe.summary())"
ALL = "this is of the step above; print(recording) and recording.explain() go by all"


def program(drawn: Program) -> str:
    """What each rank does when, by units of time; if it cannot be run, why."""
    title = f"program: {_size(drawn)}"
    try:
        found = figures(drawn)
    except ScheduleError as error:
        return _cell("", title, [str(error)])
    return _cell(svg.timelines_svg({title: found.timeline}, "", small=True), title, [*words(found), UNITS])


def prediction(drawn: Prediction) -> str:
    """What a step is predicted to take, and ranks to hold."""
    seconds, is_timed = drawn.timeline.seconds, drawn.unit == "seconds"
    title = f"predicted step: {_size(drawn.program)}"
    took = format_seconds(seconds) if is_timed else f"{seconds:,.7g} units, of which a layer of cost 1 takes one"
    text = [f"a step takes {took}; ranks are idle for {drawn.bubble:.1%} of it"]
    if not is_timed:
        text.append("in seconds it is known where layers are measured, on a sample")
    text += (f"rank {rank} holds {format_bytes(peak)} at most" for rank, peak in enumerate(drawn.peak_bytes or ()))
    return _cell(svg.timelines_svg({title: drawn.timeline}, "ms" if is_timed else "", small=True), title, text)


def plan(drawn: Plan) -> str:
    """The step that is planned, and why."""
    title = f"plan: {_size(drawn.program)}, schedule {drawn.schedule}"
    return _cell(svg.timelines_svg({title: drawn.simulation.timeline}, small=True), title, [drawn.explain()])


def recording(drawn: "Recording") -> str:
    """The step of median length, with what was predicted, and where the time went."""
    if not drawn.runs:
        return _cell("", "", [NOTHING])
    report = drawn._steps("")
    step, count = report.timelines[report.typical], len(report.timelines)
    title = "measured step" if count == 1 else f"measured step: of median length of {count}"
    predicted = {} if report.predicted is None else {"predicted step": report.predicted}
    found = drawn._recorded_steps([step])
    text = [str(found.breakdown), explain(found), *[ALL][: count - 1]]
    return _cell(svg.timelines_svg({title: step, **predicted}, small=True), title, text)


def pipe(drawn: "GPipe") -> str:
    """The step that is predicted, and the summary."""
    if drawn.micro_batches * len(drawn.layers_per_partition) > MOST_ACTIONS:
        return _cell("", "", [TOO_LARGE])
    title, found = f"pipe: {_size(drawn.program, 'partition')}", drawn.prediction
    picture = svg.timelines_svg({title: found.timeline}, "ms" if found.unit == "seconds" else "", small=True)
    return _cell(picture, title, [drawn.summary()])


def _size(program: Program, what: str = "rank") -> str:
    return f"{program.ranks} {what}{'s' * (program.ranks != 1)}, {program.micro_batches_text}"


def _cell(picture: str, title: str, texts: Sequence[str]) -> str:
    lines = [line for text in texts for each in text.splitlines() for line in wrap(each, COLUMNS)]
    if (more := len(lines) - MOST_LINES) > 0:  # of a table, which has sentences under it
        lines[MOST_LINES // 2 : MOST_LINES // 2 + more] = [f"... {more} more lines ..."]
    said = "\n".join(map(_shown, lines))
    address = f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"
    image = f'<img alt="{escape(title)}" style="max-width: 100%" src="{address}"/>' if picture else ""
    return f'<div>{image}<pre style="overflow-x: auto; white-space: pre">{said}</pre></div>'


def _shown(text: str) -> str:
    """Any text, as XML may hold it: layers have names that users give."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
