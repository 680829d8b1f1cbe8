"""The stages of a pipe, and the compiled programs of its mini-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpipe._torch.accelerator import CPU, queues
from gpipe.runtime.compiled_table import CompiledProgram
from gpipe.runtime.streams import DeviceStream, RankStream
from gpipe.runtime.threads import RankThreads
from gpipe.schedule.action import Route
from gpipe.schedule.cost import GatheredWeights
from gpipe.schedule.laws import check
from gpipe.schedule.lower import place_reduces, place_ties
from gpipe.schedule.lowering import Lowering, ProgramKey
from gpipe.schedule.program import Program
from gpipe.stages.shared_weights import Tied, find_shared
from gpipe.stages.skips import Pop
from gpipe.stages.stage import Stage, stage_of_layers

if TYPE_CHECKING:
    from gpipe.tracing.model import TracedModel


@dataclass(eq=False)
class PipelineStages:
    """The stages of a pipe, with the threads and streams of the ranks in this process.

    Attributes:
        all: All stages of the pipe.
        local: The stages that this process runs.
        pp_rank: The pipeline rank of this process, or None if it runs all ranks.
        threaded: Whether each rank runs in its own thread.
        replicas: The number of data-parallel replicas.
        resident: The number of stages of a rank whose weights are on its device at the same time. None if all are.
        gathered: The stages that this process knows to gather their weights from the replicas.
    """

    all: Sequence[Stage]
    micro_batches: int
    lowering: Lowering
    traced: "TracedModel | None"
    tied: Tied
    threaded: bool
    intra_op_threads: int
    pp_rank: int | None
    replicas: int
    resident: int | None = None

    def __post_init__(self) -> None:
        self.placement = self.lowering.placement
        stages, layers = self.all, [layer for stage in self.all for layer in stage.layers]
        self.layers = [layer.module for layer in layers]
        self.local = tuple(s for s in stages if self.pp_rank in (None, self.placement[s.index]))
        self.reads_inputs, self.reads_targets = self.local[0] is stages[0], self.local[-1] is stages[-1]
        self.stages_of: dict[int, list[Stage]] = {}  # the stages of each rank of this process
        for stage in self.local:
            self.stages_of.setdefault(self.placement[stage.index], []).append(stage)
        self.stashes = tuple(name for layer in layers for name in layer.stash)
        self.devices = {stage.device for stage in self.local} | {CPU}  # where this process computes
        self.queues = any(map(queues, self.devices))
        self.shared = find_shared(self.layers, self.tied)
        shared = frozenset(slot for weight in self.shared for slots in weight.slots.values() for slot in slots)
        for stage in stages:
            stage.shared = shared
        self.modules = [module for stage in self.local for module in stage.modules]
        self.gathered: dict[int, GatheredWeights] = {}
        self._reset()

    def _reset(self) -> None:
        self.threads = RankThreads(self.intra_op_threads)
        self._compiled: dict[ProgramKey, CompiledProgram] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without threads, streams and compiled programs."""
        return {k: v for k, v in vars(self).items() if k not in {"threads", "streams", "_compiled"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    @property
    def stage_of(self) -> list[int]:
        """The stage of each layer. The last entry is the stage of the loss."""
        stages = stage_of_layers(self.all)
        return [*stages, stages[-1]]

    @cached_property
    def streams(self) -> dict[int, RankStream]:
        """The stream of each rank of this process, by rank."""
        devices = {rank: stages[-1].device for rank, stages in sorted(self.stages_of.items())}
        single_device = len(set(devices.values())) == 1
        return {
            rank: DeviceStream(device) if queues(device) else RankStream(device, single_device=single_device)
            for rank, device in devices.items()
        }

    def set_replicas(self, replicas: int) -> None:
        """Changes the number of replicas, and drops all compiled programs."""
        self.replicas = replicas
        self._compiled.clear()

    def gather(self, stages: Mapping[int, GatheredWeights]) -> None:
        """Records that these stages gather their weights from the replicas. If a stage is new, drops all programs."""
        if not stages.items() <= self.gathered.items():
            self.gathered |= stages
            self._compiled.clear()

    def compiled(self, key: ProgramKey) -> CompiledProgram:
        """Returns the compiled program for a kind of mini-batch. A program is created and compiled at first use."""
        if key not in self._compiled:
            program = self._make_program(key)
            check(program)
            self._compiled[key] = CompiledProgram.of(program, self.gathered, self.resident)
        return self._compiled[key]

    def _make_program(self, key: ProgramKey) -> Program:
        program = self.lowering.program(key, self.skip_routes(key.loss_pops, key.path))
        if self.pp_rank is None or not key.trains:
            return program
        program = place_ties(program, self.stages_that_share())
        return place_reduces(program, range(len(self.all))) if self.replicas > 1 else program

    def skip_routes(self, loss_pops: Sequence[Pop], path: int) -> list[Route]:
        """Returns the routes of stashed tensors between stages. `loss_fn` belongs to the stage of the last layer."""
        stage_of = self.stage_of
        if self.traced is None:
            pops = [pop for stage in self.all for layer in stage.layers for pop in layer.pop]
        else:
            pops = self.traced.pops(path, stage_of)
        routes = [Route(stage_of[pop.source], stage_of[pop.target], pop.route_name) for pop in [*pops, *loss_pops]]
        return [route for route in routes if route.source != route.target]

    def stages_that_share(self) -> list[int]:
        """Returns the stages of all layers that share weights."""
        stage_of = self.stage_of
        return sorted({stage_of[layer] for weight in self.shared for layer in weight.slots})
