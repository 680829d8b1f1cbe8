"""Renders a report as one self-contained HTML page, which needs no network and no other files.

All text is escaped, and a content security policy in `page.html` prevents the page from loading anything. Sections
without data are omitted. Colors follow the reader's light or dark mode. Only the timeline needs a script: `page.js`
draws it from compact JSON. If a report has many steps, the page shows only some of these steps, so that it opens
quickly.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from math import isfinite
from string import Template

from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.profiling.breakdown import MEANING, percentages, throughput_texts
from gpipe.profiling.stored import Report
from gpipe.profiling.svg import COLORS, THIN, is_bright, kinds_in, most_stages, note_of, nth_stages, read_file, shade
from gpipe.schedule.action import NAMES, Action, Kind
from gpipe.schedule.timeline import Timeline

MAX_SPANS = 30_000  # about 17 characters each, so half a megabyte
MAX_STEPS = 100
PARTS = 1_000_000
"""The number of time units in a step. Times are integers. At maximum zoom, one unit is two pixels wide."""
REST = ("#bbbbbb", "#8c96a3", "#aa3377", "#e07b39", "#66ccee", "#997755", "#cc6688", "#5566bb", "#77aa99", "#d0a0d0")
"""The colors of those parts of the breakdown that are not kinds of actions, in order."""


def drawn_steps(report: Report) -> tuple[int, ...]:
    """Returns the indices of the steps to draw: all steps, or the median, the slowest, and evenly spaced steps."""
    steps = report.timelines
    longest = max((len(timeline.spans) for timeline in steps), default=0)
    room = max(2, min(MAX_STEPS, MAX_SPANS // max(1, longest)))
    if len(steps) <= room:
        return tuple(range(len(steps)))
    slowest = max(range(len(steps)), key=lambda step: steps[step].seconds)
    evenly = (round(at * (len(steps) - 1) / max(1, room - 3)) for at in range(room - 2))
    return tuple(sorted({report.typical, slowest, *evenly}))


def steps_json(report: Report) -> str:
    """Returns JSON with the data that the script of the page draws.

    The members `steps` and `predicted` contain one flat list of integers per rank. The list has four numbers per
    action, ordered by time:

    - the index in the list `actions`
    - the micro-batch, or -1
    - the time between the start of the previous action and the start of this action, in units of `1 / PARTS` steps
    - the duration, in the same units
    """
    stages = most_stages(_all_timelines(report))
    places: dict[tuple[Action, int], int] = {}  # Actions that differ only in the micro-batch share one entry.

    def described(action: Action, nth: int) -> dict[str, object]:
        color = shade(action.kind, nth, stages)
        return {
            "name": NAMES[action.kind],
            "stage": action.stage,
            "route": "" if action.route is None else str(action.route),
            "color": color,
            "dark": is_bright(color),
            "thin": action.kind in THIN,
        }

    def encoded(timeline: Timeline) -> dict[str, object]:
        part, nth = timeline.seconds / PARTS, nth_stages(timeline)
        lanes: list[list[int]] = [[] for _ in range(timeline.ranks)]
        begun = [0] * timeline.ranks
        for span in sorted(timeline.spans, key=lambda span: span.start):
            start, end, action = round(span.start / part), round(span.end / part), span.action
            micro_batch = -1 if action.micro_batch is None else action.micro_batch
            alike = Action(action.kind, action.stage, route=action.route), nth[span.rank, action.stage]
            place = places.setdefault(alike, len(places))
            lanes[span.rank] += place, micro_batch, start - begun[span.rank], end - start
            begun[span.rank] = start
        busy = (round(timeline.busy(rank) / timeline.seconds, 4) for rank in range(timeline.ranks))
        ranks = [{"busy": share, "actions": lane} for share, lane in zip(busy, lanes, strict=True)]
        return {"seconds": timeline.seconds, "slices": timeline.slices, "ranks": ranks}

    numbered = ((step + 1, report.timelines[step]) for step in drawn_steps(report))
    steps = [{"number": number, **encoded(timeline), "other": dict(timeline.other)} for number, timeline in numbered]
    predicted = None if report.predicted is None else encoded(report.predicted)
    actions = [described(*each) for each in places]
    members = {"steps": steps, "predicted": predicted, "actions": actions, "parts": PARTS}
    return json.dumps(members, separators=(",", ":"), allow_nan=False)


def _all_timelines(report: Report) -> list[Timeline]:
    return [*report.timelines, *([] if report.predicted is None else [report.predicted])]


def report_html(report: Report) -> str:
    """Renders a report as one HTML document.

    Args:
        report: The report, for example `recording.report("my run")`. Empty parts of the report are omitted.

    Returns:
        The document, which contains all styles, scripts and pictures and needs no other files.

    Raises:
        ValueError: If a timeline is 0 seconds long.

    >>> page = report_html(Report("a <run>"))
    >>> "<h1>a &lt;run&gt;</h1>" in page, "<section" in page
    (True, False)
    """
    if any(timeline.seconds <= 0 for timeline in _all_timelines(report)):
        raise ValueError("A timeline is 0 seconds long. Pass timelines that are longer than 0 seconds.")
    sections = {
        ("timeline", "Timeline"): _timeline(report),
        ("breakdown", "Where the time went"): _breakdown(report),
        ("memory", "Memory at the peak"): _memory(report),
        ("losses", "Loss"): _losses(report),
        ("configuration", "Configuration"): _configuration(report),
    }
    title, header = escape(report.title), "\n".join(_header(report))
    body = "\n".join(line for named, lines in sections.items() for line in _section(*named, lines))
    return _filled(
        "page.html", title=title, style=read_file("page.css"), header=header, body=body, script=_script(report)
    )


def _filled(template: str, **places: str) -> str:
    return Template(read_file(template)).substitute(places)


def _section(name: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yields a section of the page, unless it is empty."""
    if lines := list(lines):
        yield f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>'
        yield from lines
        yield "</section>"


