"""Makes the program of a mini-batch and has it run: everything of a pipe that is not its face."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpipe.plan.action import Route
from gpipe.plan.laws import check
from gpipe.plan.lower import Remat, halves, place_commits, place_recompute, place_transfers
from gpipe.plan.program import Program, Rows
from gpipe.plan.rules import BACKWARDS
from gpipe.plan.schedules import forward_only
from gpipe.run.ambient import Ambient
from gpipe.run.drivers import RankThreads, lockstep, walk
from gpipe.run.guard import RandomGuard
from gpipe.run.lane import Lane, lanes_on
from gpipe.run.mailbox import Mailbox
from gpipe.run.pace import Pace
from gpipe.run.recorder import Recorder
from gpipe.run.shared import Aliases, BufferGuard, find_exposed, find_race, find_shared
from gpipe.run.skips import version
from gpipe.run.stage import Stage
from gpipe.run.steps import Part
from gpipe.run.wiring import Wiring, wiring
from gpipe.run.worker import Batch, Output, Worker


@dataclass(frozen=True)
class Plumbing:
    """A program and how its stages are connected."""

    whole: Part
    forward: Part
    backward: Part
    wirings: tuple[Wiring, ...]
    pace: Pace = field(default_factory=Pace)

    @property
    def program(self) -> Program:
        """The whole table."""
        return self.whole.program

    @classmethod
    def of(cls, program: Program) -> "Plumbing":
        """Looks the connections up."""
        wirings = tuple(wiring(program, stage) for stage in range(program.stages))
        forward, backward = halves(program)
        return cls(Part(program, wirings), Part(forward, wirings), Part(backward, wirings), wirings)


class Engine:
    """The stages of a pipe and what turns them."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Callable[[int, int], Rows],
        remat: Sequence[Remat],
        *,
        threaded: bool | None,
        intra_op_threads: int,
        deferred_batch_norm: bool,
    ) -> None:
        self.stages = tuple(stages)
        self.shared = find_shared([layer.module for stage in stages for layer in stage.layers])
        self.exposed = find_exposed(self.stages)
        self.deferred_batch_norm = deferred_batch_norm
        race = find_race(self.stages)
        if race:
            raise ValueError(race)
        self.schedule = schedule
        self.remat = tuple(remat)
        self.threaded = threaded
        self.intra_op_threads = intra_op_threads
        self._reset()

    def _reset(self) -> None:
        self.threads = RankThreads(self.intra_op_threads)
        self._lanes: list[Lane] | None = None
        self._plumbings: dict[tuple[int, bool], Plumbing] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves threads, streams and what can be made again behind."""
        return {k: v for k, v in vars(self).items() if k not in {"threads", "_lanes", "_plumbings"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    @property
    def lanes(self) -> list[Lane]:
        """One lane for each rank."""
        if self._lanes is None:
            self._lanes = lanes_on([stage.device for stage in self.stages])
        return self._lanes

    def plumbing(self, micro_batches: int, *, trains: bool) -> Plumbing:
        """The checked program for so many micro-batches, with backwards or without."""
        key = (micro_batches, trains)
        if key not in self._plumbings:
            self._plumbings[key] = Plumbing.of(self._make_program(micro_batches, trains=trains))
        return self._plumbings[key]

    def _make_program(self, micro_batches: int, *, trains: bool) -> Program:
        stages = len(self.stages)
        rows = (self.schedule if trains else forward_only)(stages, micro_batches)
        program = Program.of(rows, micro_batches, skips=self._skip_routes())
        program = place_transfers(place_recompute(program, self.remat))
        if self.deferred_batch_norm:
            program = place_commits(program, range(stages))
        check(program)
        return program

    def _skip_routes(self) -> list[Route]:
        stage_of = [stage.index for stage in self.stages for _ in stage.layers]
        pops = [pop for stage in self.stages for layer in stage.layers for pop in layer.pop]
        return [
            Route(stage_of[pop.source], stage_of[pop.target], pop.route_name)
            for pop in pops
            if stage_of[pop.source] != stage_of[pop.target]
        ]

    def start(self, micro_batches: int, batch: Batch) -> "Run":
        """Prepares the run of one mini-batch."""
        plumbing = self.plumbing(micro_batches, trains=batch.trains)
        run = Run(self, plumbing, batch)
        for rank, lane in enumerate(self.lanes):
            held = [stage for stage in self.stages if plumbing.program.rank_of[stage.index] == rank]
            own = {stage.index: (stage, plumbing.wirings[stage.index]) for stage in held}
            run.workers.append(Worker(rank, own, lane, batch, run.mailbox))
        return run


class Run:
    """One mini-batch on its way: all its state is here, none in the pipe or its threads."""

    def __init__(self, engine: Engine, plumbing: Plumbing, batch: Batch) -> None:
        self.engine = engine
        self.plumbing = plumbing
        self.batch = batch
        self.aliases = Aliases(engine.shared, engine.stages)
        self.mailbox = Mailbox(plumbing.program.ranks)
        self.workers: list[Worker] = []
        self.threaded = plumbing.pace.threaded if engine.threaded is None else engine.threaded

    def go(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the whole program."""
        self._go(self.plumbing.whole, ambient, recorder, threaded=self.threaded)
        self._finish()

    def go_forward(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the forward half; what the backward half needs is kept."""
        self._weights = self._find_weights()
        self._go(self.plumbing.forward, ambient, recorder, threaded=self.threaded)

    def go_backward(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the backward half.

        On CUDA it runs in this thread: it is autograd's thread of the device, and backwards in other threads would
        wait for it for ever.

        Raises:
            RuntimeError: A parameter, or whether a module trains, has changed since the forward.
        """
        if self._find_weights() != self._weights:
            raise RuntimeError(
                "a parameter was changed or replaced, or train() or eval() was called, between a forward and its "
                "backward, which would recompute with the new value; call backward first, or use remat='never'"
            )
        on_cuda = any(lane.device.type == "cuda" for lane in self.engine.lanes)
        self._go(self.plumbing.backward, ambient, recorder, threaded=self.threaded and not on_cuda)
        self._finish()

    @property
    def backward_order(self) -> list[int]:
        """The micro-batches in the order in which their gradients come back to the inputs."""
        program = self.plumbing.program
        return [
            action.micro_batch
            for action in program.rows[program.rank_of[0]]
            if action.stage == 0 and action.kind in BACKWARDS and action.micro_batch is not None
        ]

    def take_outputs(self) -> list[Output]:
        """The outputs of all micro-batches, which the run then forgets."""
        made, self.batch.outputs = self.batch.outputs, {}
        return [made[m] for m in range(len(made))]

    def _find_weights(self) -> tuple[list[tuple[int, int]], list[bool]]:
        """What a recompute depends on: which parameters, how often changed, and the modules' modes."""
        again = [stage for stage in self.engine.stages if self.plumbing.wirings[stage.index].recomputed]
        modules = [layer.module for stage in again for layer in stage.layers]
        weights = [(id(parameter), version(parameter)) for module in modules for parameter in module.parameters()]
        return weights, [part.training for module in modules for part in module.modules()]

    def _finish(self) -> None:
        if self.batch.trains:
            self.aliases.add_up()
        held = [worker.rank for worker in self.workers if worker.store]
        if held:
            raise AssertionError(f"the stores of ranks {held} are not empty after the step; this is a bug in gpipe")

    def _go(self, part: Part, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        lanes = self.engine.lanes
        for lane in lanes:
            lane.begin()
        if recorder is not None:
            recorder.begin(lanes)
        if self.engine.threaded is not False:
            Ambient.here().refuse_strangers()  # for a backward, not those that its forward had around it
        guard, buffers = RandomGuard(lanes), BufferGuard(self.engine.exposed)
        begun = time.perf_counter()
        try:
            with ambient.fresh_casts(), self.aliases.in_place():
                if threaded:
                    self._in_threads(part, ambient, recorder)
                else:
                    self._in_lockstep(part, ambient, recorder)
            guard.check([layer for stage in self.engine.stages for layer in stage.layers])
            buffers.check()
        except BaseException:
            for worker in self.workers:
                worker.store.clear()
            raise
        self.plumbing.pace.note((time.perf_counter() - begun) / max(map(len, part.rows)), threaded=threaded)
        for worker in self.workers:
            worker.settle()
        for lane in lanes:
            lane.end()
        if recorder is not None:
            recorder.end()

    def _in_threads(self, part: Part, ambient: Ambient, recorder: Recorder | None) -> None:
        jobs = [partial(_row, worker, part, self.mailbox, ambient, recorder) for worker in self.workers]
        with _intra_op_threads(self.engine.intra_op_threads):  # MKL has one number for all threads
            self.engine.threads.run(jobs, self.mailbox.cancel)

    def _in_lockstep(self, part: Part, ambient: Ambient, recorder: Recorder | None) -> None:
        with _intra_op_threads(self.engine.intra_op_threads), ambient.rank_thread():
            lockstep(part, self.workers, recorder)


def _row(worker: Worker, part: Part, mailbox: Mailbox, ambient: Ambient, recorder: Recorder | None) -> None:
    with ambient.rank_thread():
        walk(worker, part, mailbox, recorder)


@contextmanager
def _intra_op_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
