"""One mini-batch on its way through the stages of a process."""

from collections.abc import Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial

from gpipe._torch.intra_op import intra_op_threads
from gpipe._torch.modes import as_rank, casts_apart
from gpipe.runtime.context import Others
from gpipe.runtime.loop import lockstep, walk
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.state import MiniBatch, Output
from gpipe.runtime.steps import CompiledProgram, CompiledRows
from gpipe.runtime.thread_state import Ambient
from gpipe.runtime.threads import RankThreads
from gpipe.runtime.worker import Worker
from gpipe.stages.buffers import Slot
from gpipe.stages.isolation import SharedBufferCheck
from gpipe.stages.layout import is_sharded
from gpipe.stages.recompute_check import RecomputeError
from gpipe.stages.rng import CPU, unseeded
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.stage import Stage
from gpipe.stages.tree import version


class MiniBatchRun:
    """One mini-batch under way: what it holds goes with it, however it ends; stages note things for one run alone.

    Args:
        compiled: What is run.
        batch: The mini-batch.
        workers: One for each rank of this process.
        stages: Those of this process.
        threads: One for each rank; None for all in the calling thread.
        intra_op_threads: CPU threads of one operation.
        aliases: Of shared weights.
        shared_buffers: The buffers that layers of several stages use.
        others: What is done together with other processes.
    """

    def __init__(
        self,
        compiled: CompiledProgram,
        batch: MiniBatch,
        workers: Sequence[Worker],
        stages: Sequence[Stage],
        threads: RankThreads | None,
        intra_op_threads: int,
        aliases: WeightAliases,
        shared_buffers: Mapping[Slot, str],
        others: Others,
    ) -> None:
        self.compiled = compiled
        self.batch = batch
        self.workers = workers
        self.stages = stages
        self.threads = threads
        self.intra_op_threads = intra_op_threads
        self.aliases = aliases
        self.shared_buffers = shared_buffers
        self.others = others

    def go(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the whole program."""
        self._go(self.compiled.whole, ambient, recorder, self.threads)
        self._finish()

    def go_forward(self, ambient: Ambient, recorder: Recorder | None) -> None:
        """Runs the forward half; what the backward half needs is kept.

        Raises:
            ValueError: A mode is active that a recompute would not see.
        """
        if ambient.strangers and any(ends.recomputed for ends in self.compiled.connections):
            raise ValueError(
                f"{', '.join(ambient.strangers)} is active, and would not see what a backward recomputes of this "
                f"call; use step(), or remat='never'"
            )
        self._go(self.compiled.forward, ambient, recorder, self.threads)
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
        on_cuda = any(worker.stream.device.type == "cuda" for worker in self.workers)
        self._go(self.compiled.backward, ambient, recorder, None if on_cuda else self.threads)
        self._finish()

    def take_outputs(self) -> list[Output]:
        """The outputs of all micro-batches, which the run then forgets."""
        made, self.batch.outputs = self.batch.outputs, {}
        return [made[m] for m in range(len(made))]

    def settle(self) -> None:
        """Commits the statistics of BatchNorm, once the run has ended well in all processes."""
        for worker in self.workers:
            worker.settle()

    def _find_weights(self) -> tuple[list[tuple[int, int]], list[bool]]:
        """What a recompute depends on: which parameters, how often changed, and the modules' modes."""
        again = [stage for stage in self.stages if self.compiled.connections[stage.index].recomputed]
        modules = [layer.module for stage in again for layer in stage.layers]
        weights = [(id(parameter), version(parameter)) for module in modules for parameter in module.parameters()]
        moves = any(is_sharded(part) for module in modules for part in module.modules())
        return [] if moves else weights, [part.training for module in modules for part in module.modules()]

    def _finish(self) -> None:
        if self.batch.trains and not self.compiled.ties:
            self.aliases.add_up()
        held = [worker.rank for worker in self.workers if worker.saved or worker.handed]
        if held:
            raise AssertionError(f"the stores of ranks {held} are not empty after the step; this is a bug in gpipe")

    def _clear(self) -> None:
        for worker in self.workers:
            worker.saved.clear()
            worker.handed.clear()

    def _go(
        self, rows: CompiledRows, ambient: Ambient, recorder: Recorder | None, threads: RankThreads | None
    ) -> None:
        streams = {worker.rank: worker.stream for worker in self.workers}
        for worker in self.workers:
            worker.begin()
            worker.stream.begin()
        if recorder is not None:
            recorder.begin(streams)
        here = Ambient.here()  # for a backward, not what its forward had around it
        if threads is not None:
            here.refuse_strangers()
        devices = {stream.device for stream in streams.values()} | {CPU}
        buffers = SharedBufferCheck(self.shared_buffers)
        try:
            with ambient.fresh_casts(), self.aliases.in_place(), unseeded(devices):
                self._drive(rows, ambient, recorder, threads)
            buffers.check()
        except RecomputeError:
            self._clear()
            buffers.check()  # knows more, perhaps
            raise
        except BaseException:
            self._clear()
            raise
        for worker in self.workers:
            worker.check_recomputes()
        for stream in streams.values():
            stream.end()
        if recorder is not None:
            recorder.end()

    def _drive(
        self, rows: CompiledRows, ambient: Ambient, recorder: Recorder | None, threads: RankThreads | None
    ) -> None:
        with intra_op_threads(self.intra_op_threads), self.others.around(rows):  # MKL has one number for all threads
            if threads is not None:
                contexts = [copy_context() for _ in self.workers]
                jobs = [
                    partial(context.run, _row, worker, rows, ambient, recorder)
                    for context, worker in zip(contexts, self.workers, strict=True)
                ]
                with casts_apart():
                    threads.run(jobs, self.others.transport.cancel)
                self._tell_of_variables(contexts)
            elif len(self.workers) == rows.program.ranks:
                with ambient.rank_thread():
                    lockstep(rows, self.workers, recorder)
            else:
                for worker in self.workers:
                    _row(worker, rows, ambient, recorder)
        for worker in self.workers:
            worker.share()

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


def _row(worker: Worker, rows: CompiledRows, ambient: Ambient, recorder: Recorder | None) -> None:
    with ambient.rank_thread(), as_rank():
        walk(worker, rows, recorder)
