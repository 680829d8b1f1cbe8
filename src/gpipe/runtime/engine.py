"""Makes the program of a mini-batch and has it run: everything of a pipe that is not its face."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from torch import nn

from gpipe.comm.limits import explaining_limits
from gpipe.comm.mesh import Position
from gpipe.comm.nccl import groups_for
from gpipe.comm.net import Net
from gpipe.distributed.construction import LINKING, Agreement
from gpipe.distributed.rendezvous import connect
from gpipe.distributed.session_run import DistributedRun
from gpipe.distributed.sync_batchnorm import find_norms
from gpipe.layers.batchnorm import find_drift
from gpipe.layers.shared_buffers import find_shared_buffers, find_shared_norm
from gpipe.layers.skips import Pop, find_loss_pops
from gpipe.layers.stage import Stage
from gpipe.layers.tied import Tied, find_shared
from gpipe.layers.weight_owners import WeightOwners
from gpipe.plan.action import Route
from gpipe.plan.laws import check
from gpipe.plan.lower import Remat, place_commits, place_recompute, place_reduces, place_ties, place_transfers
from gpipe.plan.program import Program
from gpipe.plan.schedules import Schedule, forward_only_rows
from gpipe.runtime.batch import MiniBatch
from gpipe.runtime.minibatch import CompiledProgram, MiniBatchRun
from gpipe.runtime.streams import RankStream, streams_on
from gpipe.runtime.walk import RankThreads
from gpipe.runtime.worker import Worker


class Wanted(NamedTuple):
    """What a program is made for: `halved` for a loss that is computed outside."""

    micro_batches: int
    trains: bool
    halved: bool = False
    loss_pops: tuple[Pop, ...] = ()


class Engine:
    """The stages of a pipe and what turns them."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        remat: Sequence[Remat],
        *,
        threaded: bool,
        intra_op_threads: int,
        deferred_batch_norm: bool,
        sync_batch_norm: bool = False,
        position: Position | None = None,
        tied: Tied = (),
    ) -> None:
        self.stages = tuple(stages)
        self.own = self.stages if position is None else (self.stages[position.stage],)  # what runs in this process
        self.position = position
        self.shared = find_shared([layer.module for stage in stages for layer in stage.layers], tied)
        self.shared_buffers = find_shared_buffers(self.stages)
        self.deferred_batch_norm = deferred_batch_norm
        if deferred_batch_norm and sync_batch_norm:
            raise ValueError(
                "deferred_batch_norm=True and sync_batch_norm=True both say what running statistics are; with the "
                "second they are those of all replicas already, so leave out the first"
            )
        self.sync_batch_norm = sync_batch_norm
        if sync_batch_norm:
            find_norms([layer for stage in self.stages for layer in stage.layers])  # refused everywhere alike
        race = find_shared_norm(self.stages)
        if race:
            raise ValueError(race)
        self.schedule = schedule
        self.remat = tuple(remat)
        self.threaded = threaded
        self.intra_op_threads = intra_op_threads
        self._reset()

    def _reset(self) -> None:
        self.threads = RankThreads(self.intra_op_threads)
        self._net: Net | None = None
        self._lanes: dict[int, RankStream] | None = None
        self._compiled: dict[Wanted, CompiledProgram] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves threads, streams and what can be made again behind."""
        return {k: v for k, v in vars(self).items() if k not in {"threads", "_net", "_lanes", "_compiled"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def findings(self) -> list[str]:
        """What is to be said of these stages before a run."""
        settled = (
            self.deferred_batch_norm or self.sync_batch_norm or self.position is None or self.position.replicas == 1
        )
        return [] if settled else find_drift([layer.module for stage in self.own for layer in stage.layers])

    @property
    def streams(self) -> dict[int, RankStream]:
        """The stream of each rank that runs here."""
        if self._lanes is None:
            streams = streams_on([stage.device for stage in self.own])
            self._lanes = {stage.index: stream for stage, stream in zip(self.own, streams, strict=True)}
        return self._lanes

    @property
    def net(self) -> Net:
        """The links to the other processes; made when first needed, by all of them at once."""
        position = self.position
        assert position is not None
        if self._net is None:
            with Agreement() as agreement, explaining_limits():
                agreement.position = position
                agreement.greet()
                self.link(agreement)
        assert self._net is not None
        return self._net

    def link(self, agreement: Agreement) -> None:
        """Makes the links to the other processes, who do so at the same time; the last that the agreement does.

        Raises:
            OSError: This process may open no more files.
            RemoteError: Another process failed, or is gone.
        """
        position = self.position
        assert position is not None
        links = connect(agreement)
        try:
            shown = partial(agreement.tell, LINKING)
            self._net = Net(position.rank, links, position.timeout, groups_for(position, self._crossings()), shown)
            agreement.tell(LINKING, last=True)
        except BaseException:
            for link in links.values():
                link.close()
            self._net = None
            raise

    def gone(self) -> list[int]:
        """The ranks whose ends of the links are closed; none if there are no links, or these are closed too."""
        return [] if self._net is None else self._net.peers.gone()

    def close(self) -> None:
        """Ends threads and links; the next run makes new ones."""
        self.threads.close()
        if self._net is not None:
            self._net.close()
            self._net = None

    def compiled(self, wanted: Wanted) -> CompiledProgram:
        """The checked program of a run."""
        if wanted not in self._compiled:
            self._compiled[wanted] = CompiledProgram.of(self._make_program(wanted))
        return self._compiled[wanted]

    def wanted(self, micro_batches: int, batch: MiniBatch) -> Wanted:
        """What is asked for the run of a mini-batch."""
        return Wanted(micro_batches, batch.trains, batch.loss_fn is None, tuple(batch.loss_pops))

    def _make_program(self, wanted: Wanted) -> Program:
        stages, micro_batches, trains = len(self.stages), wanted.micro_batches, wanted.trains
        placement = self.schedule.placement(stages, 1)
        rows = (self.schedule.rows if trains else forward_only_rows)(placement, micro_batches)
        program = Program.of(rows, micro_batches, rank_of=placement, skips=self._skip_routes(wanted.loss_pops))
        program = place_transfers(place_recompute(program, self.remat, halved=wanted.halved))
        if self.deferred_batch_norm:
            program = place_commits(program, range(stages))
        if self.position is not None and trains:
            program = place_ties(program, self._stages_that_share())
            if self.position.replicas > 1:
                program = place_reduces(program, range(stages))
        check(program)
        return program

    def _crossings(self) -> set[tuple[int, int]]:
        """The pairs of stages that send each other values, or gradients of what they share."""
        found = {(stage - 1, stage) for stage in range(1, len(self.stages))}
        every = find_loss_pops(self.layers, self.stashes)  # a loss may pop any of them
        found |= {(route.source, route.target) for route in self._skip_routes(every)}
        return found | set(combinations(self._stages_that_share(), 2))

    def _skip_routes(self, loss_pops: Sequence[Pop]) -> list[Route]:
        """The routes of stashes between stages; the loss is behind the last layer, and in its stage."""
        stage_of = [stage.index for stage in self.stages for _ in stage.layers]
        stage_of.append(stage_of[-1])
        pops = [*(pop for stage in self.stages for layer in stage.layers for pop in layer.pop), *loss_pops]
        return [
            Route(stage_of[pop.source], stage_of[pop.target], pop.route_name)
            for pop in pops
            if stage_of[pop.source] != stage_of[pop.target]
        ]

    @property
    def layers(self) -> list[nn.Module]:
        """The user's layers, all in their order."""
        return [layer.module for stage in self.stages for layer in stage.layers]

    @property
    def stashes(self) -> tuple[str, ...]:
        """The names of all stashes."""
        return tuple(name for stage in self.stages for layer in stage.layers for name in layer.stash)

    def _stages_that_share(self) -> list[int]:
        stage_of = [stage.index for stage in self.stages for _ in stage.layers]
        return sorted({stage_of[index] for item in self.shared for index in item.slots})

    def start(self, micro_batches: int, batch: MiniBatch) -> MiniBatchRun:
        """Prepares the run of one mini-batch."""
        compiled = self.compiled(self.wanted(micro_batches, batch))
        run = (MiniBatchRun if self.position is None else DistributedRun)(self, compiled, batch)
        for rank, stream in self.streams.items():
            held = [stage for stage in self.own if compiled.program.rank_of[stage.index] == rank]
            own = {stage.index: (stage, compiled.wirings[stage.index]) for stage in held}
            run.workers.append(Worker(rank, own, stream, batch, run.transport))
            run.workers[-1].every = self.own
        weights = run.aliases.sources.values()
        if batch.trains and (len(self.own) > 1 or weights):
            owners = WeightOwners(self.own, weights)
            for worker in run.workers:
                worker.owners = owners
        return run
