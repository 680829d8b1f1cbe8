"""Reads the sentences that gpipe says to people: documentation, docstrings and messages.

The prose lint reads them, and a judge gets a random sample, the same for each seed:

    python tools/sentences.py SEED [--count 100] [--source docs|docstrings|messages]
    python tools/sentences.py SEED --package FOLDER     # docstrings of another package, as a control

- docs: prose of README.md, CONTRIBUTING.md, docs/ and src/gpipe/explanations/, without code, tables and headings
- docstrings: of src/, without examples and names of sections
- messages: texts of five words or more in src/: errors, warnings, findings and notes
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHORTEST = {"docs": 4, "docstrings": 4, "messages": 5}  # words
LITERAL = 4  # columns by which a drawing or a table in a docstring is indented
WORD = re.compile(r"[A-Za-z]{2,}")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|et al|vs|cf|Fig|Sec|approx)\.$")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*`]*\s+(?=[\"'(*`\[]*[A-Z0-9`])")
NOT_PROSE = re.compile(r"\s*(#|\||!\[|<|Section: |Message: |-{3,}|={3,})")
LIST_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s|:\s")
DOC_SECTION = re.compile(
    r"\s*(Args|Arguments|Keyword Args|Parameters|Attributes|Returns?|Yields?|Raises|Notes?|Warnings?|See also):*\s*$",
    re.IGNORECASE,
)
DOC_EXAMPLE = re.compile(r"\s*(Examples?|Usage|.*::)\s*:?\s*$")
DOC_ENTRY = re.compile(r"\s*\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}\w+)*\s*(\([^)]*\))?\s*:\s+")
MARKUP = re.compile(r"</|/>|[{}];|\{\s*\n|px\b|function\s*\(|viewBox|&&|^\s*#|==|::|^--")  # HTML, scripts, code


class Sentence(NamedTuple):
    """A sentence, where it is from, and the file."""

    source: str
    file: str
    text: str


def all_sentences(root: Path) -> Iterator[Sentence]:
    """Yields the sentences of a checkout."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    for page in [*pages, *sorted((root / "src").rglob("*.md"))]:
        if "_build" not in page.parts:
            yield from _each("docs", page.relative_to(root), paragraphs_of_page(page.read_text()))
    for path in sorted((root / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = [text for _, text in docstrings_of(tree)]
        yield from _each("docstrings", path.relative_to(root), docstring_paragraphs(docstrings))
        for text in messages_of(tree):
            yield Sentence("messages", str(path.relative_to(root)), text)


def _each(source: str, file: Path, paragraphs: Iterator[str]) -> Iterator[Sentence]:
    for paragraph in paragraphs:
        for text in split_sentences(paragraph):
            if len(WORD.findall(text)) >= SHORTEST[source]:
                yield Sentence(source, str(file), text)


def split_sentences(paragraph: str) -> list[str]:
    """Splits a paragraph into sentences."""
    text = re.sub(r"\s+", " ", paragraph).strip()
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        if not ABBREVIATION.search(text[start : end.start()]):
            sentences.append(text[start : end.end()].strip())
            start = end.end()
    return [*sentences, text[start:].strip()]


def paragraphs_of_page(markdown: str) -> Iterator[str]:
    """Yields the paragraphs and list items of a page, without code, tables, headings and directives."""
    lines: list[str] = []
    fence = None
    for line in markdown.splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,}|:{3,})", line)
        if fence is not None:
            fence = None if mark and mark[1].startswith(fence) and line.strip() == mark[1] else fence
        elif mark:
            fence = mark[1][0] * 3
            lines.append("")
        elif NOT_PROSE.match(line):
            lines.append("")
        elif LIST_ITEM.match(line):
            lines += ["", re.sub(r"^\s*([-*+]|\d+\.|:)\s+", "", line)]
        else:
            lines.append(line)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))  # Of a link, its text.
    yield from (part for part in re.split(r"\n\s*\n", text) if part.strip() and not re.fullmatch(r"`[^`]*`\s*", part))


