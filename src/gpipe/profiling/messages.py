"""Lists the messages and gradient reductions between processes, to analyze or model transfers."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from gpipe.distributed.reduce import MESSAGES_PER_STAGE
from gpipe.features.recorder import RecordedRun
from gpipe.schedule.action import parse_route
from gpipe.stages.messages import Control, Label
from gpipe.stages.traffic import Crossed, Traffic

SCHEMA = {"schema": "gpipe.messages", "version": 1}  # the first line of a file
REDUCED = {Control.GRADIENTS, Control.SUMMED_GRADIENTS}


@dataclass(frozen=True, slots=True)
class Message:
    """A record of one message by its sender or its receiver, or of one gradient reduction by one rank.

    Times are in seconds since the first recorded run began, on one clock for all ranks. If NCCL sends tensors between
    GPUs, these are the times at which the host queued the transfer.

    Attributes:
        kind: `"send"`, `"receive"` or `"reduce"`. The messages inside a reduction are not listed separately.
        rank: The process that made the record: replica * K + pipeline rank.
        peer: The process at the other end. For a reduction, all other processes.
        step: The index in `recording.timelines`. A `step` is one timeline; a call and its backward pass are two.
        micro_batch: The micro-batch of the replica. None if the message belongs to the whole mini-batch.
        what: The content:

            - a route as in the program, such as `"x:0>1"`
            - `"gradients"`: a reduction
            - `"shared weights"`: gradients of shared weights
            - `"shards"`: layers under `fully_shard` (forward: weights, backward: gradients)
            - `"statistics"`: running statistics of deferred BatchNorm
            - `"batch norm"`: synchronized BatchNorm
            - `"output"`: the output of a call
        stage: The stage on this rank that sends or receives the message. None if no single stage does.
        phase: `"forward"` or `"backward"`.
        bytes: The size of the tensors as they are sent. For a reduction, the size of the summed gradients.
        dtypes: The dtype of each tensor. For a reduction, the different dtypes.
        shapes: The shape of each tensor. Empty for a reduction, which concatenates tensors.
        asked: The time at which this rank started to send, receive or reduce.
        begun: The time at which bytes began to move, because the sender had room and the receiver was ready. For a
            reduction, the time at which all ranks had started the reduction.
        ended: The time at which the sender no longer needed its tensors, the receiver had received all tensors, or
            all sums were available.

    >>> sent = Message("send", 0, 1, 0, 3, "x:0>1", 0, "forward", 32, ("float32",), ((2, 4),), 0.5, 0.75, 1.0)
    >>> sent.ended - sent.begun  # seconds of the transfer, as the sender measured it
    0.25
    """

    kind: str
    rank: int
    peer: int | tuple[int, ...]
    step: int
    micro_batch: int | None
    what: str
    stage: int | None
    phase: str
    bytes: int
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    asked: float
    begun: float
    ended: float


def messages_of(runs: Sequence[RecordedRun]) -> list[Message]:
    """Returns all messages and reductions of runs, ordered by run and start time."""
    messages: list[Message] = []
    for step, run in enumerate(runs):
        traffic = [each.moved(-runs[0].when[0]) for each in run.traffic]  # on one clock
        crossed = [(rank, entry) for rank, own in enumerate(traffic) for entry in own.crossed]
        sent = {(rank, entry.peer, entry.label): entry.begun for rank, entry in crossed if entry.sends}
        of_run = [message for rank, own in enumerate(traffic) for message in _of_rank(step, rank, own, sent)]
        messages += sorted(of_run, key=lambda message: (message.asked, message.rank))
    return messages


def _of_rank(step: int, rank: int, own: Traffic, sent: Mapping[tuple[int, int, Label], float]) -> Iterator[Message]:
    yield from _reductions(step, rank, own)
    for entry in own.crossed:
        named = _named(entry, own)
        if named is not None:
            begun = entry.begun if entry.sends else sent.get((entry.peer, rank, entry.label), entry.asked)
            what, stage, micro_batch = named
            yield Message(
                kind="send" if entry.sends else "receive",
                rank=rank,
                peer=entry.peer,
                step=step,
                micro_batch=micro_batch,
                what=what,
                stage=stage,
                phase="backward" if entry.label.gradient else "forward",
                bytes=sum(tensor.size for tensor in entry.tensors),
                dtypes=tuple(tensor.dtype for tensor in entry.tensors),
                shapes=tuple(tensor.shape for tensor in entry.tensors),
                asked=entry.asked,
                begun=min(max(entry.asked, begun), entry.ended),
                ended=entry.ended,
            )


def _named(entry: Crossed, own: Traffic) -> tuple[str, int | None, int | None] | None:
    """Returns the content, stage and micro-batch of a message, or None for a control message."""
    route, number, gradient = entry.label
    if route >= 0:
        ends = parse_route(own.routes[route])
        return own.routes[route], ends.source if entry.sends is not gradient else ends.target, number
    match _control(entry.label):
        case Control.BATCHNORM:  # The number continues to increase if a layer is used several times.
            return "batch norm", None, number % own.micro_batches
        case Control.DEFERRED_STATISTICS:
            return "statistics", number, None
        case Control.OUTPUT:
            return "output", None, number
        case Control.SHARDS:
            return "shards", None, None
        case Control.TIED_GRADIENTS:
            return "shared weights", None, None
        case _:
            return None


def _control(label: Label) -> Control:
    """Returns the kind of a message without a route. BatchNorm modules use several labels, numbered downwards."""
    return Control(max(label.route, Control.BATCHNORM))


def _reductions(step: int, rank: int, own: Traffic) -> Iterator[Message]:
    """Yields one reduction per stage, which combines all messages of that reduction.

    In the first message, ranks exchange which gradients they have.
    """
    entries = [entry for entry in own.crossed if entry.label.route < 0 and _control(entry.label) in REDUCED]
    for stage, of_stage in groupby(entries, key=lambda entry: entry.label.micro_batch // MESSAGES_PER_STAGE):
        parts = list(of_stage)
        first = [entry for entry in parts if entry.label.micro_batch % MESSAGES_PER_STAGE == MESSAGES_PER_STAGE - 1]
        buckets = {entry.label.micro_batch: entry.tensors[0] for entry in parts if entry not in first}
        yield Message(
            kind="reduce",
            rank=rank,
            peer=tuple(sorted({entry.peer for entry in parts})),
            step=step,
            micro_batch=None,
            what="gradients",
            stage=stage,
            phase="backward",
            bytes=sum(bucket.size for bucket in buckets.values()),
            dtypes=tuple(dict.fromkeys(bucket.dtype for bucket in buckets.values())),
            shapes=(),
            asked=min(entry.asked for entry in parts),
            begun=max(entry.ended for entry in first),
            ended=max(entry.ended for entry in parts),
        )


def write_messages(path: Path, messages: Iterable[Message]) -> None:
    """Writes a file of JSON lines: first a line with the schema, then one line per message."""
    lines = [SCHEMA, *map(asdict, messages)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read_messages(path: str | Path) -> list[Message]:
    """Reads a file that `recording.save("messages.jsonl")` wrote.

    Args:
        path: The path of the file.

    Returns:
        The messages, in the order of the file.

    Raises:
        ValueError: If the format or version of the file is different.

    >>> from tempfile import TemporaryDirectory
    >>> sent = Message("send", 0, 1, 0, 3, "x:0>1", 0, "forward", 32, ("float32",), ((2, 4),), 0.5, 0.5, 0.75)
    >>> with TemporaryDirectory() as folder:
    ...     write_messages(Path(folder, "messages.jsonl"), [sent])
    ...     read_messages(Path(folder, "messages.jsonl")) == [sent]
    True
    """
    head, *lines = Path(path).read_text(encoding="utf-8").splitlines() or [""]
    if head != (schema := json.dumps(SCHEMA)):
        raise ValueError(
            f"{path} does not start with {schema}. Pass a file that recording.save('messages.jsonl') wrote."
        )
    return [Message(**{name: _tuples(value) for name, value in json.loads(line).items()}) for line in lines]


def _tuples(value: Any) -> Any:
    """Converts lists to tuples. JSON stores tuples as lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
