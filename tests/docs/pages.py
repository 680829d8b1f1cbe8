"""The pages of the documentation, and the blocks of code on them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+\.py)\n")
LAUNCHERS = ("python", "torchrun")


@dataclass(frozen=True)
class Block:
    """A block between ``` fences.

    Attributes:
        language: What stands behind the first fence.
        text: What is in it.
        line: Where it begins.
    """

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the script that this block is, which is its first line; None if it is no script."""
        named = FILE.match(self.text) if self.language == "python" else None
        return named and named[1]

    @property
    def commands(self) -> list[str]:
        """The commands of a block of shell, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        return [command for line in lines if (command := line.split("#")[0].strip())]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in BLOCK.finditer(text)]


def scripts_of(page: Path) -> set[str]:
    return {block.file for block in blocks_of(page) if block.file is not None}


def starts(command: str, script: str) -> bool:
    """Whether a command starts a script, on this host alone."""
    words = shlex.split(command)
    return words[0] in LAUNCHERS and script in words and "HOST" not in command
