"""Data sets of the recipes, and orders, draws and changes that depend on seed, epoch and row alone."""

from importlib import import_module
from typing import Any


def imported(name: str, what: str, extra: str) -> Any:
    """A library that an extra of gpipe brings; an ImportError says what it is for, and how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'gpipe[{extra}]'") from error
