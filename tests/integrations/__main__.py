"""Writes bench/results/trainer.md: how far trainings through a pipe are from those by Trainer itself.

python -m tests.integrations              all families
python -m tests.integrations llama t5 '2 processes' ... some, or there alone; what is known of the others stays
"""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import accelerate
import peft
import transformers
from transformers import Trainer

from gpipe.integrations.transformers import GPipeTrainer
from tests.families.catalogue import DOZEN
from tests.integrations.trained import MIDDLE, MODES, Make, Outcome, apart, train
from tests.soak.results import facts
from tests.support.jobs import trainer as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

FILE = Path(__file__).parents[2] / "bench" / "results" / "trainer.md"
WORLDS = {"2 processes": (2, 2), "3 processes": (3, 3), "2 replicas of 2": (4, 2), "2 replicas of 3": (6, 3)}
"""How many processes, and how many partitions, by what is said of them."""
PAGE = """# Trainer through a pipe

Twelve families of transformers, tiny, trained by `transformers.Trainer` with `gradient_accumulation_steps=4` and by
`GPipeTrainer`: two epochs of six batches of unequal lengths, the last of one row, AdamW, gradients clipped. Dropout
is off, and scores have weights of their own. A cell says how far log, weights and the optimizer's state are apart at
most, relative to the largest number of each tensor: `=` is the same bits. In threads each cell is of K=2 and K=3.
"resumed" goes on in the middle of an epoch, at K=3 where it was 2 and at K=2 where it was 3, over as many processes.
Two replicas are beside Trainer in two processes, and of a batch each has one row.

{table}

t5 has one table of words for encoder and decoder: the two parts of its gradient are added in another order. Adapters
are on all linear layers, but on those that peft allows in mamba2, and on attention alone in mixtral.

{about}
"""


def through(
    make: Callable[[int], Make], name: str, mode: str, folder: Path, partitions: int, goes_on: int
) -> Outcome:
    """A training, of the mode "resumed" its second part."""
    found = train(make(partitions), name, folder, mode)
    if mode == "resumed":
        return train(make(goes_on), name, folder, mode, resume=f"{folder}/checkpoint-{MIDDLE}")
    return found


def in_threads(name: str, mode: str, folder: Path) -> float:
    """How far K=2 and K=3 are from Trainer by itself."""
    expected = through(lambda partitions: Trainer, name, mode, folder / "0", 0, 0)
    piped: Callable[[int], Make] = lambda partitions: partial(GPipeTrainer, partitions=partitions)  # noqa: E731
    found = [through(piped, name, mode, folder / str(one), one, 5 - one) for one in (2, 3)]
    return max(apart(one, expected) for one in found)


def over_processes(pool: WorkerPool, world: int, partitions: int, name: str, mode: str, folder: Path) -> float:
    """How far processes are from Trainer by itself, in as many as there are replicas."""
    replicas, outcomes = world // partitions, []
    how = {"per_device_train_batch_size": 2 // replicas}  # as many steps
    for ranks, goes_on in ((partitions, 5 - partitions), (0, 0)):
        resume = None
        for own in (ranks, goes_on) if mode == "resumed" else (ranks,):
            here, processes = folder / f"{ranks} then {own}", replicas * max(own, 1)
            told = answers(pool.run(jobs.train, own, name, mode, str(here), how, resume, world=processes))
            resume = f"{here}/checkpoint-{MIDDLE}"
        outcomes.append(jobs.saved(told[0], here))
    found, expected = outcomes
    return apart(found, expected)


def said(far: float) -> str:
    """A cell.

    >>> said(0.0), said(1.04e-6)
    ('=', '1e-06')
    """
    return f"{far:.0e}" if far else "="


def main(names: Sequence[str]) -> None:
    """Fills the table, a row at a time."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    about = facts()
    with WorkerPool(max(world for world, _ in WORLDS.values())) as pool:
        places: dict[str, Callable[[str, str, Path], float]] = {"threads": in_threads}
        places |= {place: partial(over_processes, pool, *shape) for place, shape in WORLDS.items()}
        named = [place for place in places if place in names] or [*places]
        for place, name in product(named, [name for name in names if name not in places] or DOZEN):
            cells = []
            for mode in MODES:
                with TemporaryDirectory() as folder:
                    cells.append(said(places[place](name, mode, Path(folder))))
            row = f"| {name} | {place} | {' | '.join(cells)} | {about['commit']} |"
            print(row, flush=True)
            write({(name, place): row}, [*places], about)


def write(found: dict[tuple[str, str], str], places: Sequence[str], about: dict[str, str]) -> None:
    """Writes rows beside those that are there."""
    before = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    known = re.finditer(r"^\| (\S+) \| ([^|]+) \|.*$", before, re.MULTILINE)
    rows = {(match[1], match[2]): match[0] for match in known} | found
    head = [f"| family | in | {' | '.join(MODES)} | commit |", f"|{'---|' * (len(MODES) + 3)}"]
    table = "\n".join([*head, *(rows[key] for key in product(DOZEN, places) if key in rows)])
    versions = {module.__name__: module.__version__ for module in (transformers, accelerate, peft)}
    last = ", ".join(f"{name} {value}" for name, value in {**about, **versions}.items())
    FILE.write_text(PAGE.format(table=table, about=last), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
