"""Same bits: any model of plain layers, cut and run in any way, gives the bits of the plain loop.

Each configuration is a random model with a random cut, M, number of rows, rematerialization of each partition, driver
and way of training. Two mini-batches, and SGD with momentum behind each, are compared with the plain loop: losses,
gradients of parameters and inputs, parameters and buffers, to the last bit.

    python -m tests.soak.law1 [configurations] [first seed]
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from rich.progress import track

from tests.support.odd_layers import Fork, OnFirst
from tests.support.random_cases import Case, check_case, random_case

from .results import RESULTS, describe, facts, table, write


def kinds_of(case: Case) -> Iterator[str]:
    """What a configuration is counted under."""
    yield f"K = {case.stages}"
    yield f"M = {case.micro_batches}"
    yield f"driver {case.driver}"
    yield f"way {case.way}"
    yield from (f"remat {remat}" for remat in case.remat)  # of one partition or more
    if len(set(case.remat)) > 1:
        yield "remat mixed"
    if any(rows % min(rows, case.micro_batches) for rows in case.rows):
        yield "uneven micro-batches"
    if min(case.rows) < case.micro_batches:
        yield "fewer rows than M"
    for layer in case.layers:
        inner = layer.layer if isinstance(layer, OnFirst) else layer
        detail = f" ({inner.kind})" if isinstance(inner, Fork) else " in place" if is_in_place(inner) else ""
        yield f"with {type(inner).__name__}{detail}"


def is_in_place(layer: object) -> bool:
    return bool(getattr(layer, "inplace", False))


def differs(case: Case) -> str | None:
    """How a configuration differs from the plain loop, if it does."""
    try:
        check_case(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def keep(
    name: str, title: str, what: str, how: str, began: float, count: Mapping[str, int], bad: Sequence[object]
) -> None:
    """Keeps what came of the configurations since `began`, and ends with 1 if some of them were `bad`.

    What is counted `with ` something is the content of a model, everything else the way in which it was run.
    """
    about = {**facts(), "seconds": f"{time.monotonic() - began:.0f}"}
    rows = [(kind, str(count[kind])) for kind in sorted(count) if not kind.startswith("with ")]
    contents = [(kind.removeprefix("with "), str(count[kind])) for kind in sorted(count) if kind.startswith("with ")]
    text = (
        f"# {title}\n\n{describe(about)}\n\n"
        f"{what}, **{len(bad)} mismatches**, in {about['seconds']} s. {how}\n\n"
        f"{table(('configurations', 'count'), rows)}\n\n{table(('models with', 'count'), contents)}"
    )
    write(RESULTS / name, text, {"facts": about, "counts": dict(sorted(count.items())), "mismatches": bad})
    print(text)
    sys.exit(bool(bad))


def main(configurations: int = 2000, first: int = 0) -> None:
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # random models earn much advice
    began = time.monotonic()
    count: Counter[str] = Counter()
    bad = []
    for seed in track(range(first, first + configurations), description="configurations"):
        case = random_case(Random(seed))
        count.update(set(kinds_of(case)))
        if wrong := differs(case):
            bad.append({"seed": seed, "differs": wrong, "case": repr(case)})
            print(f"seed {seed}: {wrong}")
    keep(
        "law1",
        "Same bits over models of plain layers",
        f"{configurations} configurations (seeds {first} to {first + configurations - 1})",
        "Each is two mini-batches, compared to the last bit with the plain loop: losses, gradients of parameters and "
        "inputs, parameters after SGD with momentum, buffers.",
        began,
        count,
        bad,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
