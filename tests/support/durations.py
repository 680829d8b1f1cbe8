"""How long tests take: a tier takes as many cases of a test as it has time for, and long tests begin first.

`tests/durations.json` has the seconds that one case of a test takes, of those that are not quick; `make durations`
writes it anew, on a machine that does nothing else.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

FILE = Path(__file__).parents[1] / "durations.json"
LEAST_EXAMPLES = 4
LEAST_SECONDS = 0.05  # of a case, to be noted
QUICK_SECONDS = 0.01  # of a case of which nothing is noted
APART_SECONDS = 5.0  # a test that takes longer need not be where its module is


class Tier(NamedTuple):
    """What is run of each test: as many cases as take so many seconds, at least one, unless it takes too long.

    Of a test that draws examples all cases are run, on as many examples as take so many seconds.
    """

    together: float
    alone: float


TIERS = {
    "quick": Tier(0.05, 0.06),
    "test": Tier(1.2, 9.0),
    "ci": Tier(1.5, 30.0),
    "whole": Tier(math.inf, math.inf),
}


def test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def read(file: Path = FILE) -> dict[str, float]:
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def keep(seconds: Mapping[str, float], file: Path = FILE) -> None:
    cases = defaultdict(list)
    for nodeid, taken in seconds.items():
        cases[test_of(nodeid)].append(taken)
    mean = read(file) | {test: round(sum(each) / len(each), 2) for test, each in cases.items()}
    known = {test: each for test, each in sorted(mean.items()) if each >= LEAST_SECONDS}
    file.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")


def choose(items: Sequence[pytest.Item], tier: str, known: Mapping[str, float]) -> set[pytest.Item]:
    together, alone = TIERS[tier]
    tests = defaultdict(list)
    for item in items:
        tests[test_of(item.nodeid)].append(item)
    kept = set()
    for test, cases in tests.items():
        seconds = known.get(test, QUICK_SECONDS)
        if tier != "quick" and all(is_drawn(item) for item in cases):
            draw_fewer(cases[0], together / (seconds * len(cases)))
            kept |= set(cases)
        elif seconds <= alone:
            kept |= set(draw(cases, max(1, int(min(together / seconds, len(cases)))), test))
    return kept


def is_drawn(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def draw_fewer(item: pytest.Item, share: float) -> None:
    """Has a test draw a share of the examples that it would draw, and some at least."""
    test: Any = item.obj  # type: ignore[attr-defined]
    whole = test._hypothesis_internal_use_settings  # which has no public name
    if share < 1:
        few = min(whole.max_examples, max(LEAST_EXAMPLES, int(share * whole.max_examples)))
        test._hypothesis_internal_use_settings = settings(whole, max_examples=few)


def draw(cases: Sequence[pytest.Item], count: int, name: str) -> list[pytest.Item]:
    """So many cases of a test, the same for the same name, which have as many values of each parameter as can be."""
    if count >= len(cases):
        return [*cases]
    values = {item: parameters_of(item) for item in cases}
    left, taken, seen = Random(name).sample(cases, len(cases)), list[pytest.Item](), set[tuple[str, object]]()
    while len(taken) < count:
        taken.append(max(left, key=lambda item: len(values[item] - seen)))
        left.remove(taken[-1])
        seen |= values[taken[-1]]
    return taken


def parameters_of(item: pytest.Item) -> set[tuple[str, object]]:
    spec = getattr(item, "callspec", None)
    return set(spec.indices.items()) if spec is not None else set()


def unit_of(nodeid: str, known: Mapping[str, float]) -> str:
    """What one worker does in one go: a module, or a test of it that takes long."""
    test = test_of(nodeid)
    return test if known.get(test, 0.0) >= APART_SECONDS else test.partition("::")[0]


def longest_first(items: Sequence[pytest.Item], known: Mapping[str, float]) -> list[pytest.Item]:
    """The units in the order in which they are to begin, their tests together."""
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        unit = unit_of(item.nodeid, known)
        units[unit].append(item)
        seconds[unit] += known.get(test_of(item.nodeid), QUICK_SECONDS)
    return [item for unit in sorted(units, key=lambda unit: -seconds[unit]) for item in units[unit]]
