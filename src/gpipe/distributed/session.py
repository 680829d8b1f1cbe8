"""A pipe over several processes: what `GPipe` does differently there. All call the same, at the same time."""

import json
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.build.settings import Settings
from gpipe.comm.mesh import Position
from gpipe.comm.net import Net
from gpipe.distributed.agree import find_different
from gpipe.distributed.handshake import Asked, Header, compare, hear, tell
from gpipe.distributed.reduce import tell_replicas
from gpipe.distributed.session_run import DistributedRun
from gpipe.distributed.stragglers import Stragglers
from gpipe.errors import innermost_code
from gpipe.layers.losses import NO_METRICS
from gpipe.plan.action import parse_action
from gpipe.plan.timeline import Span, Timeline
from gpipe.runtime.autograd import SECOND_BACKWARD, Call, pipelined
from gpipe.runtime.batch import MiniBatch, Output
from gpipe.runtime.engine import Engine
from gpipe.runtime.inputs import StepInputs, check_loss_fn, check_values
from gpipe.runtime.minibatch import MiniBatchRun
from gpipe.runtime.modes import Ambient
from gpipe.runtime.recorder import Recorder
from gpipe.values.boundary import BoundaryValue, Gradients
from gpipe.values.messages import Control, Label
from gpipe.values.microbatch import merge, rows_of_parts, split
from gpipe.values.tree import Tree

logger = logging.getLogger("gpipe")


class Session:
    """The processes of one pipe."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        assert engine.position is not None
        self.engine = engine
        self.position: Position = engine.position
        self.micro_batches = settings.micro_batches  # at most, in each replica
        self.rank, self.size = self.position.rank, len(self.position.members)
        costs, replicas = settings.partition.seconds, self.position.replicas
        self.stragglers = Stragglers(costs, replicas, measured=settings.in_seconds)
        self.ties_of_names = dict(_ties_of_names(engine))
        self.calls = 0

    @property
    def is_first(self) -> bool:
        """Whether this process reads inputs."""
        return self.position.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this process reads targets, and computes losses or outputs."""
        return self.position.stage == self.position.stages - 1

    @property
    def first(self) -> int:
        """The process of this replica's first stage."""
        return self.position.rank_of(0)

    @contextmanager
    def run(self) -> Iterator["SessionRun"]:
        """One run in all processes: whoever fails inside tells the others, and they fail too."""
        net = self.engine.net
        try:
            net.begin()
            yield SessionRun(self, net)
        except BaseException as error:
            net.fail(error)
            raise

    def exchange(self, told: bytes) -> list[bytes]:
        """Tells all processes something between runs, and gives what each told, by rank.

        Raises:
            RemoteError: A process failed, is gone, or does something else.
        """
        with self.run() as talk:
            talk.meet(Asked.EXCHANGE)
            return talk.net.agree(told)

    def gone(self) -> Collection[int]:
        """The ranks to which there is no connection any more, as far as that is known. Any thread may ask."""
        return self.engine.gone()

    def gather_norms(self, module: nn.Module, norms: Sequence[Tensor]) -> list[Tensor]:
        """The norms of all parameters of the replica, each once, in the order of the layers."""
        named = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
        with self.run() as talk:
            talk.meet(Asked.NORMS)
            every = talk.net.agree((named, list(norms)))
        own = [every[rank] for rank in self.position.ranks_of_replica]
        found = {name: norm for names, theirs in reversed(own) for name, norm in zip(names, theirs, strict=True)}
        order = [name for names, _ in own for name in names]
        return [found[name] for name in dict.fromkeys(order)]


NORMS = (nn.utils.clip_grad_norm_, nn.utils.get_total_norm)


def refuse_norms_of_a_part() -> None:
    """Refuses to give the parameters of this process to those who would take theirs for the norm of all.

    Raises:
        ValueError: It is torch's `clip_grad_norm_` or `get_total_norm` that asks.
    """
    codes = {innermost_code(norm): norm.__name__ for norm in NORMS}
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]  # None ends it
        if name := codes.get(frame.f_code):
            raise ValueError(
                f"torch.nn.utils.{name} would see the gradients of this process's partition alone, and what it does "
                f"would depend on how the layers are cut; have all processes call pipe.clip_grad_norm_(max_norm)"
            )


