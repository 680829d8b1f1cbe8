"""Explains errors and findings.

A message about a model, an input or a loss ends with a slug in brackets, such as `[branch-on-value]`. This package
has one Markdown file for each slug, `branch-on-value.md`: the section of the reference, how the messages begin (`...`
stands for names and values), an empty line, and the explanation.

The pages "Errors" and "Findings" of the reference are made from these files, and `gpipe explain` prints them.
"""

import re
from pathlib import Path
from typing import NamedTuple

SITE = ""  # The address of the documentation, with a final slash. Empty until the documentation is published.
FINDINGS = ("Speed", "BatchNorm and replicas", "The loss", "Verification", "Several processes")
LINK = re.compile(r"\[([^\]]*)\]\(\.\./([\w/-]+)\.md[^)]*\)")


class Explanation(NamedTuple):
    """One entry of the reference.

    Attributes:
        slug: The name at the end of the message.
        section: The heading under which the reference has the entry.
        messages: How each message with this slug begins. `...` stands for a name or a value.
        text: The cause and the fix, in Markdown. Links are relative to a page of the reference.
    """

    slug: str
    section: str
    messages: tuple[str, ...]
    text: str

    @property
    def beginnings(self) -> list[str]:
        """The beginnings of the messages. Those that are not whole sentences end with `...`."""
        return [text if text.endswith((".", "...")) else f"{text.rstrip()} ..." for text in self.messages]

    @property
    def page(self) -> str:
        """The page of the reference that has the entry."""
        return "findings" if self.section in FINDINGS else "errors"


def explanations() -> dict[str, Explanation]:
    """Returns all entries by slug, in alphabetical order."""
    return {path.stem: _read(path) for path in sorted(Path(__file__).parent.glob("*.md"))}


def as_text(entry: Explanation) -> str:
    """Returns an entry as `gpipe explain` prints it."""
    text = LINK.sub(
        lambda link: f"{link[1]} ({SITE}{link[2]}.html)" if SITE else f"{link[1]} (docs/{link[2]}.md)", entry.text
    )
    messages = "\n".join(f"    {message}" for message in entry.beginnings)
    address = f"\n{SITE}reference/{entry.page}.html#{entry.slug}\n" if SITE else ""
    return f"{entry.slug}\n\n{messages}\n\n{text}{address}"


def _read(path: Path) -> Explanation:
    header, _, text = path.read_text(encoding="utf-8").partition("\n\n")
    fields = [line.partition(": ") for line in header.splitlines()]
    (section,) = [value for name, _, value in fields if name == "Section"]
    return Explanation(path.stem, section, tuple(value for name, _, value in fields if name == "Message"), text)