def _header(report: Report) -> Iterator[str]:
    if report.sentence:
        yield f'<p class="sentence">{escape(report.sentence)}</p>'
    if figures := list(_figures(report)):
        yield '<dl class="figures">'
        for name, value, note in figures:
            small = f"<small>{escape(note)}</small>" if note else ""
            yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"
        yield "</dl>"


def _figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yields the main numbers of a report: a name, a value, and a second value for comparison."""
    predicted, losses = report.predicted, report.losses
    if report.timelines:
        typical, steps = report.timelines[report.typical], len(report.timelines)
        yield "step", format_seconds(typical.seconds), f"median of {steps}" if steps > 1 else ""
        note = "of the time of all ranks"
        if predicted is not None:
            ratio = typical.seconds / predicted.seconds
            more = f"{percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'} time"
            more = f"{ratio:.1f} times as long" if ratio >= 2 else more
            yield "predicted", format_seconds(predicted.seconds), f"measured: {more}"
            note = f"predicted {percent(predicted.idle_share())}"
        yield "not computing", percent(typical.idle_share()), note
    elif predicted is not None:
        yield "predicted step", format_seconds(predicted.seconds), f"idle {percent(predicted.idle_share())}"
    if texts := throughput_texts(report.throughput):
        yield "throughput", texts[0], ", ".join(texts[1:])
    if report.memory:
        peaks = [sum(parts.values()) for parts in report.memory]
        yield "peak memory", format_bytes(max(peaks)), f"rank {peaks.index(max(peaks))}" if len(peaks) > 1 else ""
    if losses:
        yield "last loss", f"{losses[-1]:.4g}", f"from {losses[0]:.4g}" if len(losses) > 1 else ""


def _timeline(report: Report) -> Iterator[str]:
    """Yields the HTML elements on which the script draws the timeline."""
    drawn = _all_timelines(report)
    if not drawn:
        return
    checkbox = '<label><input type="checkbox" id="show-predicted" checked> show prediction above each rank</label>'
    kinds = ((NAMES[kind], COLORS[kind]) for kind in kinds_in(drawn))
    yield _filled(
        "timeline.html",
        choice="\n".join(_step_choice(report)),
        predicted=checkbox if report.predicted is not None and report.timelines else "",
        legend="\n".join(_legend([*kinds, ("idle", "var(--idle)"), (note_of(drawn), "")])),
    )


def _step_choice(report: Report) -> Iterator[str]:
    """Yields a selectable bar for each step. The height of the bar shows the duration of the step."""
    shown = drawn_steps(report)
    if len(shown) < 2:
        return
    longest = max(report.timelines[step].seconds for step in shown)
    few = f" ({len(shown)} of {len(report.timelines)}: the median, the slowest, and evenly spaced others)"
    yield f'<fieldset id="steps"><legend>steps{few if len(shown) < len(report.timelines) else ""}</legend><div>'
    for step in shown:
        seconds = report.timelines[step].seconds
        label = f"step {step + 1}: {format_seconds(seconds)}" + (", the median" if step == report.typical else "")
        checked = " checked" if step == report.typical else ""
        radio = f'<input type="radio" name="step" value="{step + 1}"{checked} aria-label="{label}">'
        yield f'<label title="{label}">{radio}<i style="height:{seconds / longest:.1%}"></i></label>'
    yield "</div></fieldset>"


def _breakdown(report: Report) -> Iterator[str]:
    shares = report.shares
    if not shares:
        return
    known, rest = {NAMES[kind]: color for kind, color in COLORS.items()}, cycle(REST)
    known["communication"] = COLORS[Kind.SEND]
    colors, rounded = {name: known.get(name) or next(rest) for name in shares}, percentages(shares)
    whole = [timeline.seconds + sum(timeline.other.values()) for timeline in report.timelines]
    yield from _bar(shares, colors, sum(shares.values()))
    yield '<div class="wide"><table><thead><tr><th>part</th><th class="number">share</th>'
    yield '<th class="number">time</th></tr></thead><tbody>' if whole else "</tr></thead><tbody>"
    for name, share in shares.items():
        took = f'<td class="number">{format_seconds(share * sum(whole) / len(whole))}</td>' if whole else ""
        meaning = f"<small>{escape(MEANING[name])}</small>" if name in MEANING else ""
        yield (
            f'<tr><th scope="row"><i style="background:{colors[name]}"></i>{escape(name)}{meaning}</th>'
            f'<td class="number">{rounded[name]:.1f} %</td>{took}</tr>'
        )
    yield "</tbody></table></div>"


def _bar(parts: Mapping[str, float], colors: Mapping[str, str], whole: float) -> Iterator[str]:
    """Yields a bar that shows parts of a whole side by side. The caller must print the numbers as text."""
    yield '<div class="bar" aria-hidden="true">'
    for name, part in parts.items():
        share = part / whole if whole else 0.0
        yield f'<i style="width:{share:.3%};background:{colors[name]}" title="{escape(name)} {percent(share)}"></i>'
    yield "</div>"


def _memory(report: Report) -> Iterator[str]:
    """Yields a bar and its numbers for each rank. All bars have the same scale."""
    names = dict.fromkeys(name for parts in report.memory for name in parts)
    colors = dict(zip(names, cycle(COLORS.values()), strict=False))
    most = max((sum(parts.values()) for parts in report.memory), default=0)
    for rank, parts in enumerate(report.memory):
        text = ", ".join(f"{escape(name)} {format_bytes(count)}" for name, count in parts.items())
        yield f'<div class="rank"><p><b>rank {rank}</b><span>{format_bytes(sum(parts.values()))}</span></p>'
        yield from _bar(parts, colors, most)
        if "inside" in parts and report.predicted_memory:
            text += f"; {format_bytes(report.predicted_memory[rank])} predicted"
        yield f"<small>{text}</small></div>"
    if names:
        yield from _legend((escape(name), colors[name]) for name in names)


def _legend(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields a legend with a colored square for each name. Names are HTML."""
    yield '<ul class="legend">'
    for name, color in entries:
        patch = f'<i style="background:{color}"></i>' if color else ""
        yield f"<li>{patch}{name}</li>"
    yield "</ul>"


