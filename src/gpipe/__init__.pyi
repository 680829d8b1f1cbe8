from gpipe import models as models
from gpipe.amp import GradScaler as GradScaler
from gpipe.batch.microbatch import MicroBatches as MicroBatches
from gpipe.batch.microbatch import Whole as Whole
from gpipe.batch.pack import pack as pack
from gpipe.checkpoint.load import find_checkpoint as find_checkpoint
from gpipe.checkpoint.load import load as load
from gpipe.checkpoint.manifest import CheckpointError as CheckpointError
from gpipe.checkpoint.save import save as save
from gpipe.checkpoint.sigterm import catch_sigterm as catch_sigterm
from gpipe.checkpoint.weights import load_weights as load_weights
from gpipe.checkpoint.weights import save_weights as save_weights
from gpipe.config.options import Lockstep as Lockstep
from gpipe.config.options import Processes as Processes
from gpipe.config.options import Remat as Remat
from gpipe.config.options import Threads as Threads
from gpipe.config.reference import VerificationReport as VerificationReport
from gpipe.errors import RemoteError as RemoteError
from gpipe.errors import VerificationError as VerificationError
from gpipe.nonfinite import detect_nonfinite as detect_nonfinite
from gpipe.optimizer_state import offload as offload
from gpipe.pipeline import GPipe as GPipe
from gpipe.planner.search.device import Device as Device
from gpipe.planner.search.plan import Plan as Plan
from gpipe.planning import find_plan as find_plan
from gpipe.profiling.recording import Recording as Recording
from gpipe.profiling.recording import record as record
from gpipe.schedule.schedules.by_name import BreadthFirst as BreadthFirst
from gpipe.schedule.schedules.by_name import Interleaved as Interleaved
from gpipe.schedule.schedules.by_name import Sliced as Sliced
from gpipe.stages.rng import rng_scope as rng_scope
from gpipe.stages.skips import Sequential as Sequential
from gpipe.tracing.layers_of import layers_of as layers_of

__all__: list[str]
__version__: str
