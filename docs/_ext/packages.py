"""Draws the packages of gpipe, from the import contracts in pyproject.toml: `python docs/_ext/packages.py`.

A row is a layer of the contract "imports go down only"; a box has the first sentence of the package's docstring. The
picture, docs/packages.svg, is checked in, so that pages show it without a build; a test compares the two.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gpipe"
PICTURE = ROOT / "docs" / "packages.svg"

WIDTH, LEFT, PAD, GAP = 760, 46, 10, 8  # units of the picture
HEAD, LINE = 22, 15  # heights in a box: of the name, of a line of text
LETTER = 6.1  # rough width of type
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.page { fill: #ffffff } .package { fill: #dbe7f5; stroke: #4477aa } .module { fill: #f3f4f6; stroke: #8c959f }
.name { font: 600 13px ui-monospace, "DejaVu Sans Mono", monospace } .soft { font-size: 11px; fill: #59636e }
.right { text-anchor: end } .arrow { stroke: #59636e; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .package { fill: #1b2b40; stroke: #6b9bd1 }
  .module { fill: #161b22; stroke: #59636e } .soft { fill: #9198a1 } .arrow { stroke: #9198a1 }
}
"""


def draw() -> str:
    """The picture, as SVG."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    torchless = [name for contract in contracts if contract.get("forbidden_modules") == ["torch"]
                 for name in contract["source_modules"]]  # fmt: skip
    lines, top = list[str](), float(PAD)
    for layer in layers:
        names = layer.split(" | ")
        width = (WIDTH - LEFT - PAD - GAP * (len(names) - 1)) / len(names)
        texts = [wrap(_says(name), int((width - 2 * PAD) / LETTER)) for name in names]
        height = HEAD + LINE * max(map(len, texts)) + PAD / 2
        for at, (name, text) in enumerate(zip(names, texts, strict=True)):
            lines += _box(name, text, LEFT + at * (width + GAP), top, width, height, torchless)
        top += height + GAP
    bottom = top - GAP
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + PAD:g}" role="img" '
        f'aria-label="The packages of gpipe: imports go down only">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{bottom + PAD:g}" rx="6"/>',
        f'<path class="arrow" d="M32 {PAD}V{bottom:g}m-5 -8l5 8l5 -8"/>',
        f'<text class="soft" transform="translate(20 {bottom / 2:g}) rotate(-90)" text-anchor="middle">'
        "imports go down only</text>",
        *lines,
        "</svg>\n",
    ))  # fmt: skip


def _says(name: str) -> str:
    """The first sentence of a package's docstring, or of a module's."""
    file = SOURCE / name / "__init__.py" if (SOURCE / name).is_dir() else SOURCE / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].replace("`", "").split())


def _box(
    name: str, text: list[str], x: float, y: float, width: float, height: float, torchless: list[str]
) -> Iterator[str]:
    kind = "package" if (SOURCE / name).is_dir() else "module"
    yield f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
    yield f'<text class="name" x="{x + PAD:g}" y="{y + 16:g}">{name}</text>'
    for full in torchless:
        package, _, part = full.removeprefix("gpipe.").partition(".")
        if package == name:
            note = f"{part} imports no torch" if part else "imports no torch"
            yield f'<text class="soft right" x="{x + width - PAD:g}" y="{y + 16:g}">{note}</text>'
    for at, line in enumerate(text):
        yield f'<text x="{x + PAD:g}" y="{y + HEAD + LINE * (at + 0.7):g}">{escape(line)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
