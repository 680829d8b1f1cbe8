"""Trackers that keep what they are told in a folder of the test."""

import sys
from pathlib import Path

import pytest


def own_trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has trackio, which asks once when it is imported, write into a folder."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
