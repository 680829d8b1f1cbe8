"""One mini-batch on its way through the stages of a process."""

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from gpipe.plan.lower import halves
from gpipe.plan.program import Program
from gpipe.plan.rules import BACKWARDS
from gpipe.run.ambient import Ambient
from gpipe.run.drivers import lockstep, walk
from gpipe.run.guard import RandomGuard
from gpipe.run.lend import nobody_else_draws
from gpipe.run.mailbox import Mailbox
from gpipe.run.pace import Pace
from gpipe.run.recorder import Recorder
from gpipe.run.shared import Aliases, BufferGuard
from gpipe.run.skips import version
from gpipe.run.steps import Part
from gpipe.run.transport import Transport
from gpipe.run.wiring import Wiring, wiring
from gpipe.run.worker import Batch, Output, RecomputeError, Worker

if TYPE_CHECKING:
    from gpipe.run.engine import Engine


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

    @cached_property
    def checksum(self) -> int:
        """The same for the same program."""
        return zlib.crc32(self.program.to_text().encode())

    @classmethod
    def of(cls, program: Program) -> "Plumbing":
        """Looks the connections up."""
        wirings = tuple(wiring(program, stage) for stage in range(program.stages))
        forward, backward = halves(program)
        return cls(Part(program, wirings), Part(forward, wirings), Part(backward, wirings), wirings)


class Run:
    """One mini-batch on its way: all its state is here, none in the pipe or its threads."""

    def __init__(self, engine: "Engine", plumbing: Plumbing, batch: Batch) -> None:
        self.engine = engine
        self.plumbing = plumbing
        self.batch = batch
        self.aliases = Aliases(engine.shared, engine.own)
        self.transport = self._make_transport()
        self.workers: list[Worker] = []
        self.threaded = plumbing.pace.threaded if engine.threaded is None else engine.threaded

    def _make_transport(self) -> Transport:
        return Mailbox(self.plumbing.program.ranks)

    def go(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the whole program."""
        self._go(self.plumbing.whole, ambient, recorder, threaded=self.threaded)
        self._finish()

    def go_forward(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the forward half; what the backward half needs is kept."""
        self._go(self.plumbing.forward, ambient, recorder, threaded=self.threaded)
        self._weights = self._find_weights()  # behind it: lazy modules come by theirs in it

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
        on_cuda = any(lane.device.type == "cuda" for lane in self.engine.lanes.values())
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
        again = [stage for stage in self.engine.own if self.plumbing.wirings[stage.index].recomputed]
        modules = [layer.module for stage in again for layer in stage.layers]
        weights = [(id(parameter), version(parameter)) for module in modules for parameter in module.parameters()]
        return weights, [part.training for module in modules for part in module.modules()]

    def _finish(self) -> None:
        self._add_up()
        held = [worker.rank for worker in self.workers if worker.store]
        if held:
            raise AssertionError(f"the stores of ranks {held} are not empty after the step; this is a bug in gpipe")

    def _clear(self) -> None:
        for worker in self.workers:
            worker.store.clear()

    def _add_up(self) -> None:
        if self.batch.trains:
            self.aliases.add_up()

    def _go(self, part: Part, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        lanes = list(self.engine.lanes.values())
        for lane in lanes:
            lane.begin()
        if recorder is not None:
            recorder.begin(self.engine.lanes)
        here = Ambient.here()  # for a backward, not what its forward had around it
        if self.engine.threaded is not False:
            here.refuse_strangers()
        one_thread = self.engine.place is not None or not threaded
        alone = one_thread and not here.strangers and nobody_else_draws(lanes)
        for stage in self.engine.own:
            stage.alone = alone
        guard, buffers = RandomGuard(lanes), BufferGuard(self.engine.exposed)
        begun = time.perf_counter()
        try:
            with ambient.fresh_casts(), self.aliases.in_place():
                self._drive(part, ambient, recorder, threaded=threaded)
            guard.check([layer for stage in self.engine.own for layer in stage.layers])
            buffers.check()
        except RecomputeError:
            self._clear()
            guard.check([layer for stage in self.engine.own for layer in stage.layers])  # knows more, perhaps
            buffers.check()
            raise
        except BaseException:
            self._clear()
            raise
        self.plumbing.pace.note((time.perf_counter() - begun) / max(map(len, part.rows)), threaded=threaded)
        for worker in self.workers:
            worker.settle()
        for lane in lanes:
            lane.end()
        if recorder is not None:
            recorder.end()

    def _drive(self, part: Part, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        with intra_op_threads(self.engine.intra_op_threads):  # MKL has one number for all threads
            if threaded:
                jobs = [partial(_row, worker, part, self.transport, ambient, recorder) for worker in self.workers]
                self.engine.threads.run(jobs, self.transport.cancel)
            else:
                with ambient.rank_thread():
                    lockstep(part, self.workers, recorder)


def _row(worker: Worker, part: Part, transport: Transport, ambient: Ambient, recorder: Recorder | None) -> None:
    with ambient.rank_thread():
        walk(worker, part, transport, recorder)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Lets an operation use so many CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
