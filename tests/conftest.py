"""No test depends on the machine, on who starts it, or on the tests before it."""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.processes.launch import Crew

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


STARTS_PROCESSES = re.compile(r"^from tests\.support\.processes\.(launch|torchrun) import", re.MULTILINE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests over processes go to one worker: one crew, and not two jobs of several ranks each on a few cores.

    They are those of the modules that import what starts processes. The marker `xdist_group` says the same, but
    pytest-xdist 3.8 does not see it under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    @cache
    def starts_processes(file: str) -> bool:
        return STARTS_PROCESSES.search((config.rootpath / file).read_text()) is not None

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: "processes" if starts_processes(nodeid.partition("::")[0]) else nodeid
    return scheduler


@pytest.fixture(scope="session")
def crew() -> Iterator["Crew"]:
    """Four ranks that wait for jobs; `crew.run(..., world=2)` takes the first two."""
    from tests.support.processes.launch import Crew  # late: floor 1 is tested where torch is not installed

    with Crew(4) as crew:
        yield crew


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
