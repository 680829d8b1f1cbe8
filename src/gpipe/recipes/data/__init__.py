"""Loads the data sets of the recipes. Sampling and augmentation depend only on the seed, the epoch and the row."""

from importlib import import_module
from typing import Any


def require(name: str, problem: str, extra: str) -> Any:
    """Imports a library that an extra of gpipe installs.

    Raises:
        ImportError: If the library is not installed. The message is the problem, such as "Reading images requires
            Pillow", followed by the command that installs the extra.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{problem}. Run pip install '.[{extra}]' in a clone of the gpipe repository.") from error
