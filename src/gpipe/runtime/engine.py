"""The engine of a pipe: its stages, and the tables that mini-batches run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe._torch.accelerator import CPU, queues
from gpipe.runtime.steps import CompiledProgram
from gpipe.runtime.streams import DeviceStream, RankStream
from gpipe.runtime.threads import RankThreads
from gpipe.schedule import lower
from gpipe.schedule.action import Route
from gpipe.schedule.cost import StageCost
from gpipe.schedule.laws import check
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Placement, Schedule, forward_only_table, table_in_training
from gpipe.stages.shared_weights import Tied, find_shared
from gpipe.stages.skips import Pop, find_loss_pops
from gpipe.stages.stage import Stage, stage_of_layers
from gpipe.stages.tree import is_sharded

if TYPE_CHECKING:
    from gpipe.tracing.model import TracedModel


class Wanted(NamedTuple):
    """What a program is made for: `halved` for a loss that is computed outside, `micro_batches` counts slices."""

    micro_batches: int
    trains: bool
    halved: bool = False
    loss_pops: tuple[Pop, ...] = ()
    path: int = 0  # of a model that is traced
    slices: int = 1  # of each micro-batch


class Sharded(NamedTuple):
    """What is spread over the replicas of the weights of a stage: the bytes of all of it, and the share."""

    bytes: int
    share: float

    def cost(self, whole: StageCost, replicas: int) -> StageCost:
        """What such a stage costs, by what it costs where each replica holds all of it.

        Shards of gradients are there when the whole ones no longer are.
        """
        state = whole.state * (1 - self.share * (1 - 1 / replicas)) - self.bytes / replicas
        return replace(whole, state=round(state), gathered=self.bytes)


@dataclass(eq=False)
class Engine:
    """The stages of a pipe, as its settings say, and what runs those of this process: one `row`, or all ranks."""

    stages: Sequence[Stage]
    placement: Placement
    micro_batches: int
    schedule: Schedule
    remat: Sequence[lower.Remat]
    unsplit: Collection[int]
    traced: "TracedModel | None"
    tied: Tied
    threaded: bool
    intra_op_threads: int
    deferred_batch_norm: bool
    row: int | None
    replicas: int

    def __post_init__(self) -> None:
        stages, layers = self.stages, [layer for stage in self.stages for layer in stage.layers]
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
        self._modules = [module for stage in self.own for module in stage.modules]
        self.sharded: dict[int, Sharded] = {}  # by stage, as far as this process knows
        self._reset()

    def _reset(self) -> None:
        self.threads = RankThreads(self.intra_op_threads)
        self._compiled: dict[Wanted, CompiledProgram] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves threads, streams and what can be made again behind."""
        return {k: v for k, v in vars(self).items() if k not in {"threads", "streams", "_compiled"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    @property
    def stage_of(self) -> list[int]:
        """The stage of each layer and, behind the last, of the loss."""
        found = stage_of_layers(self.stages)
        return [*found, found[-1]]

    @cached_property
    def streams(self) -> dict[int, RankStream]:
        devices = {rank: stages[-1].device for rank, stages in sorted(self.stages_of.items())}
        alone = len(set(devices.values())) == 1
        return {
            rank: DeviceStream(device) if queues(device) else RankStream(device, alone=alone)
            for rank, device in devices.items()
        }

    @property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` was told of layers that run here, since it gives modules classes of its own."""
        return any(map(is_sharded, {type(module): module for module in self._modules}.values()))

    def among(self, replicas: int) -> None:
        """Goes on as one of so many replicas."""
        self.replicas = replicas
        self._compiled.clear()

    def shard(self, found: Mapping[int, Sharded]) -> None:
        """Goes on with these stages sharded over the replicas, too."""
        if not found.items() <= self.sharded.items():
            self.sharded |= found
            self._compiled.clear()

    def compiled(self, wanted: Wanted) -> CompiledProgram:
        if wanted not in self._compiled:
            program = self._make_program(wanted)
            check(program)
            self._compiled[wanted] = CompiledProgram.of(program, self.sharded)
        return self._compiled[wanted]

    def _make_program(self, wanted: Wanted) -> Program:
        micro_batches, trains, slices = wanted.micro_batches, wanted.trains, wanted.slices
        if trains:
            rows = table_in_training(self.schedule, self.placement, micro_batches, slices)
        else:
            rows = forward_only_table(self.placement, micro_batches, slices)
        skips = self._skip_routes(wanted.loss_pops, wanted.path)
        program = Program.of(rows, micro_batches, rank_of=self.placement, skips=skips, slices=slices)
        program = lower.join_backwards(program, self.unsplit)
        program = lower.place_transfers(lower.place_remat(program, self.remat, halved=wanted.halved))
        if self.deferred_batch_norm:
            program = lower.place_commits(program, range(len(self.stages)))
        if self.row is not None and trains:
            program = lower.place_ties(program, self._stages_that_share())
            if self.replicas > 1:
                program = lower.place_reduces(program, range(len(self.stages)))
        return program

    def crossings(self) -> set[tuple[int, int]]:
        """The pairs of ranks that send each other values, or gradients of what they share, the lower one first."""
        every = find_loss_pops(self.layers, self.stashes)  # a loss may pop any of them
        sharing = self._stages_that_share()
        paths = 1 if self.traced is None else len(self.traced.traces)
        pairs = [
            *((stage - 1, stage) for stage in range(1, len(self.stages))),
            *((route.source, route.target) for path in range(paths) for route in self._skip_routes(every, path)),
            *((one, other) for one in sharing for other in sharing),
        ]
        ranks = [sorted((self.placement[one], self.placement[other])) for one, other in pairs]
        return {(low, high) for low, high in ranks if low != high}

    def _skip_routes(self, loss_pops: Sequence[Pop], path: int) -> list[Route]:
        """The routes of stashes between stages; the loss is behind the last layer, and in its stage."""
        stage_of = self.stage_of
        if self.traced is None:
            own = [pop for stage in self.stages for layer in stage.layers for pop in layer.pop]
        else:
            own = self.traced.pops(path, stage_of)
        roads = [Route(stage_of[pop.source], stage_of[pop.target], pop.route_name) for pop in [*own, *loss_pops]]
        return [road for road in roads if road.source != road.target]

    def _stages_that_share(self) -> list[int]:
        stage_of = self.stage_of
        return sorted({stage_of[index] for item in self.shared for index in item.slots})
