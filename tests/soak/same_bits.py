"""Digests of what a fixed set of trainings computes, by the library that PYTHONPATH chooses, to compare two states.

PYTHONPATH=../before/src python -m tests.soak.same_bits --out before.jsonl
PYTHONPATH=src python -m tests.soak.same_bits --out after.jsonl
python -m tests.soak.same_bits --compare before.jsonl after.jsonl

The trainings are the first configurations of each kind, the stories of same bits by one process and by two, and the
models that the library has. The first line of a file says where it comes from, each other one has the digests of what
a training leaves. They depend on the processor, on torch, and on the trainings: record both states on one machine,
with the same tests.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import gpipe
from gpipe.models import amoebanet_b, amoebanet_d, transformer_lm, unet
from tests.support.kinds import KINDS
from tests.support.kinds.blocks import token_loss
from tests.support.kinds.case import Case, Kind, Observed, Setting
from tests.support.processes.digests import Digests, digest
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.same_bits_stories import STORIES, maker

from .judge import attempt
from .piped import Piped
from .results import facts

EACH = 3  # configurations of a kind
WORLD = 2
ROWS = (8, 7, 3)
"""Of the mini-batch of each step of a model: equal micro-batches, unequal ones, and fewer than M."""


def models() -> dict[str, Case]:
    torch.manual_seed(0)
    tokens = [(torch.randint(20, (rows, 9)), torch.randint(20, (rows, 9))) for rows in ROWS]
    images = [(torch.randn(rows, 3, 64, 64), torch.randint(5, (rows,))) for rows in ROWS]
    masks = [(x, torch.rand(len(x), 1, 64, 64)) for x, _ in images]
    found = {
        "transformer": Case(transformer_lm(3, 24, 48, 4, 20, tied=True, dropout=0.1), tokens, token_loss),
        "U-Net": Case(unet(1, 4), masks, F.binary_cross_entropy_with_logits),
    }
    for make in (amoebanet_b, amoebanet_d):
        for deferred in (False, True):
            options = {"batch_norm": "deferred" if deferred else "micro"}
            found[f"{make.__name__}, {options}"] = Case(make(3, 16, 5), images, F.cross_entropy, options=options)
    return found


def trainings() -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """What one process trains: a name, and what gives all that the training leaves."""
    for name, case in models().items():
        cut = (len(case.layers) - 2, 2)
        setting = Setting(cut, 2, ROWS[0], "except_last", "threads", 5, len(ROWS), "step")
        yield name, partial(observed, case, setting)
    for kind in KINDS.values():
        for number in range(EACH):
            if not kind.case(number)[0].must_tell:  # of which the numbers may differ from run to run
                yield f"{kind.name} {number}", partial(drawn, kind, number)
    for name, story in STORIES.items():
        for remat in ("always", "except_last", "never"):
            yield f"{name}, {remat}", partial(story.run, maker(WORLD, remat=remat))


def drawn(kind: Kind, number: int) -> Observed:
    return observed(*kind.case(number))


def observed(case: Case, setting: Setting) -> Observed:
    """What a case leaves, and the type of an error that ended it."""
    outcome = attempt(case, setting, Piped)
    return outcome.observed | {"error": type(outcome.error).__name__}


def digests(found: Mapping[str, Any]) -> Digests:
    """Of all tensors in what was found, and what else there is as text."""
    leaves = {name: pytree.tree_leaves(value) for name, value in found.items()}
    return {
        f"{name} {at}": digest(leaf.to_dense()) if isinstance(leaf, Tensor) else repr(leaf)
        for name, values in leaves.items()
        for at, leaf in enumerate(values)
    }


def over_processes() -> dict[str, Digests]:
    with WorkerPool(WORLD) as pool:
        return {
            f"{name}, rank {rank}": found
            for name in STORIES
            for rank, found in enumerate(answers(pool.run("tests.support.jobs.same_bits:tell", name)))
        }


def read(path: Path) -> dict[str, Digests]:
    return dict(map(json.loads, path.read_text().splitlines()[1:]))


def differences(before: Mapping[str, Digests], after: Mapping[str, Digests]) -> list[str]:
    said = []
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            said.append(f"{name}: only {'after' if name in after else 'before'}")
        elif other := sorted({key for key, _ in before[name].items() ^ after[name].items()}):
            said.append(f"{name}: other {', '.join(other[:6])}{' and more' if len(other) > 6 else ''}")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Records, or compares; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="where to keep the digests")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="two files of digests")
    options = parser.parse_args(arguments)
    if options.compare:
        before, after = map(read, options.compare)
        said = differences(before, after)
        print("\n".join(said) or f"{len(before)} trainings: the same bits")
        return int(bool(said))
    if options.out is None:
        parser.error("give --out, or --compare")
    logging.disable()  # what a pipe finds is not compared
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = {name: digests(train()) for name, train in trainings()} | over_processes()
    rows = [facts(), *sorted(lines.items())]
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.out}: {len(lines)} trainings by {Path(str(gpipe.__file__)).parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
