"""Shows a notebook, executed while the pages are built, so that what it shows is what this version shows.

    {notebook} ../examples/notebook.ipynb

Its text is part of the page, but for its title, which is the page's.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from docutils import nodes
from docutils.statemachine import StringList
from nbclient import NotebookClient
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

HEADING = re.compile(r"(?:(##?) (.*?)\n+)?(.*)", re.DOTALL)
STARTS = 600  # seconds that a kernel may take to start, on a machine that does much else


class Notebook(SphinxDirective):
    """Its cells, and what they print and show."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns them; a cell that raises ends the build."""
        path = Path(self.env.srcdir, self.arguments[0]).resolve()
        self.env.note_dependency(str(path))
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, timeout=None, startup_timeout=STARTS, kernel_name="python3")
        with TemporaryDirectory() as folder:  # in place of what the builder has a kernel run when it starts
            client.execute(env={**os.environ, "IPYTHONDIR": folder})
        found = place = nodes.Element()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                place += nodes.literal_block(cell.source, cell.source, language="python")
                place += _shown(cell.outputs)
                continue
            level, title, text = HEADING.fullmatch(cell.source).groups("")
            if level == "##":
                place = nodes.section("", nodes.title(text=title), ids=[nodes.make_id(title)])
                found += place
            self.state.nested_parse(StringList(text.splitlines(), str(path)), 0, place)
        return found.children


def _shown(outputs: list[Any]) -> Iterator[nodes.Node]:
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "text/html" in data:
            yield nodes.raw("", f'<div class="cell">{data["text/html"]}</div>', format="html")
        else:
            yield nodes.literal_block(data["text/plain"], data["text/plain"], language="text")


def setup(app: Sphinx) -> dict[str, Any]:
    """Tells Sphinx of the directive."""
    app.add_directive("notebook", Notebook)
    return {"parallel_read_safe": True}
