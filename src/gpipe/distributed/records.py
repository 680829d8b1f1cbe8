"""Timelines of all processes, put together: each sends what it recorded of a run."""

import json
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpipe.distributed.endpoint import Endpoint
from gpipe.runtime.recorder import Recorder, RemoteRecord
from gpipe.runtime.run import Run
from gpipe.schedule.action import parse_action
from gpipe.schedule.timeline import Span, Timeline
from gpipe.stages.messages import Traffic

logger = logging.getLogger("gpipe")
NOT_RECORDED = (
    "this step is not in the recording, since rank {ranks} does not record: gpipe.record(pipe) in every process"
)


def recorded_text(recorder: Recorder, run: Run, net: Endpoint) -> str:
    """What this process recorded of a run, for the others."""
    timeline, program = recorder.runs[-1].timeline, run.compiled.program
    spans = [(str(span.action), span.start, span.end) for span in timeline.spans]
    traffic = Traffic(tuple(map(str, program.routes)), program.micro_batches, tuple(net.noted or ()))
    moved = traffic.moved(-recorder.began).to_json()
    return json.dumps([_host(), recorder.began, timeline.seconds, spans, moved])


def join_records(recorder: Recorder, rank: int, texts: Sequence[str | None]) -> None:
    """Makes one timeline of those of all processes, if all of them record."""
    silent = [remote for remote, text in enumerate(texts) if text is None]
    if silent:
        recorder.forget()
        logger.warning(NOT_RECORDED.format(ranks=", ".join(map(str, silent))))
    else:
        recorder.join(rank, [_read_record(remote, text) for remote, text in enumerate(texts) if text is not None])


def _host() -> str:
    """What the processes of one clock have in common: the boot of their machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


def _read_record(rank: int, text: str) -> RemoteRecord:
    host, began, seconds, spans, traffic = json.loads(text)
    actions = tuple(Span(rank, parse_action(action), start, end) for action, start, end in spans)
    return RemoteRecord(host, began, Timeline(1, actions, seconds), Traffic.of_json(traffic))
