"""No test depends on the machine, on who starts it, or on the tests before it."""

import gc
import os
import re
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch is imported: idle threads leave the cores to others

STARTS_PROCESSES = re.compile(r"^from tests\.support\.processes\.(?:launch|torchrun) import (.*)", re.MULTILINE)
FEW = 2  # cases of a test that `make quick` takes
LEFT_OUT = f"most tests over processes, those marked slow, and of every other test the cases beyond {FEW}"
T = TypeVar("T")


@cache
def starts_processes(module: Path) -> str:
    """Whether the tests of a module are over `"ranks"`, or over `"programs"` such as torchrun; else empty."""
    used = STARTS_PROCESSES.findall(module.read_text()) if module.suffix == ".py" else []
    return ("ranks" if re.search("Crew|run_ranks", str(used)) else "programs") if used else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests over ranks go to one worker, for one crew, those over programs to one; they are long, and begin first.

    They are those of the modules that import what starts them. The marker `xdist_group` says the same, but
    pytest-xdist 3.8 does not see it under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    def scope_of(nodeid: str) -> str:
        return starts_processes(config.rootpath / nodeid.partition("::")[0]) or nodeid

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the tier of `make quick`."""
    parser.addoption("--quick", action="store_true", help=f"leave out {LEFT_OUT}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the tests of `make quick`: all in a few cases, but for those that are slow or over processes."""
    strays = {
        item.path.name for item in items if "crew" in fixtures_of(item) and starts_processes(item.path) != "ranks"
    }
    assert not strays, f"annotate crew as Crew, so that all tests over ranks go to one worker: {strays}"
    if not config.getoption("--quick"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "quick" in marks or ("slow" not in marks and not starts_processes(item.path)):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for of in cases.values() for item in spread(of, FEW)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def fixtures_of(item: pytest.Item) -> Collection[str]:
    """The names of what a test asks for."""
    return item.fixturenames if isinstance(item, pytest.Function) else ()


def spread(items: Sequence[T], most: int) -> list[T]:
    """The first, the last, and some between, as far apart as can be."""
    if len(items) <= most:
        return [*items]
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what `make quick` leaves out."""
    if config.getoption("--quick"):
        terminalreporter.write_line(f"left out: {LEFT_OUT}; `make test` runs them")


@pytest.fixture(scope="session")
def crew() -> Iterator["Crew"]:
    """Four ranks that wait for jobs; `crew.run(..., world=2)` takes the first two."""
    from tests.support.processes.launch import Crew  # late: `gpipe.schedule` is tested where torch is not installed

    with Crew(4) as crew:
        yield crew


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
