"""Selects the cases that `make test` runs, and the order in which they start.

`tests/durations.json` keeps the mean seconds of a case of each test that is not quick. To measure them again, run
`make test-all PYTEST_ADDOPTS=--keep-durations` while the machine does nothing else.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings

FILE = Path(__file__).parents[1] / "durations.json"
NOTED_SECONDS = 0.05  # The file leaves out tests whose cases are faster.
TEST_SECONDS = 0.2  # `make test` runs as many cases of a test as take so long together, and at least one.
CASE_SECONDS = 3.0  # `make test` leaves out longer cases, unless all tests of their module are as long.
LONGEST_SECONDS = 20.0  # `make test` never runs a longer case.
LEAST_EXAMPLES = 4  # of a Hypothesis test
DRAWN = "drawn"  # the property with the share of examples that a Hypothesis test draws
APART_SECONDS = 5.0  # A test that takes longer may run on another worker than its module.


def test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def module_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def read(file: Path = FILE) -> dict[str, float]:
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def keep(seconds: Mapping[str, float], file: Path = FILE) -> None:
    cases = defaultdict(list)
    for nodeid, taken in seconds.items():
        cases[test_of(nodeid)].append(taken)
    mean = read(file) | {test: round(sum(each) / len(each), 2) for test, each in cases.items()}
    known = {test: each for test, each in sorted(mean.items()) if each >= NOTED_SECONDS}
    file.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")


def select(items: Iterable[pytest.Item], known: Mapping[str, float]) -> Iterable[pytest.Item]:
    """Yields the cases that `make test` runs.

    A slow test runs on a random sample of its cases, always the same one. A slow Hypothesis test draws fewer examples
    first, and runs on a sample of its cases if this is still slow. A test without a duration runs on all cases.
    """
    tests, fastest = defaultdict(list), defaultdict[str, float](lambda: LONGEST_SECONDS)
    for item in items:
        test = test_of(item.nodeid)
        tests[test].append(item)
        fastest[module_of(test)] = min(fastest[module_of(test)], known.get(test, 0.0))
    for test, cases in tests.items():
        seconds = known.get(test, 0.0)
        if getattr(getattr(cases[0], "obj", None), "is_hypothesis_test", False):
            drawn = draw_fewer(cases[0], TEST_SECONDS / max(TEST_SECONDS, seconds * len(cases)))
            for case in cases:
                case.user_properties.append((DRAWN, drawn))
            seconds *= drawn
        elif seconds > max(CASE_SECONDS, fastest[module_of(test)]):
            continue
        share = TEST_SECONDS / max(TEST_SECONDS, seconds * len(cases))
        yield from Random(test).sample(cases, max(1, int(share * len(cases))))


def draw_fewer(item: pytest.Item, share: float) -> float:
    """Reduces the number of examples of a Hypothesis test, and returns the share that it still draws."""
    test: Any = item.obj  # type: ignore[attr-defined]
    whole = test._hypothesis_internal_use_settings  # It has no public name.
    few = min(whole.max_examples, max(LEAST_EXAMPLES, int(share * whole.max_examples)))
    test._hypothesis_internal_use_settings = settings(whole, max_examples=few)
    return few / whole.max_examples


def seconds_of(report: pytest.TestReport) -> float:
    """Returns the seconds of a report; of a Hypothesis test those of all examples."""
    drawn: Any = dict(report.user_properties).get(DRAWN, 1.0)
    return report.duration / drawn


def unit_of(nodeid: str, known: Mapping[str, float]) -> str:
    """Returns what one worker runs at a stretch: a module, or a slow test of it."""
    test = test_of(nodeid)
    return test if known.get(test, 0.0) >= APART_SECONDS else module_of(test)


def longest_first(items: Sequence[pytest.Item], known: Mapping[str, float]) -> list[pytest.Item]:
    """Sorts tests so that slow units start first, and keeps the tests of each unit together."""
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        unit = unit_of(item.nodeid, known)
        units[unit].append(item)
        seconds[unit] += known.get(test_of(item.nodeid), 0.0)
    return [item for unit in sorted(units, key=lambda unit: -seconds[unit]) for item in units[unit]]
