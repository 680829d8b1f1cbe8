"""Has every family that generates do so through a pipe, and writes down what came of it.

python -m tests.generation            all
python -m tests.generation llama t5   some, which are shown and not kept
"""

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families.catalogue import FAMILIES, named
from tests.generation.test_families import GENERATE
from tests.soak.results import facts
from tests.support.prompted import generator, piped, prompts_of, seeded

FILE = Path(__file__).parents[2] / "bench" / "results" / "generation-families.md"
ROWS = 6
WAYS = ("greedy", "sampled", "beams")
HEAD = """# Generation of families

`python -m tests.generation`: 6 prompts of several lengths, 6 new tokens, K=2, M=3; each way with a cache, beside
`generate` of the model for all rows at once. *{about}*

{summary}

| family | task | {ways} |
|---|---|{lines}|
"""


def tried(name: str, way: str) -> str:
    """What came of one way to generate: equal, refused, or other tokens."""
    model, family = generator(name), named(name)
    given = prompts_of(family, ROWS)
    try:
        expected = seeded(model, given, way)
    except Exception as error:
        return f"not by the model ({type(error).__name__})"
    try:
        with piped(model, family, 2) as pipe:
            found = seeded(pipe, given, way)
    except ValueError as error:
        return f"refused: {str(error)[:160]}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {str(error)[:160]}"
    if all(map(torch.equal, expected, found)):
        return "equal"
    return "OTHER" if rows_are_apart(model, given) else "rows of the model see each other"


def rows_are_apart(model: Any, given: Mapping[str, Tensor]) -> bool:
    """Whether the model itself gives rows the same tokens, two at a time and all together."""
    pairs = [{name: value[at : at + 2] for name, value in given.items()} for at in range(0, ROWS, 2)]
    alone = [seeded(model, pair, "greedy")[0] for pair in pairs]
    return torch.equal(seeded(model, given, "greedy")[0], torch.cat(alone))


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows, count = [], Counter[str]()
    for family in FAMILIES:
        if family.task in GENERATE and (not names or family.name in names):
            found = [tried(family.name, way) for way in WAYS]
            count.update(one.partition(":")[0].partition(" (")[0] for one in found)
            rows.append(f"| {family.name} | {family.task.name.lower()} | {' | '.join(found)} |")
            print(rows[-1], flush=True)
    summary = ", ".join(f"{number} {what}" for what, number in count.most_common())
    print(summary)
    if not names:
        about = ", ".join(f"{key} {value}" for key, value in facts().items())
        about += f", transformers {transformers.__version__}"
        head = HEAD.format(
            about=about,
            summary=f"{len(rows)} families: {summary}.",
            ways=" | ".join(WAYS),
            lines="|".join(["---"] * len(WAYS)),
        )
        FILE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
