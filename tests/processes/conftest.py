"""What tests over processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import Crew

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All in one worker of pytest-xdist: one crew, and not two jobs of several ranks each on a few cores."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four ranks that wait for jobs; `crew.run(..., world=2)` takes the first two."""
    with Crew(4) as crew:
        yield crew