def _ties_of_names(engine: Engine) -> Iterator[tuple[str, str]]:
    names = {
        (layer.index, id(module), leaf): f"{layer.name}.{path}.{leaf}" if path else f"{layer.name}.{leaf}"
        for stage in engine.stages
        for layer in stage.layers
        for path, module in layer.module.named_modules()
        for leaf in module._parameters
    }
    for shared in engine.shared:
        places = [(at, id(module), leaf) for at, found in shared.slots.items() for module, leaf in found]
        first, *others = [names[place] for place in places]  # a module that is several layers has several names
        yield from ((other, first) for other in others)


class SessionRun:
    """What the processes tell each other in one run."""

    def __init__(self, together: Session, net: Net) -> None:
        self.together = together
        self.position = together.position
        self.net = net
        self._began, self._waited = time.perf_counter(), net.waited

    def head(self, own: Header, batch: MiniBatch) -> Header:
        """Has all stages know the rows and the number of micro-batches, which the first one knows.

        Raises:
            ValueError: A process does something else than the first stage.
        """
        engine = self.together.engine

        def checksum(micro_batches: int) -> int:
            return engine.compiled(engine.wanted(micro_batches, batch)).checksum

        if self.together.is_first:
            told = replace(own, checksum=checksum(own.micro_batches))
            tell(self.net, self.position, told)
            return told
        told = hear(self.net, self.position)
        if told.asked == own.asked and told.trains == own.trains:
            own = replace(own, checksum=checksum(told.micro_batches))
        compare(told, own, self.position)
        return told

    def meet(self, asked: Asked) -> None:
        """Makes sure that all stages do the same between runs.

        Raises:
            ValueError: A process does something else than the first stage.
        """
        own = Header(asked, 0, 0, 0, 0, 0, 0, 0, 0)
        if self.together.is_first:
            tell(self.net, self.position, own)
        else:
            compare(hear(self.net, self.position), own, self.position)

    def finish(self, run: MiniBatchRun, recorder: Recorder | None, told: Tree, *, trains: bool = False) -> list[Any]:
        """Waits until all processes have come to the end of the run; gives what each tells."""
        busy = time.perf_counter() - self._began - (self.net.waited - self._waited)
        seconds = torch.tensor(busy, dtype=torch.float64, device="cpu")  # a number would make the layout a new one
        every = self.net.agree((told, seconds, None if recorder is None else _timeline_text(recorder)))
        assert isinstance(run, DistributedRun)
        run.settle()
        texts = [text for _, _, text in every]
        if recorder is not None and None not in texts:
            recorder.join([_read_timeline(rank, text) for rank, text in enumerate(texts)])
        if trains and not self.net.rank:
            for finding in self.together.stragglers.note([float(theirs) for _, theirs, _ in every]):
                logger.warning(finding)
        return [theirs for theirs, _, _ in every]

    def step(
        self, own: Header, batch: MiniBatch, given: StepInputs, recorder: Recorder | None
    ) -> tuple[int, Tensor, list[object]]:
        """Runs a step; gives the rows of the last micro-batch, the loss and the metrics of all replicas."""
        told = self.head(own, batch)
        rows = rows_of_parts(told.rows, told.micro_batches)
        batch.first = self.position.replica * self.together.micro_batches
        shares: list[float] = []
        if self.together.is_last:
            check_loss_fn(given.loss_fn)
            check_values(targets=given.targets)
            self._compare(given)
            batch.targets = split(given.targets, told.rows, told.micro_batches, "targets")
            shares = given.shares(rows, batch.targets, self._add_over_replicas)
            always = self.together.engine.sync_batch_norm  # then the other replicas wait for this one's backward
            batch.seeds = [share * given.scale if share or always else None for share in shares]
        run = self.together.engine.start(told.micro_batches, batch)
        run.go(given.ambient, recorder)
        losses = [batch.losses[m] * share for m, share in enumerate(shares) if share]
        metrics = [batch.metrics[m] for m in range(len(shares))]
        plain = all(metric is NO_METRICS for metric in metrics)
        own_loss = sum(losses) if losses else None
        try:
            every = self.finish(run, recorder, (own_loss, None if plain else metrics), trains=batch.trains)
        except TypeError as error:
            error.add_note(f"rank {self.net.rank} was telling the others the metrics that loss_fn returned")
            raise
        parts = [loss for loss, _ in every if loss is not None]
        found = [metric for _, some in every if some is not None for metric in some]
        return rows[-1], sum(parts[1:], start=parts[0]), found

    def _compare(self, given: StepInputs) -> None:
        """Checks that all replicas were given the same to average and to scale by.

        Raises:
            ValueError: Names what differs, and on which ranks.
        """
        if self.position.replicas == 1:
            return
        peers = self.position.ranks_of_stage
        every = tell_replicas(
            self.net, self.position, Control.REDUCTION, {"reduction": given.kind, "scale": given.scale}
        )
        mistakes = [
            ", ".join(f"{name} is {value!r} on rank {rank}" for rank, value in by_rank.items())
            for name, by_rank in find_different(dict(zip(peers, every, strict=True))).items()
        ]
        if mistakes:
            raise ValueError(
                f"the replicas were given different things: {'; '.join(mistakes)}. Give step the same loss_fn, "
                f"reduction, scale and scaler in every process"
            )

    def _add_over_replicas(self, own: float) -> float:
        """Adds up a weight over the last stages of all replicas."""
        found: float = sum(tell_replicas(self.net, self.position, Control.WEIGHT, own))
        return found

    def call(
        self, own: Header, batch: MiniBatch, leaves: list[list[Tensor]], ambient: Ambient, recorder: Recorder | None
    ) -> tuple[int, Any]:
        """Runs the pipelined forward; gives the rows of the last micro-batch, and the output where it is wanted."""
        self.together.calls += 1
        told = self.head(replace(own, call=self.together.calls), batch)
        batch.first = self.position.replica * self.together.micro_batches
        if not self.together.is_first:
            batch.inputs = [BoundaryValue(None, [])] * told.micro_batches
            batch.input_gradients = {m: [] for m in range(told.micro_batches)}
        run = self.together.engine.start(told.micro_batches, batch)
        rows = rows_of_parts(told.rows, told.micro_batches)[-1]
        if ambient.grad:
            call = SessionCall(run, ambient, recorder, self, told)
            return rows, merge(pipelined(call, leaves or [[]] * told.micro_batches))
        run.go(ambient, recorder)
        outputs = run.take_outputs() if self.together.is_last else []
        if own.gathers:
            outputs = self.gather(outputs, told.micro_batches)
        self.finish(run, recorder, None)
        return rows, merge([output.value for output in outputs]) if outputs else None

    def gather(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        """Gives every stage of the replica the outputs that the last one made."""
        last = self.together.first + self.position.stages - 1
        labels = [Label(Control.OUTPUT, m, gradient=False) for m in range(micro_batches)]
        if not self.together.is_last:
            return [Output(*self.net.receive_value(last, label)) for label in labels]
        for label, output in zip(labels, outputs, strict=True):
            for peer in range(self.together.first, last):
                self.net.send_value(peer, label, (output.value, output.wants_gradient))
        return list(outputs)


class SessionCall(Call):
    """One forward of all processes, and its backward."""

    def __init__(
        self, run: MiniBatchRun, ambient: Ambient, recorder: Recorder | None, talk: SessionRun, head: Header
    ) -> None:
        super().__init__(run, ambient, recorder)
        self._talk = talk
        self._head = head

    def forward(self) -> list[Output]:
        """Runs all forwards; gives the outputs of all micro-batches, in every process."""
        assert self._run is not None
        self._run.go_forward(self._ambient, self._recorder)
        made = self._run.take_outputs() if self._talk.together.is_last else []
        outputs = self._talk.gather(made, self._head.micro_batches)
        self._wants = [output.wants_gradient for output in outputs]
        self._talk.finish(self._run, self._recorder, None)
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Runs all backwards: the gradients of the last stage count; the first stage has those of the inputs."""
        with self._talk.together.run() as talk:
            run = self._run
            if run is None:
                raise RuntimeError(SECOND_BACKWARD)
            talk.head(replace(self._head, asked=Asked.BACKWARD), run.batch)
            found = super().backward(gradients)
            talk.finish(run, self._recorder, None)
        return found


def _timeline_text(recorder: Recorder) -> str:
    timeline = recorder.timelines[-1]
    spans = [(str(span.action), span.start, span.end) for span in timeline.spans]
    return json.dumps([recorder.began, timeline.seconds, spans])


def _read_timeline(rank: int, text: str) -> tuple[float, Timeline]:
    began, seconds, spans = json.loads(text)
    found = tuple(Span(rank, parse_action(action), start, end) for action, start, end in spans)
    return began, Timeline(1, found, seconds)
