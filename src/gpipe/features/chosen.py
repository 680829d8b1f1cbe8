"""Lists the features of a mini-batch."""

from gpipe.features.batch_norm import DeferredBatchNorm
from gpipe.features.error_notes import ErrorNotes
from gpipe.features.offload import Offload
from gpipe.features.recompute import Recompute
from gpipe.features.recorder import Recorder
from gpipe.features.slices import Slices
from gpipe.features.split_backward import SplitBackward
from gpipe.features.verification.feature import Verification
from gpipe.runtime.feature import Feature


def new_features(verification: Verification, recorder: Recorder | None) -> list[Feature]:
    """Returns the features that may take part in a mini-batch. Later ones are around earlier ones."""
    recording = [] if recorder is None else [recorder]
    around_layers = [Slices(), DeferredBatchNorm(), Recompute()]
    return [SplitBackward(), *around_layers, verification, Offload(), *recording, ErrorNotes()]
