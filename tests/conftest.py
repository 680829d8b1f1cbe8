"""No test depends on the machine, on who starts it, or on the tests before it."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ANYWHERE = settings(
    deadline=None,  # how long an example takes says how busy the machine is
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
settings.register_profile("anywhere", ANYWHERE)
settings.load_profile("anywhere")

LOOKS = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


PROCESSES = "tests/processes/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests over processes go to one worker: one crew, and not two jobs of several ranks each on a few cores.

    The marker `xdist_group` says the same, but pytest-xdist 3.8 does not see it under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: PROCESSES if nodeid.startswith(PROCESSES) else nodeid
    return scheduler


@pytest.fixture(scope="session", autouse=True)
def _plain_environment() -> Iterator[None]:
    """Neither a terminal of its own kind, nor a launcher, is around the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*LOOKS, *LAUNCHED, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    """What a test draws does not depend on what was drawn before; floor 1 is tested where torch is not installed."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
