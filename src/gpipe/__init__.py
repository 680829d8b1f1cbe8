"""Pipeline parallelism for PyTorch: any sequence of layers, cut into partitions, trained to the same bits.

Public names stand in `__init__.pyi`, where type checkers read them too. They resolve on first use, so that
`import gpipe` loads nothing and `gpipe.schedule` works without torch.
"""

import re
from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {name: home for home, name in re.findall(r"^from (gpipe\.\S+) import (\w+)", _STUB, re.MULTILINE)}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "models":
        return import_module("gpipe.models")
    if name == "__version__":
        return import_module("importlib.metadata").version("gpipe")
    raise AttributeError(f"module 'gpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "models", "__version__"]
