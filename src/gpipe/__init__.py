"""Pipeline parallelism for PyTorch: any sequence of layers, cut into partitions, trained to the same bits.

Public names resolve on first use, so that `import gpipe` loads nothing and `gpipe.schedule` works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from gpipe.amp import GradScaler as GradScaler
    from gpipe.checkpoint.load import find_checkpoint as find_checkpoint
    from gpipe.checkpoint.load import load as load
    from gpipe.checkpoint.manifest import CheckpointError as CheckpointError
    from gpipe.checkpoint.save import save as save
    from gpipe.checkpoint.sigterm import catch_sigterm as catch_sigterm
    from gpipe.checkpoint.weights import load_weights as load_weights
    from gpipe.checkpoint.weights import save_weights as save_weights
    from gpipe.errors import RemoteError as RemoteError
    from gpipe.nonfinite import detect_nonfinite as detect_nonfinite
    from gpipe.pipeline import GPipe as GPipe
    from gpipe.planner.find_plan import find_plan as find_plan
    from gpipe.planner.search.device import Device as Device
    from gpipe.planner.search.found import Plan as Plan
    from gpipe.profiling.recording import Recording as Recording
    from gpipe.profiling.recording import record as record
    from gpipe.stages.microbatch import MicroBatches as MicroBatches
    from gpipe.stages.microbatch import Whole as Whole
    from gpipe.stages.rng import rng_scope as rng_scope
    from gpipe.stages.skips import Sequential as Sequential
    from gpipe.tracing.layers_of import layers_of as layers_of

_HOME = {
    "CheckpointError": "gpipe.checkpoint.manifest",
    "Device": "gpipe.planner.search.device",
    "GPipe": "gpipe.pipeline",
    "GradScaler": "gpipe.amp",
    "MicroBatches": "gpipe.stages.microbatch",
    "Recording": "gpipe.profiling.recording",
    "Plan": "gpipe.planner.search.found",
    "RemoteError": "gpipe.errors",
    "Sequential": "gpipe.stages.skips",
    "Whole": "gpipe.stages.microbatch",
    "catch_sigterm": "gpipe.checkpoint.sigterm",
    "detect_nonfinite": "gpipe.nonfinite",
    "find_checkpoint": "gpipe.checkpoint.load",
    "find_plan": "gpipe.planner.find_plan",
    "layers_of": "gpipe.tracing.layers_of",
    "load": "gpipe.checkpoint.load",
    "load_weights": "gpipe.checkpoint.weights",
    "record": "gpipe.profiling.recording",
    "save": "gpipe.checkpoint.save",
    "save_weights": "gpipe.checkpoint.weights",
    "rng_scope": "gpipe.stages.rng",
}

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
