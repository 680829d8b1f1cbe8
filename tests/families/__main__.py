"""Trains every family of the catalogue through pipes, and keeps what came of it.

python -m tests.families                  all
python -m tests.families llama gpt2 ...   some; what is known of the others stays
"""

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.families.catalogue import FAMILIES, named
from tests.families.law import Verdict, judge
from tests.soak.results import facts

FILE = Path(__file__).parent / "results" / "families.json"


def keep(verdicts: Sequence[Verdict], file: Path = FILE) -> None:
    """Writes verdicts and their origin, in place of the earlier verdicts of these families."""
    file.parent.mkdir(exist_ok=True)
    before = json.loads(file.read_text(encoding="utf-8"))["families"] if file.exists() else []
    families = {one["name"]: one for one in before}
    families |= {one.name: {**asdict(one), "right": one.right} for one in verdicts}
    about = {**facts(), "transformers": transformers.__version__}
    kept = {"about": about, "families": [families[family.name] for family in FAMILIES if family.name in families]}
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts verdicts by outcome.

    >>> summary([Verdict("llama", "causal"), Verdict("opt", "causal", refused="draws")])
    '2 families: 1 right, 1 refused, 0 wrong'
    """
    right, refused = sum(one.right for one in verdicts), sum(bool(one.refused) for one in verdicts)
    return f"{len(verdicts)} families: {right} right, {refused} refused, {len(verdicts) - right - refused} wrong"


def line(verdict: Verdict) -> str:
    """Summarizes a family in one line.

    >>> line(Verdict("gpt2", "causal", layers=6, shared=8.1e-8, recording=0.07))
    'gpt2                     right    6 layers,   70 ms to record; shared parameters within 8e-08'
    """
    if verdict.refused:
        return f"{verdict.name:24} refused  {verdict.refused}"
    said = [f"{verdict.layers} layers, {1000 * verdict.recording:4.0f} ms to record", *verdict.mistakes]
    said += [] if verdict.shared is None else [f"shared parameters within {verdict.shared:.0e}"]
    said += [f"output: {verdict.output}"] if verdict.output else []
    return f"{verdict.name:24} {'right' if verdict.right else 'WRONG':8} {'; '.join(said)}"


def main(names: Sequence[str]) -> int:
    """Trains families. Returns 1 if one of them is wrong."""
    warnings.simplefilter("ignore")
    families = [named(name) for name in names] or [*FAMILIES]
    console = Console()
    columns = TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    verdicts = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(families))
        for family in families:
            progress.update(task, description=family.name)
            verdicts.append(judge(family))
            progress.console.print(line(verdicts[-1]), highlight=False, markup=False, soft_wrap=True)
            progress.advance(task)
    console.print(summary(verdicts), highlight=False)
    keep(verdicts)
    return int(any(not one.right and not one.refused for one in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
