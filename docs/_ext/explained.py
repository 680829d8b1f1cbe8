"""Fills the reference of errors and findings.

Each `<!-- explanations: SECTION -->` becomes the entries of that section.
"""

import re

from sphinx.application import Sphinx

from gpipe.explanations import Explanation, explanations

PLACE = re.compile(r"^<!-- explanations: (.*) -->$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the change of the pages."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Replaces the marks of a page by entries."""
    source[0] = PLACE.sub(lambda mark: section(mark[1]), source[0])


def section(name: str) -> str:
    """Returns the entries of a section as Markdown."""
    return "\n\n".join(map(entry, (item for item in explanations().values() if item.section == name)))


def entry(item: Explanation) -> str:
    """Returns an entry as a subsection, so that its slug is an anchor."""
    messages = "\n>\n".join(f"> `{message}`" for message in item.beginnings)  # one paragraph each
    return f"### {item.slug}\n\n{messages}\n\n{item.text}"
