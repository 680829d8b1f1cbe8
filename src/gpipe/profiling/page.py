"""A run as one page of HTML that needs nothing else: neither a network nor files beside it.

All text is escaped, and `page.html` has a policy that forbids it to load anything. What has no data has no section.
Colours follow the reader's light or dark mode; `page.js` draws the timeline, the only part that needs a script, from
JSON: small, whole numbers, names in a table. Of a run of many steps some are drawn, so that it opens at once.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from math import isfinite
from string import Template

from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.profiling.breakdown import MEANING, percentages
from gpipe.profiling.stored import Report
from gpipe.profiling.svg import COLORS, THIN, is_bright, kinds_in, most_stages, note_of, nth_stages, read_own, shade
from gpipe.schedule.action import NAMES, Action, Kind
from gpipe.schedule.timeline import Timeline

MOST_SPANS = 30_000  # about 17 characters each: half a megabyte
MOST_STEPS = 100
PARTS = 1_000_000
"""Into so many parts a step is divided: times are whole numbers of them. Zoomed in furthest, one is two pixels."""
REST = ("#bbbbbb", "#8c96a3", "#aa3377", "#e07b39", "#66ccee", "#997755", "#cc6688", "#5566bb", "#77aa99", "#d0a0d0")
"""Colours of parts that are no kind of action, in the order in which they come."""


def drawn_steps(report: Report) -> tuple[int, ...]:
    """The numbers, from 0, of the steps to draw: all, or the typical, the slowest, and others evenly between."""
    steps = report.timelines
    longest = max((len(timeline.spans) for timeline in steps), default=0)
    room = max(2, min(MOST_STEPS, MOST_SPANS // max(1, longest)))
    if len(steps) <= room:
        return tuple(range(len(steps)))
    slowest = max(range(len(steps)), key=lambda step: steps[step].seconds)
    evenly = (round(at * (len(steps) - 1) / max(1, room - 3)) for at in range(room - 2))
    return tuple(sorted({report.typical, slowest, *evenly}))


def steps_json(report: Report) -> str:
    """What the script of a page draws.

    `steps` and, if there is a prediction, `predicted` have for each rank a flat list of whole numbers, four for each
    action in the order of time: its place in the table `actions`, its micro-batch or -1, how long after the beginning
    of the one before it begins, and how long it lasts, both in parts of the step.
    """
    stages = most_stages(_all_timelines(report))
    places: dict[tuple[Action, int], int] = {}  # whatever their micro-batch, actions are written once

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
    """Draws a report as one HTML document.

    >>> page = report_html(Report("a <run>"))
    >>> "<h1>a &lt;run&gt;</h1>" in page, "<section" in page
    (True, False)

    Raises:
        ValueError: A timeline is 0 seconds long.
    """
    if any(timeline.seconds <= 0 for timeline in _all_timelines(report)):
        raise ValueError("a page draws timelines that are longer than 0 seconds each")
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
        "page.html", title=title, style=read_own("page.css"), header=header, body=body, script=_script(report)
    )


def _filled(template: str, **places: str) -> str:
    return Template(read_own(template)).substitute(places)


def _section(name: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    """A part of the page, if there is something in it."""
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
    """The numbers that one looks for first: a name, a value, and what to hold it against."""
    predicted, losses = report.predicted, report.losses
    if report.timelines:
        typical, steps = report.timelines[report.typical], len(report.timelines)
        yield "step", format_seconds(typical.seconds), f"median of {steps}" if steps > 1 else ""
        beside = "of all ranks’ time"
        if predicted is not None:
            ratio = typical.seconds / predicted.seconds
            more = f"{percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
            more = f"{ratio:.1f} times as long" if ratio >= 2 else more
            yield "predicted", format_seconds(predicted.seconds), f"it took {more}"
            beside = f"predicted {percent(predicted.idle_share())}"
        yield "not computing", percent(typical.idle_share()), beside
    elif predicted is not None:
        yield "predicted step", format_seconds(predicted.seconds), f"idle {percent(predicted.idle_share())}"
    if report.memory:
        peaks = [sum(parts.values()) for parts in report.memory]
        yield "peak memory", format_bytes(max(peaks)), f"rank {peaks.index(max(peaks))}" if len(peaks) > 1 else ""
    if losses:
        yield "last loss", f"{losses[-1]:.4g}", f"from {losses[0]:.4g}" if len(losses) > 1 else ""


def _timeline(report: Report) -> Iterator[str]:
    """What the script fills and listens to."""
    drawn = _all_timelines(report)
    if not drawn:
        return
    beside = '<label><input type="checkbox" id="show-predicted" checked> predicted, above each rank</label>'
    kinds = ((NAMES[kind], COLORS[kind]) for kind in kinds_in(drawn))
    yield _filled(
        "timeline.html",
        choice="\n".join(_step_choice(report)),
        predicted=beside if report.predicted is not None and report.timelines else "",
        legend="\n".join(_legend([*kinds, ("idle", "var(--idle)"), (note_of(drawn), "")])),
    )


def _step_choice(report: Report) -> Iterator[str]:
    """A bar for each step, as high as it was long, to choose it by."""
    shown = drawn_steps(report)
    if len(shown) < 2:
        return
    longest = max(report.timelines[step].seconds for step in shown)
    few = f": {len(shown)} of {len(report.timelines)}, the typical, the slowest, and others evenly between"
    yield f'<fieldset id="steps"><legend>steps{few if len(shown) < len(report.timelines) else ""}</legend><div>'
    for step in shown:
        seconds = report.timelines[step].seconds
        label = f"step {step + 1}: {format_seconds(seconds)}" + (
            ", the typical one" if step == report.typical else ""
        )
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
    """Parts side by side; the caller writes them in numbers too."""
    yield '<div class="bar" aria-hidden="true">'
    for name, part in parts.items():
        share = part / whole if whole else 0.0
        yield f'<i style="width:{share:.3%};background:{colors[name]}" title="{escape(name)} {percent(share)}"></i>'
    yield "</div>"


def _memory(report: Report) -> Iterator[str]:
    """A bar for each rank, with what is in it; all bars are on one scale."""
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
    """A patch, by its colour, for each name, which is HTML."""
    yield '<ul class="legend">'
    for name, color in entries:
        patch = f'<i style="background:{color}"></i>' if color else ""
        yield f"<li>{patch}{name}</li>"
    yield "</ul>"


def _losses(report: Report) -> Iterator[str]:
    """A curve, broken where a loss is no finite number; the script says what is pointed at."""
    losses, each = report.losses, report.loss_each
    odd = [str(at + 1) for at, loss in enumerate(losses) if not isfinite(loss)]
    finite = [loss for loss in losses if isfinite(loss)]
    if finite:
        label = f"loss of {len(losses)} {each}s, from {losses[0]:.4g} to {losses[-1]:.4g}"
        yield f'<div class="curve" data-each="{each}" data-losses="{" ".join(map(repr, losses))}">'
        yield f'<span class="high">{max(finite):.4g}</span><span class="low">{min(finite):.4g}</span>'
        yield f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{label}">'
        yield from _curve(losses, min(finite), max(finite))
        yield f'</svg><span class="first">{each} 1</span><span class="last">{len(losses)}</span></div>'
    if odd:
        some = ", ".join(odd[:10]) + (", ..." if len(odd) > 10 else "")
        yield f'<p class="warning">no finite number at {each} {some}</p>'


def _curve(losses: Sequence[float], low: float, high: float) -> Iterator[str]:
    """A line for each run of finite losses; a run of one is drawn twice, so that it shows."""
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
        return f"<script>\n{read_own('page.js')}</script>"
    data = steps_json(report).replace("<", "\\u003c")  # no text in it may end the element
    return f'<script type="application/json" id="data">{data}</script>\n<script>\n{read_own("page.js")}</script>'


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %"
