"""What tests over processes share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import Crew

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time before a test counts as one that hangs: processes start slowly on a busy machine."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four ranks that wait for jobs; `crew.run(..., world=2)` takes the first two."""
    with Crew(4) as crew:
        yield crew
