"""A call of the pipe under grad, in all processes: its forward, and its backward whenever that comes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from torch import Tensor

from gpipe.distributed.handshake import Asked, Header
from gpipe.distributed.peers import Peers
from gpipe.runtime.minibatch import MiniBatchRun
from gpipe.runtime.recorder import Recorder
from gpipe.runtime.state import Output
from gpipe.runtime.thread_state import Ambient
from gpipe.stages.boundary import UNDEFINED, Gradients
from gpipe.stages.layout import moved

SECOND_BACKWARD = (
    "this forward's backward has run already, and the pipeline has let go of what it kept; "
    "call the pipe again, or add the losses up and call backward once"
)


@dataclass(eq=False)
class PipelinedCall:
    """One forward of all processes, and its backward.

    Attributes:
        meet: Begins a run in all processes.
        peers: Those of the forward's, until it has run.
        run: The mini-batch, until its backward.
        head: What was said of it.
        ambient: The caller's modes.
        recorder: Records both, if there is one.
        awaited: Whether other replicas wait for the backward of each micro-batch.
    """

    meet: Callable[[], AbstractContextManager[Peers]]
    peers: Peers | None
    run: MiniBatchRun | None
    head: Header
    ambient: Ambient
    recorder: Recorder | None
    awaited: bool = False
    _wants: list[tuple[bool, ...]] = field(default_factory=list)

    def forward(self) -> list[Output]:
        """Runs all forwards; gives the outputs of all micro-batches, in every process."""
        (peers, self.peers), run = (self.peers, None), self.run
        assert peers is not None
        assert run is not None
        run.go_forward(self.ambient, self.recorder)
        outputs = peers.gather(run.take_outputs(), self.head.micro_batches)
        self._wants = [output.wants_gradient for output in outputs]
        peers.finish(run, self.recorder, None)
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Runs all backwards; gives the gradients of the inputs' leaves, micro-batch after micro-batch.

        Over processes the gradients of the output count that the one with the last stage has.
        """
        with self.meet() as peers:
            run, self.run = self.run, None
            if run is None:
                raise RuntimeError(SECOND_BACKWARD)
            peers.head(replace(self.head, asked=Asked.BACKWARD), lambda _: run.compiled.checksum)
            run.batch.output_gradients = self._parted(gradients)
            run.go_backward(self.ambient, self.recorder)
            run.batch.tell(run.batch.findings)
            found: Gradients = [
                moved(gradient, leaf.device) if isinstance(gradient, Tensor) else None
                for m, crossing in enumerate(run.batch.inputs)
                for leaf, gradient in zip(crossing.leaves, run.batch.input_gradients[m], strict=True)
            ]
            peers.finish(run, self.recorder, None)
        return found

    def _parted(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        """The gradients of those tensors of each output that want one.

        Where there are none at all, autograd came here all the same, and so they are undefined.
        """
        remaining = iter(gradients)
        parted: list[Gradients] = [
            [gradient for wanted, gradient in zip(wants, remaining, strict=False) if wanted] for wants in self._wants
        ]
        unused = [all(gradient is None for gradient in some) for some in parted]
        runs_all = self.awaited or all(unused)
        return [
            [UNDEFINED] * len(some) if runs_all and without else some
            for some, without in zip(parted, unused, strict=True)
        ]
