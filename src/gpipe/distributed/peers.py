"""What the processes of a pipe tell each other in one run, in a form that one process alone has too."""

import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpipe.distributed.handshake import Asked, Header, compare, hear, tell
from gpipe.distributed.mesh import Position
from gpipe.distributed.net import Net
from gpipe.distributed.process_row import ProcessRow
from gpipe.distributed.reduce import tell_replicas
from gpipe.distributed.stragglers import Stragglers
from gpipe.runtime.context import Others
from gpipe.runtime.engine import Engine
from gpipe.runtime.minibatch import MiniBatchRun
from gpipe.runtime.recorder import Recorder, Told
from gpipe.runtime.state import Output
from gpipe.runtime.steps import CompiledProgram
from gpipe.schedule.action import parse_action
from gpipe.schedule.timeline import Span, Timeline
from gpipe.stages.messages import Control, Label, Traffic
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.tree import Tree

logger = logging.getLogger("gpipe")
NOT_RECORDED = (
    "this step is not in the recording, since rank {ranks} does not record: gpipe.record(pipe) in every process"
)


class Peers:
    """Those who run a mini-batch together: none but this process, if there are no others."""

    def head(self, own: Header, checksum: Callable[[Header], int]) -> Header:
        """What the process of the first stage says of the run, which knows the rows and the micro-batches.

        `checksum` is that of the program for what is said. Whoever does something else is refused.
        """
        return own

    def join(self, compiled: CompiledProgram, aliases: WeightAliases) -> Others:
        """What a mini-batch does together with those of the others."""
        return Others(compiled)

    def tell_replicas(self, control: Control, told: Tree) -> list[Any]:
        """Tells the other replicas something; gives what each told, by replica."""
        return [told]

    def gather(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        """Gives every process of the replica the outputs that the last stage made."""
        return list(outputs)

    def finish(self, run: MiniBatchRun, recorder: Recorder | None, told: Tree, *, trains: bool = False) -> list[Any]:
        """Ends a run once all have come to its end; gives what each tells, by rank."""
        run.settle()
        return [told]

    def exchange(self, asked: Asked, told: Tree) -> list[Any]:
        """Tells all something between runs; gives what each told, by rank."""
        return [told]


class LinkedPeers(Peers):
    """This process and those that it is linked to."""

    def __init__(
        self, engine: Engine, net: Net, position: Position, stragglers: Stragglers, *, sync_batch_norm: bool
    ) -> None:
        self.engine, self.net, self.position, self.stragglers = engine, net, position, stragglers
        self.sync_batch_norm = sync_batch_norm
        self.first, self.last = (position.rank_of(engine.placement[stage]) for stage in (0, -1))
        self._began, self._waited = time.perf_counter(), net.waited

    def head(self, own: Header, checksum: Callable[[Header], int]) -> Header:
        """What the process of the first stage says of the run, compared with what is done here."""
        if self.net.rank == self.first:
            told = replace(own, checksum=checksum(own))
            tell(self.net, [peer for peer in self.position.ranks_of_replica if peer != self.first], told)
            return told
        told = hear(self.net, self.first)
        if told.asked == own.asked and told.trains == own.trains:
            own = replace(own, checksum=checksum(told))
        compare(told, self.first, own, self.net.rank)
        return told

    def join(self, compiled: CompiledProgram, aliases: WeightAliases) -> Others:
        """The row of this process."""
        sync = self.sync_batch_norm
        return ProcessRow(self.engine, self.net, self.position, compiled, aliases, sync_batch_norm=sync)

    def tell_replicas(self, control: Control, told: Tree) -> list[Any]:
        """Tells the other replicas something; gives what each told, by replica."""
        return tell_replicas(self.net, self.position, control, told)

    def gather(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        """Gives every process of the replica the outputs that the last stage made."""
        labels = [Label(Control.OUTPUT, m, gradient=False) for m in range(micro_batches)]
        if self.net.rank != self.last:
            return [Output(*self.net.receive_value(self.last, label)) for label in labels]
        for label, output in zip(labels, outputs, strict=True):
            for peer in self.position.ranks_of_replica:
                if peer != self.last:
                    self.net.send_value(peer, label, (output.value, output.wants_gradient))
        return list(outputs)

    def finish(self, run: MiniBatchRun, recorder: Recorder | None, told: Tree, *, trains: bool = False) -> list[Any]:
        """Ends a run once all processes have come to its end; gives what each tells, by rank."""
        busy = time.perf_counter() - self._began - (self.net.waited - self._waited)
        seconds = torch.tensor(busy, dtype=torch.float64, device="cpu")  # a number would make the layout a new one
        every = self.net.agree((told, seconds, None if recorder is None else self._recorded_text(recorder, run)))
        run.settle()
        texts = [text for _, _, text in every]
        silent = [rank for rank, text in enumerate(texts) if text is None]
        if recorder is not None and silent:
            recorder.forget()
            logger.warning(NOT_RECORDED.format(ranks=", ".join(map(str, silent))))
        elif recorder is not None:
            recorder.join(self.net.rank, [_read_recorded(rank, text) for rank, text in enumerate(texts)])
        if trains and not self.net.rank:
            for finding in self.stragglers.note([float(theirs) for _, theirs, _ in every]):
                logger.warning(finding)
        return [theirs for theirs, _, _ in every]

    def _recorded_text(self, recorder: Recorder, run: MiniBatchRun) -> str:
        """What this process recorded of a run, for the others."""
        timeline, program = recorder.runs[-1].timeline, run.compiled.program
        spans = [(str(span.action), span.start, span.end) for span in timeline.spans]
        traffic = Traffic(tuple(map(str, program.routes)), program.micro_batches, tuple(self.net.noted or ()))
        told = traffic.moved(-recorder.began).to_json()
        return json.dumps([_host(), recorder.began, timeline.seconds, spans, told])

    def exchange(self, asked: Asked, told: Tree) -> list[Any]:
        """Tells all processes something between runs; gives what each told, by rank."""
        self.head(Header(asked), lambda told: 0)
        return self.net.agree(told)


def _host() -> str:
    """What the processes of one clock have in common: the boot of their machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


def _read_recorded(rank: int, text: str) -> Told:
    host, began, seconds, spans, traffic = json.loads(text)
    found = tuple(Span(rank, parse_action(action), start, end) for action, start, end in spans)
    return Told(host, began, Timeline(1, found, seconds), Traffic.of_json(traffic))
