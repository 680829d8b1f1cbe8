"""Draws programs from their table while the pages are built, so that no picture can be older than the code.

    {rows} gpipe                the rows of a schedule, as text
    {timeline} gpipe            what the simulator makes of them, as a picture
    {schedule} zb_v             forwards and backwards alone, in units, with bubble and peak below
    {needs} 1F0 1B0             what the rules say that these actions need
    {module-docstring} gpipe.schedule.rules
    {reading-order}             modules, one a line, each with its length and its first line

The first four take the options `ranks`, `stages-per-rank`, `micro-batches`, `remat`, `skip` (say, `early/3:0>2`) and
the flags `transfers`, `commits`, `ties` and `reduces`, which place these actions; `width` is that of a picture.
"""

import re
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gpipe.profiling import timelines_svg
from gpipe.profiling.lanes import describe
from gpipe.profiling.svg import WIDTH
from gpipe.schedule.action import Route, parse_action
from gpipe.schedule.cost import StageCost
from gpipe.schedule.laws import check
from gpipe.schedule.lower import place_commits, place_recompute, place_reduces, place_ties, place_transfers
from gpipe.schedule.program import Program
from gpipe.schedule.rules import needs
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import figures, simulate

FORWARD = 0.010  # seconds; a backward takes two of them


def routes(text: str) -> list[Route]:
    """Reads skip connections, such as `early/3:0>2`."""
    return list(Program.from_text(f"routes {text}").routes)


class Table(SphinxDirective):
    """What needs a program, which its options describe."""

    optional_arguments = 8
    option_spec = {  # noqa: RUF012  # as docutils has it
        "ranks": directives.positive_int,
        "stages-per-rank": directives.positive_int,
        "micro-batches": directives.positive_int,
        "remat": str,
        "skip": routes,
        "transfers": directives.flag,
        "commits": directives.flag,
        "ties": directives.flag,
        "reduces": directives.flag,
        "title": str,
        "width": directives.positive_int,
    }

    def program(self, schedule: str) -> Program:
        """Makes the program by the same passes as a pipe does."""
        size = self.options.get("ranks", 4), self.options.get("micro-batches", 4), self.options.get("stages-per-rank")
        program = program_of(schedule, *size)
        program, stages = replace(program, routes=(*program.routes, *self.options.get("skip", ()))), program.stages
        program = place_recompute(program, [self.options.get("remat", "never")] * stages)
        if "transfers" in self.options:
            program = place_transfers(program)
        for option, place in {"commits": place_commits, "ties": place_ties, "reduces": place_reduces}.items():
            program = place(program, range(stages)) if option in self.options else program
        if "transfers" in self.options:
            check(program)
        return program


class ProgramText(Table):
    """The rows, one a rank."""

    def run(self) -> list[nodes.Node]:
        """Returns them as text."""
        program = self.program(self.arguments[0])
        lines = (f"rank {rank}   " + " ".join(map(str, row)) for rank, row in enumerate(program.table))
        return [literal("\n".join(lines))]


class TimelinePicture(Table):
    """What the simulator makes of a program."""

    def run(self) -> list[nodes.Node]:
        """Returns it as a picture."""
        program = self.program(self.arguments[0])
        costs = [StageCost(forward=FORWARD, backward=2 * FORWARD)] * program.stages
        title = self.options.get("title", "")
        timeline, width = simulate(program, costs).timeline, self.options.get("width", WIDTH)
        return [self.picture(timelines_svg({title: timeline}, width=width), title, narrow=width < WIDTH)]

    def picture(self, svg: str, title: str, *, narrow: bool = False) -> nodes.Node:
        """Writes a picture, and shows it."""
        folder = Path(self.env.srcdir) / "_generated"
        folder.mkdir(exist_ok=True)
        file = folder / f"{sha256(svg.encode()).hexdigest()[:16]}.svg"
        file.write_text(svg, encoding="utf-8")
        image = nodes.image(uri=f"/_generated/{file.name}", alt=title)
        return nodes.container("", image, classes=["picture", *["narrow"] * narrow])


class SchedulePicture(TimelinePicture):
    """A schedule as `gpipe schedule` draws it."""

    def run(self) -> list[nodes.Node]:
        """Returns it as a picture, and what it costs."""
        (name,) = self.arguments
        program = self.program(name)
        each = program.stages // program.ranks
        stages = f" of {each} stages" if each > 1 else ""
        title = self.options.get(
            "title", f"{name}: {program.ranks} ranks{stages}, {program.micro_batches} micro-batches"
        )
        found = figures(program)
        said = "; ".join(describe(found))
        svg = timelines_svg({title: found.timeline}, unit="")
        return [self.picture(svg, title), nodes.paragraph(text=f"{said[0].upper()}{said[1:]}.")]


