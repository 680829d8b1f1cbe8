"""Kernels of notebooks that depend on nobody's settings."""

import os
from pathlib import Path


def alone(folder: Path) -> dict[str, str]:
    """An environment in which a kernel keeps all that is its own, and looks for settings, in a folder."""
    names = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    return {**os.environ, **{name: str(folder / name.lower()) for name in names}}
