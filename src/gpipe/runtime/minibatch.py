"""One mini-batch on its way through the stages of a process."""

import zlib
from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gpipe.intra_op import intra_op_threads
from gpipe.layers.recompute_check import RecomputeError
from gpipe.layers.shared_buffers import SharedBufferCheck
from gpipe.layers.weight_aliases import WeightAliases
from gpipe.plan.lower import halves
from gpipe.plan.program import Program
from gpipe.rng.random_ops import CPU, unseeded
from gpipe.runtime.batch import MiniBatch, Output
from gpipe.runtime.mailbox import Mailbox
from gpipe.runtime.modes import Ambient
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.rows import CompiledRows
from gpipe.runtime.steps import Wiring, wiring
from gpipe.runtime.walk import lockstep, walk
from gpipe.runtime.worker import Worker
from gpipe.values.messages import Transport
from gpipe.values.tree import version

if TYPE_CHECKING:
    from gpipe.runtime.engine import Engine


@dataclass(frozen=True)
class CompiledProgram:
    """A program and how its stages are connected."""

    whole: CompiledRows
    forward: CompiledRows
    backward: CompiledRows
    wirings: tuple[Wiring, ...]

    @property
    def program(self) -> Program:
        """The whole table."""
        return self.whole.program

    @cached_property
    def checksum(self) -> int:
        """The same for the same program."""
        return zlib.crc32(self.program.to_text().encode())

    @classmethod
    def of(cls, program: Program) -> "CompiledProgram":
        """Looks the connections up."""
        wirings = tuple(wiring(program, stage) for stage in range(program.stages))
        forward, backward = halves(program)
        return cls(
            CompiledRows(program, wirings), CompiledRows(forward, wirings), CompiledRows(backward, wirings), wirings
        )


class MiniBatchRun:
    """One mini-batch on its way: all its state is here, none in the pipe or its threads."""

    def __init__(self, engine: "Engine", compiled: CompiledProgram, batch: MiniBatch) -> None:
        self.engine = engine
        self.compiled = compiled
        self.batch = batch
        self.aliases = WeightAliases(engine.shared, engine.own)
        self.transport = self._make_transport()
        self.workers: list[Worker] = []

    def _make_transport(self) -> Transport:
        return Mailbox(self.compiled.program.ranks)

    def go(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the whole program."""
        self._go(self.compiled.whole, ambient, recorder, threaded=self.engine.threaded)
        self._finish()

    def go_forward(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the forward half; what the backward half needs is kept.

        Raises:
            ValueError: A mode is active that a recompute would not see.
        """
        if ambient.strangers and any(wires.recomputed for wires in self.compiled.wirings):
            raise ValueError(
                f"{', '.join(ambient.strangers)} is active, and would not see what a backward recomputes of this "
                f"call; use step(), or remat='never'"
            )
        self._go(self.compiled.forward, ambient, recorder, threaded=self.engine.threaded)
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
        on_cuda = any(stream.device.type == "cuda" for stream in self.engine.streams.values())
        self._go(self.compiled.backward, ambient, recorder, threaded=self.engine.threaded and not on_cuda)
        self._finish()

    def take_outputs(self) -> list[Output]:
        """The outputs of all micro-batches, which the run then forgets."""
        made, self.batch.outputs = self.batch.outputs, {}
        return [made[m] for m in range(len(made))]

    def _find_weights(self) -> tuple[list[tuple[int, int]], list[bool]]:
        """What a recompute depends on: which parameters, how often changed, and the modules' modes."""
        again = [stage for stage in self.engine.own if self.compiled.wirings[stage.index].recomputed]
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

    def _go(self, part: CompiledRows, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        streams = list(self.engine.streams.values())
        for stream in streams:
            stream.begin()
        if recorder is not None:
            recorder.begin(self.engine.streams)
        here = Ambient.here()  # for a backward, not what its forward had around it
        if threaded:
            here.refuse_strangers()
        buffers = SharedBufferCheck(self.engine.shared_buffers)
        try:
            with (
                ambient.fresh_casts(),
                self.aliases.in_place(),
                unseeded({stream.device for stream in streams} | {CPU}),
            ):
                self._drive(part, ambient, recorder, threaded=threaded)
            buffers.check()
        except RecomputeError:
            self._clear()
            buffers.check()  # knows more, perhaps
            raise
        except BaseException:
            self._clear()
            raise
        for worker in self.workers:
            worker.settle()
        for stream in streams:
            stream.end()
        if recorder is not None:
            recorder.end()

    def _drive(self, part: CompiledRows, ambient: Ambient, recorder: Recorder | None, *, threaded: bool) -> None:
        with intra_op_threads(self.engine.intra_op_threads):  # MKL has one number for all threads
            if threaded:
                contexts = [copy_context() for _ in self.workers]
                jobs = [
                    partial(context.run, _row, worker, part, self.transport, ambient, recorder)
                    for context, worker in zip(contexts, self.workers, strict=True)
                ]
                self.engine.threads.run(jobs, self.transport.cancel)
                self._tell_of_variables(contexts)
            else:
                with ambient.rank_thread():
                    lockstep(part, self.workers, recorder)

    def _tell_of_variables(self, contexts: Sequence[Context]) -> None:
        """Notes the context variables that layers have set."""
        own = copy_context()
        names = {
            variable.name: None
            for context in contexts
            for variable, value in context.items()
            if own.get(variable, ABSENT) is not value and variable.name not in OF_PYTHON
        }
        if names and self.batch.examines:
            self.batch.findings.append(
                f"layers set the context variables {', '.join(names)}, and layers of other partitions do not see "
                f"that, nor which micro-batch it was for; hand it on as part of the value instead"
            )


ABSENT = object()
OF_PYTHON = {"decimal_context"}
"""What Python sets by itself."""


def _row(
    worker: Worker, part: CompiledRows, transport: Transport, ambient: Ambient, recorder: Recorder | None
) -> None:
    with ambient.rank_thread():
        walk(worker, part, transport, recorder)
