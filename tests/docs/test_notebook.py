"""The notebook in examples runs from top to bottom in a kernel of its own, and shows a picture of each value."""

import json
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.docs.pages import ROOT
from tests.support.notebooks import alone

FILE = ROOT / "examples" / "notebook.ipynb"
SHOWN = ["pipe", "pipe.program", "pipe.prediction", "recording", "plan"]


def test_the_notebook_runs_and_shows_a_picture_of_each_value(tmp_path: Path) -> None:
    notebook = nbformat.read(FILE, as_version=4)
    client = NotebookClient(notebook, timeout=None, startup_timeout=3600, iopub_timeout=3600, kernel_name="python3")
    client.execute(env=alone(tmp_path), cwd=str(tmp_path))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    shown = {cell.source.splitlines()[-1]: output for cell in cells for output in cell.outputs if "data" in output}
    assert list(shown) == SHOWN
    assert all("data:image/svg+xml;base64," in output.data["text/html"] for output in shown.values())


def test_the_notebook_is_kept_without_what_it_showed() -> None:
    """Its times are of the machine that made them; the site has it with what it shows when it is built."""
    notebook = json.loads(FILE.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    page = ROOT / "docs" / "how-to" / "notebook.md"
    assert "../examples/notebook.ipynb" in page.read_text(encoding="utf-8")
