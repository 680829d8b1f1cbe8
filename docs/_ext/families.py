"""Shows the results of training families of transformers, which the repository keeps.

{families}                  a row for each family: layers, results, and why it is rejected
{families-summary}          the number of families by result, and the versions that were tested
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[2] / "tests" / "families" / "results" / "families.json"
HEADS = ("family", "task", "layers", "loss and gradients", "shared parameters", "output", "ms to trace")
WIDTHS = (22, 14, 7, 30, 14, 20, 8)
SAID = 12  # words of a reason


class Results(SphinxDirective):
    """A directive that reads the results."""

    def results(self) -> Any:
        """Returns the results. The page is built again if they change."""
        self.env.note_dependency(str(RESULTS))
        return json.loads(RESULTS.read_text(encoding="utf-8"))


class Families(Results):
    """One line for each family."""

    def run(self) -> list[nodes.Node]:
        """Returns them as a table."""
        group = nodes.tgroup(cols=len(HEADS))
        group += [nodes.colspec(colwidth=width) for width in WIDTHS]
        head, body = nodes.thead(), nodes.tbody()
        head += row(HEADS)
        for family in sorted(self.results()["families"], key=lambda family: family["name"]):
            body += row(cells(family), code=True)
        group += [head, body]
        return [nodes.table("", group)]


class Summary(Results):
    """The number of families by result."""

    def run(self) -> list[nodes.Node]:
        """Returns a paragraph."""
        found = self.results()
        families, about = found["families"], found["about"]
        right, refused = sum(one["right"] for one in families), sum(bool(one["refused"]) for one in families)
        wrong = len(families) - right - refused
        same = sum(one["right"] and one["shared"] is None for one in families)
        text = (
            f"Of {len(families)} families, {right} train to bitwise identical losses and gradients. {right - same} "
            f"of them share parameters between layers, whose gradients agree up to rounding. {refused} families "
            f"are rejected, and {wrong} are wrong. Tested with transformers {about['transformers']}, torch "
            f"{about['torch']}, on {about['machine']}."
        )
        return [nodes.paragraph(text=text)]


def cells(family: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a family's row."""
    name, task = family["name"], family["task"].replace("_", " ")
    if family["refused"]:
        return name, task, "", f"rejected: {shortened(family['refused'])}", "", "", ""
    bits = "identical" if family["right"] else f"wrong: {shortened('; '.join(family['mistakes']))}"
    shared = "none" if family["shared"] is None else f"within {family['shared']:.0e}"
    output = f"rejected: {shortened(family['output'])}" if family["output"] else "identical"
    return name, task, str(family["layers"]), bits, shared, output, f"{1000 * family['recording']:.0f}"


def shortened(text: str) -> str:
    """The first words of a text."""
    words = text.split()
    return " ".join(words[:SAID]) + (" ..." if len(words) > SAID else "")


def row(cells: tuple[str, ...], *, code: bool = False) -> nodes.row:
    """One row, whose first cell is code, if so."""
    first = nodes.paragraph("", "", nodes.literal(text=cells[0]) if code else nodes.Text(cells[0]))
    return nodes.row("", nodes.entry("", first), *(nodes.entry("", nodes.paragraph(text=cell)) for cell in cells[1:]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives."""
    app.add_directive("families", Families)
    app.add_directive("families-summary", Summary)
    return {"parallel_read_safe": True}
