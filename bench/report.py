"""Results as they are kept: JSON with all that was measured, Markdown to read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 4) -> str:
    """The median with the least and the greatest: `12.3 (11.9-13)`."""
    low, middle, high = (f"{scale * v:.{digits}g}" for v in (min(values), median(values), max(values)))
    return f"{middle} ({low}-{high})"


def describe(facts: Mapping[str, str]) -> str:
    """Where a result comes from, in two lines."""
    raised = "" if facts["priority"] == "0" else f", its session at nice {facts['priority']}"
    return (
        f"{facts['machine']}. Python {facts['python']}, torch {facts['torch']}, torchgpipe {facts['torchgpipe']}, "
        f"DeepSpeed {facts['deepspeed']}.\n"
        f"`{facts['command']}`{raised}, at commit {facts['commit']}, {facts['date']}."
    )


def write(name: str, markdown: str, data: object) -> None:
    """Keeps a result."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(markdown.rstrip() + "\n")
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(markdown)
