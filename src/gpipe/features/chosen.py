"""Chooses the features of a mini-batch."""

from gpipe.features.batch_norm import DeferredBatchNorm
from gpipe.features.error_notes import ErrorNotes
from gpipe.features.offload import Offload
from gpipe.features.recompute import Recompute
from gpipe.features.recorder import Recorder
from gpipe.features.slices import Slices
from gpipe.features.split_backward import SplitBackward
from gpipe.features.streamed_weights import StreamedWeights
from gpipe.features.verification.feature import Verification
from gpipe.runtime.feature import Feature
from gpipe.runtime.run import Run
from gpipe.schedule.action import Kind


def choose_features(run: Run) -> list[Feature]:
    """Returns the features of a mini-batch whose program is compiled. Later features wrap earlier features."""
    kinds, verification, recorder = run.compiled.kinds, run.feature(Verification), run.feature(Recorder)
    is_needed: dict[type[Feature], bool] = {
        SplitBackward: Kind.BACKWARD_WEIGHT in kinds,
        Slices: run.slices > 1,
        DeferredBatchNorm: Kind.COMMIT in kinds,
        Recompute: Kind.RECOMPUTE in kinds,
        StreamedWeights: Kind.LOAD in kinds,
    }
    features = [feature() for feature, needed in is_needed.items() if needed]
    if verification is not None and verification.wanted:
        features.append(verification)
    if Kind.OFFLOAD in kinds:
        features.append(Offload())
    if recorder is not None:
        features.append(recorder)
    return [*features, ErrorNotes()]
