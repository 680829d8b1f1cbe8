"""The stages of a pipe, and the tables that mini-batches run."""

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
    """The stages of a pipe, with the threads and streams of the ranks in this process: one `row`, or all ranks."""

    all: Sequence[Stage]
    micro_batches: int
    lowering: Lowering
    traced: "TracedModel | None"
    tied: Tied
    threaded: bool
    intra_op_threads: int
    row: int | None
    replicas: int

    def __post_init__(self) -> None:
        self.placement = self.lowering.placement
        stages, layers = self.all, [layer for stage in self.all for layer in stage.layers]
        self.layers = [layer.module for layer in layers]
        self.own = tuple(s for s in stages if self.row in (None, self.placement[s.index]))  # what runs here
        self.reads_inputs, self.reads_targets = self.own[0] is stages[0], self.own[-1] is stages[-1]
        self.stages_of: dict[int, list[Stage]] = {}  # of each rank that runs here
        for stage in self.own:
            self.stages_of.setdefault(self.placement[stage.index], []).append(stage)
        self.stashes = tuple(name for layer in layers for name in layer.stash)
        self.devices = {stage.device for stage in self.own} | {CPU}  # where this process computes
        self.queues = any(map(queues, self.devices))
        self.shared = find_shared(self.layers, self.tied)
        shared = frozenset(slot for one in self.shared for slots in one.slots.values() for slot in slots)
        for stage in stages:
            stage.shared = shared
        self.modules = [module for stage in self.own for module in stage.modules]
        self.gathered: dict[int, GatheredWeights] = {}  # by stage, as far as this process knows
        self._reset()

    def _reset(self) -> None:
        self.threads = RankThreads(self.intra_op_threads)
        self._compiled: dict[ProgramKey, CompiledProgram] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles without threads, streams and compiled programs."""
        return {k: v for k, v in vars(self).items() if k not in {"threads", "streams", "_compiled"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    @property
    def stage_of(self) -> list[int]:
        """The stage of each layer and, after the last, of the loss."""
        found = stage_of_layers(self.all)
        return [*found, found[-1]]

    @cached_property
    def streams(self) -> dict[int, RankStream]:
        devices = {rank: stages[-1].device for rank, stages in sorted(self.stages_of.items())}
        alone = len(set(devices.values())) == 1
        return {
            rank: DeviceStream(device) if queues(device) else RankStream(device, alone=alone)
            for rank, device in devices.items()
        }

    def among(self, replicas: int) -> None:
        """Sets the number of replicas."""
        self.replicas = replicas
        self._compiled.clear()

    def gather(self, stages: Mapping[int, GatheredWeights]) -> None:
        """Notes that the weights of these stages are gathered from the replicas."""
        if not stages.items() <= self.gathered.items():
            self.gathered |= stages
            self._compiled.clear()

    def compiled(self, wanted: ProgramKey) -> CompiledProgram:
        if wanted not in self._compiled:
            program = self._make_program(wanted)
            check(program)
            self._compiled[wanted] = CompiledProgram.of(program, self.gathered)
        return self._compiled[wanted]

    def _make_program(self, wanted: ProgramKey) -> Program:
        program = self.lowering.program(wanted, self.skip_routes(wanted.loss_pops, wanted.path))
        if self.row is None or not wanted.trains:
            return program
        program = place_ties(program, self.stages_that_share())
        return place_reduces(program, range(len(self.all))) if self.replicas > 1 else program

    def skip_routes(self, loss_pops: Sequence[Pop], path: int) -> list[Route]:
        """The routes of stashes between stages. The loss is in the stage of the last layer."""
        stage_of = self.stage_of
        if self.traced is None:
            own = [pop for stage in self.all for layer in stage.layers for pop in layer.pop]
        else:
            own = self.traced.pops(path, stage_of)
        roads = [Route(stage_of[pop.source], stage_of[pop.target], pop.route_name) for pop in [*own, *loss_pops]]
        return [road for road in roads if road.source != road.target]

    def stages_that_share(self) -> list[int]:
        """The stages that use weights of other stages, too."""
        stage_of = self.stage_of
        return sorted({stage_of[index] for item in self.shared for index in item.slots})