class Needs(Table):
    """What `gpipe.schedule.rules.needs` says of some actions of the schedule `gpipe`."""

    def run(self) -> list[nodes.Node]:
        """Returns a line for each."""
        program = self.program("gpipe")
        actions = [parse_action(text) for text in self.arguments]
        width = max(map(len, self.arguments))
        lines = (f"{action!s:{width}}  needs  {'  '.join(map(str, needs(action, program)))}" for action in actions)
        return [literal("\n".join(line.removesuffix("needs  ") for line in lines))]


class ModuleDocstring(SphinxDirective):
    """The docstring of a module; paragraphs of `Rule 1. ...` or `Law 1. ...` become lists."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns its paragraphs but the first, which says what the module is."""
        _, *paragraphs = cleandoc(import_module(self.arguments[0]).__doc__ or "").split("\n\n")
        return [_list_of(text) if NUMBERED.match(text) else nodes.paragraph(text=text) for text in paragraphs]


NUMBERED = re.compile(r"^((?:Rule|Law) \d+\.) ", re.MULTILINE)


def _list_of(text: str) -> nodes.bullet_list:
    _, *parts = NUMBERED.split(text)
    items = nodes.bullet_list()
    for name, said in zip(parts[::2], parts[1::2], strict=True):
        words = nodes.Text(" " + " ".join(said.split()))
        items += nodes.list_item("", nodes.paragraph("", "", nodes.strong(text=name), words))
    return items


class ReadingOrder(SphinxDirective):
    """Modules with their length and what they say of themselves."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Returns a table, and the sum of the lines."""
        modules = [line.strip() for line in self.content if line.strip()]
        rows, total = [], 0
        for name in modules:
            module = import_module(name)
            length = len(Path(module.__file__ or "").read_text().splitlines())
            total += length
            first = " ".join((module.__doc__ or "").split("\n\n")[0].split())
            rows.append((name.removeprefix("gpipe."), str(length), first))
        return [table(("module", "lines", "purpose"), [*rows, ("total", str(total), "")])]


def literal(text: str) -> nodes.literal_block:
    """Text as it is."""
    return nodes.literal_block(text, text, language="text")


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    """A table whose first column is code."""
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in (20, 7, 73)]
    head, body = nodes.thead(), nodes.tbody()
    head += _row([nodes.paragraph(text=cell) for cell in heads])
    for name, *cells in rows:
        first = nodes.paragraph("", "", nodes.literal(text=name) if "." in name else nodes.Text(name))
        body += _row([first, *(nodes.paragraph(text=cell) for cell in cells)])
    group += [head, body]
    return nodes.table("", group)


def _row(cells: list[nodes.paragraph]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


INITIAL = re.compile(r"^( *[A-Z])\.(?= |$)")
MODULES = re.compile(r"~(?:\w+\.)+(?=\w)")


def bare_names(app: Sphinx, doctree: nodes.document) -> None:
    """Has types that autodoc leaves as text go by their names alone, as all others do."""
    for text in list(doctree.findall(nodes.Text)):
        if "~" in text and isinstance(text.parent, nodes.emphasis | addnodes.literal_emphasis):
            text.parent.replace(text, nodes.Text(MODULES.sub("", text)))


def properties(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Keeps Google's style from taking what stands before a colon, in the docstring of a property, for its type."""
    if what in ("property", "attribute") and lines:
        lines[:1] = lines[0].replace(": ", ":\n").split("\n")


def docstrings(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Has reStructuredText, which reads docstrings here, keep pictures between fences, and take `M.` for no list."""
    kept, inside = list[str](), False
    for line in lines:
        if line.strip().startswith("```"):
            inside = not inside
            kept += [line.split("```")[0] + "::", ""] if inside else [""]
        else:
            kept.append(f"    {line}" if inside else INITIAL.sub(r"\1\\.", line))
    lines[:] = kept


def setup(app: Sphinx) -> dict[str, Any]:
    """Tells Sphinx of the directives."""
    app.add_directive("rows", ProgramText)
    app.add_directive("timeline", TimelinePicture)
    app.add_directive("schedule", SchedulePicture)
    app.add_directive("needs", Needs)
    app.add_directive("module-docstring", ModuleDocstring)
    app.add_directive("reading-order", ReadingOrder)
    app.connect("autodoc-process-docstring", properties, priority=400)  # before that style is read
    app.connect("autodoc-process-docstring", docstrings)
    app.connect("doctree-read", bare_names)
    return {"parallel_read_safe": True}