def _losses(report: Report) -> Iterator[str]:
    """Yields a loss curve with gaps at losses that are not finite. The script shows the loss at the mouse pointer."""
    losses, each = report.losses, report.loss_each
    odd = [str(at + 1) for at, loss in enumerate(losses) if not isfinite(loss)]
    finite = [loss for loss in losses if isfinite(loss)]
    if len(losses) == 1 and finite:  # A curve would be a dot.
        yield f"<p>{each} 1: {losses[0]:.4g}</p>"
    elif finite:
        label = f"loss of {len(losses)} {each}s, from {losses[0]:.4g} to {losses[-1]:.4g}"
        yield f'<div class="curve" data-each="{each}" data-losses="{" ".join(map(repr, losses))}">'
        yield f'<span class="high">{max(finite):.4g}</span><span class="low">{min(finite):.4g}</span>'
        yield f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{label}">'
        yield from _curve(losses, min(finite), max(finite))
        yield f'</svg><span class="first">{each} 1</span><span class="last">{len(losses)}</span></div>'
    if odd:
        shown = ", ".join(odd[:10]) + (", ..." if len(odd) > 10 else "")
        yield f'<p class="warning">not finite at {each} {shown}</p>'


def _curve(losses: Sequence[float], low: float, high: float) -> Iterator[str]:
    """Yields a line for each sequence of finite losses. A single point is drawn twice so that it is visible."""
    run: list[str] = []
    for at, loss in enumerate([*losses, float("nan")]):
        if isfinite(loss):
            x = 100 * at / max(1, len(losses) - 1)
            y = 100 * (high - loss) / (high - low) if high > low else 50.0
            run.append(f"{x:.2f},{y:.2f}")
        elif run:
            yield f'<polyline points="{" ".join(run if len(run) > 1 else run * 2)}"/>'
            run = []


def _configuration(report: Report) -> Iterator[str]:
    if report.configuration:
        yield '<dl class="settings">'
        for name, value in report.configuration.items():
            yield f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        yield "</dl>"


def _script(report: Report) -> str:
    if not _all_timelines(report):
        return f"<script>\n{read_file('page.js')}</script>"
    data = steps_json(report).replace("<", "\\u003c")  # No text in the data can end the element.
    return f'<script type="application/json" id="data">{data}</script>\n<script>\n{read_file("page.js")}</script>'


def percent(share: float) -> str:
    """Formats a share as a whole number of percent."""
    return f"{100 * share:.0f} %"