def docstrings_of(tree: ast.Module) -> Iterator[tuple[ast.Constant, str]]:
    """Yields each docstring, and each text below a field of a class, with its node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value, node.value.value


def docstring_paragraphs(docstrings: list[str]) -> Iterator[str]:
    """Yields paragraphs, list items and descriptions of arguments, without examples and names of sections."""
    for docstring in docstrings:
        first, _, rest = docstring.partition("\n")
        yield from _paragraphs([first.strip(), *_dedented(rest)])


def _dedented(text: str) -> list[str]:
    lines = text.expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


def _paragraphs(lines: list[str]) -> Iterator[str]:
    paragraph: list[str] = []
    example: int | None = None  # The indentation of the line that begins an example.
    entries: int | None = None  # The indentation of entries in a section; -1 until its first line.
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if example is not None and line.strip() and indent <= example:
            example = None
        if example is not None:
            continue
        if entries is None and indent >= LITERAL and line.strip() and not LIST_ITEM.match(line) and not paragraph:
            continue  # A drawing or a table.
        starts_example = bool(DOC_EXAMPLE.match(line)) or line.lstrip().startswith(">>>")
        starts_section = bool(DOC_SECTION.match(line))
        if starts_example or starts_section or not line.strip():
            yield " ".join(paragraph)
            paragraph = []
            example = (indent if not line.lstrip().startswith(">>>") else indent - 1) if starts_example else None
            entries = -1 if starts_section else entries
            continue
        entries = indent if entries == -1 else entries
        is_entry = indent == entries and DOC_ENTRY.match(line)
        if is_entry or re.match(r"\s*([-*]|\d+\.)\s", line):
            yield " ".join(paragraph)
            paragraph = []
            line = DOC_ENTRY.sub("", line, count=1) if is_entry else re.sub(r"^\s*([-*]|\d+\.)\s+", "", line)
        paragraph.append(line.strip())
    yield " ".join(paragraph)


def messages_of(tree: ast.Module) -> Iterator[str]:
    """Yields the texts that people read: no docstrings, no markup. Placeholders are {names}."""
    docstrings = {id(node) for node, _ in docstrings_of(tree)}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        text = None if id(node) in docstrings else text_of(node)
        if text is None:
            pending += reversed(list(ast.iter_child_nodes(node)))
        elif len(WORD.findall(re.sub(r"\{[^}]*\}", "", text))) >= SHORTEST["messages"] and not MARKUP.search(text):
            yield re.sub(r"\s+", " ", text).strip()


def text_of(node: ast.AST) -> str | None:
    """Returns the text of a string expression, or None for any other node."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(
                v.value if isinstance(v, ast.Constant) else f"{{{ast.unparse(v.value)[:30]}}}" for v in values
            )
        case ast.BinOp(left, ast.Add(), right):
            both = text_of(left), text_of(right)
            return both[0] + both[1] if both[0] is not None and both[1] is not None else None
    return None


def main() -> None:
    """Prints a random sample of sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--source", action="append", choices=list(SHORTEST))
    parser.add_argument("--package", type=Path, action="append", default=[])
    options = parser.parse_args()
    sentences: list[Sentence] = []
    for folder in options.package:
        for path in sorted(folder.rglob("*.py")):
            docstrings = docstring_paragraphs([text for _, text in docstrings_of(ast.parse(path.read_text()))])
            sentences += _each("docstrings", path.relative_to(folder), docstrings)
    if not options.package:
        sentences = list(all_sentences(Path(__file__).parents[1]))
    for source in ["docstrings"] if options.package else options.source or list(SHORTEST):
        texts = sorted({sentence.text for sentence in sentences if sentence.source == source})
        chosen = random.Random(f"{options.seed}/{source}").sample(texts, min(options.count, len(texts)))
        print(f"## {source}: {len(chosen)} of {len(texts)}, seed {options.seed}")
        for number, text in enumerate(chosen, 1):
            print(f"{number:3} {text}")
        print()


if __name__ == "__main__":
    main()
