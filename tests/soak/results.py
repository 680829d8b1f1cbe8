"""Writes results of the soak: their origin, JSON with all data, and Markdown to read."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

import gpipe

RESULTS = Path(__file__).parent / "results"

Item = TypeVar("Item")


def facts() -> dict[str, str]:
    """Returns the facts about the machine and the software that a result includes."""
    main = sys.modules["__main__"].__spec__
    name = main.name if main else Path(sys.argv[0]).name
    return {
        "machine": f"{processor()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python -m", name, *sys.argv[1:]]),
    }


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Returns the commit of gpipe, with a plus if the working copy differs from it."""
    git = ["git", "-C", str(Path(str(gpipe.__file__)).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "."], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def describe(about: Mapping[str, str]) -> str:
    """Returns two lines about the origin of a result."""
    return (
        f"{about['machine']}. Python {about['python']}, torch {about['torch']}.\n"
        f"`{about['command']}`, at commit {about['commit']}, {about['date']}."
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table with the first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(path: Path, markdown: str, data: object) -> None:
    """Writes a result in place of the one before. An interrupted run keeps its last results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".md", markdown.rstrip()), (".json", json.dumps(data, indent=1))):
        part = path.with_suffix(f"{suffix}.part")
        part.write_text(text + "\n")
        part.replace(path.with_suffix(suffix))
