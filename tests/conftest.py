"""No test depends on the machine, on who starts it, or on the tests before it."""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import durations
from tests.support.progress import start_watch

if TYPE_CHECKING:
    from tests.support.processes.launch import WorkerPool

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
HERE = Path(__file__).parent

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch is imported: idle threads leave the cores to others


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of `make test-all`."""
    parser.addoption("--all-cases", action="store_true", help="run all cases of slow tests, too")
    parser.addoption("--keep-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Who runs tests is watched, who hears of all notes what they take."""
    is_worker, has_workers = hasattr(config, "workerinput"), bool(getattr(config.option, "tx", ()))
    if is_worker or not has_workers:
        config.pluginmanager.register(Watched())
    if config.getoption("--keep-durations") and not is_worker:
        config.pluginmanager.register(Noted())


class Watched:
    """Has the run end if a test stands still."""

    def __init__(self) -> None:
        self.watch = start_watch()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.watch.poll() is None:
            print(nodeid, file=self.watch.stdin, flush=True)

    def pytest_unconfigure(self) -> None:
        self.watch.communicate()


class Noted:
    """Notes what each case of each test takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += durations.seconds_of(report)

    def pytest_sessionfinish(self) -> None:
        durations.keep(self.seconds)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Doctests are of `src` alone: to look for some here is to import all that tests share."""
    found = yield
    return [one for one in found if type(one) is pytest.Module or not file_path.is_relative_to(HERE)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: there is no garbage to look for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects cases, and starts long tests first, so that all workers end together."""
    known = durations.read()
    kept = set(items if config.getoption("--all-cases") else durations.select(items, known))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = durations.longest_first([item for item in items if item in kept], known)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out modules, and tests that take long, in the order in which they are collected."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    known = durations.read()

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return durations.unit_of(nodeid, known)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator["WorkerPool"]:
    """Four ranks that wait for jobs; `pool.run(..., world=2)` takes the first two."""
    from tests.support.processes.launch import (
        WorkerPool,  # late: `gpipe.schedule` is tested where torch is not installed
    )

    with WorkerPool(4) as pool:
        yield pool


@pytest.fixture(scope="session", autouse=True)
def _plain_environment() -> Iterator[None]:
    """Neither a terminal of its own kind, nor a launcher, nor a shell that has Ctrl-C ignored is around the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in [*LOOKS, *LAUNCHED, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _collector_leaves_old_objects_alone() -> None:
    """Else each collection of each test goes through all that libraries have made since the first test: a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    """What a test draws does not depend on what was drawn before; `gpipe.schedule` is tested without torch."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
