"""Trains every family of the catalogue through pipes, and keeps what came of it.

python -m tests.families                  all
python -m tests.families llama gpt2 ...   some; what is known of the others stays
"""

import sys
import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.families.catalogue import FAMILIES, named
from tests.families.kept import keep, line, summary
from tests.families.law import judge


def main(names: Sequence[str]) -> int:
    """Tries families; 1 if one is wrong."""
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
