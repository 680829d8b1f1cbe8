"""Pipeline parallelism for PyTorch: any sequence of layers, cut into partitions, trained to the same bits.

Public names resolve on first use, so that `import gpipe` loads nothing and floor 1 works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe as GPipe
    from gpipe.run.allocator import keep_freed_memory as keep_freed_memory
    from gpipe.run.microbatch import Whole as Whole
    from gpipe.run.recorder import record as record
    from gpipe.run.skips import Sequential as Sequential
    from gpipe.run.visit import visit as visit

_HOME = {
    "GPipe": "gpipe.pipeline",
    "Sequential": "gpipe.run.skips",
    "Whole": "gpipe.run.microbatch",
    "keep_freed_memory": "gpipe.run.allocator",
    "record": "gpipe.run.recorder",
    "visit": "gpipe.run.visit",
}

__all__ = ["GPipe", "Sequential", "Whole", "keep_freed_memory", "record", "visit"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "models":
        return import_module("gpipe.models")
    raise AttributeError(f"module 'gpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "models"]
