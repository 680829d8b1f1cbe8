"""Exceptions cross process boundaries of other libraries: they can be pickled and copied, with their notes."""

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import gpipe
from gpipe.checkpoint.manifest import CheckpointError
from gpipe.errors import RemoteError, received_error
from gpipe.tracing.trace import CannotSplitError

EXAMPLES: dict[type[BaseException], Callable[[], BaseException]] = {
    RemoteError: lambda: received_error("rank 1 failed", 1, "ValueError", "Traceback"),
    CheckpointError: lambda: CheckpointError(Path("run"), ["a file is missing"], "Save again."),
    CannotSplitError: lambda: CannotSplitError("no", ["block"]),
}
APART = ("gpipe.cli", "gpipe.integrations")  # tests before this one may have imported these modules
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def exception_types() -> list[type[BaseException]]:
    """All exception classes of gpipe, except those of modules `APART` and of modules that need an absent package."""
    for module in pkgutil.walk_packages(gpipe.__path__, "gpipe.", onerror=lambda name: None):
        if not module.name.startswith(APART) and not module.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(module.name)

    def subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
        for subclass in type.__subclasses__(kind):
            yield subclass
            yield from subclasses(subclass)

    names = {kind: kind.__module__ for kind in subclasses(BaseException)}
    own = {kind for kind, name in names.items() if name.startswith("gpipe.")}
    return sorted((kind for kind in own if not names[kind].startswith(APART)), key=repr)


@pytest.mark.parametrize("name", COPIES)
def test_every_exception_can_be_copied_with_its_notes(name: str) -> None:
    kinds = exception_types()
    assert {RemoteError, CheckpointError, gpipe.VerificationError} <= {*kinds}
    for kind in kinds:
        error = EXAMPLES.get(kind, lambda kind=kind: kind("no"))()
        error.add_note("in the forward")
        copied = COPIES[name](error)
        assert type(copied) is kind
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)
        assert copied.__notes__ == ["in the forward"]
