"""What crosses between processes, a line for each message and each reduction: for who tunes or models transfers."""

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
    """One message as one of its two ends saw it, or one reduction as one of its ranks did.

    Attributes:
        kind: `"send"`, `"receive"` or `"reduce"`. Of what messages a reduction consists is not listed beside it.
        rank: Who notes it: the number of a process among all of the pipe, replica * K + row.
        peer: The process at the other end; of a reduction, all others.
        step: Which of `recording.timelines`: a `step` is one, a call and its backward are two.
        micro_batch: Which of the replica's; None where it is of the mini-batch.
        what: The route as the table prints it, `"x:0>1"`; `"gradients"` of a reduction; `"shared weights"`,
            `"shards"` (of `fully_shard`: forward of weights, backward of gradients), `"statistics"` (of deferred
            BatchNorm), `"batch norm"` (over replicas), or `"output"` of a call.
        stage: At this end; None where it is none's.
        phase: `"forward"` or `"backward"`.
        bytes: Of the tensors, as they travel; of a reduction, of the gradients that are added up.
        dtypes: Of each tensor; of a reduction, each once.
        shapes: Of each tensor; of a reduction none, since its tensors are laid together.
        asked: When this rank came to it; this and the next two in seconds since the first recorded run began, by one
            clock for all ranks.
        begun: When bytes began to move: when the sender had room, or, if that is later, the receiver asked. Of a
            reduction, when all its ranks had come to it.
        ended: When a sender needed its tensors no more, a receiver had them, or all sums of a reduction were there.
            On GPUs, whose tensors go by NCCL, all three are times of the host, at which it has queued them.

    >>> sent = Message("send", 0, 1, 0, 3, "x:0>1", 0, "forward", 32, ("float32",), ((2, 4),), 0.5, 0.75, 1.0)
    >>> sent.ended - sent.begun  # seconds on its way, as its sender knows it
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
    """All messages and reductions of some runs, run by run in the order in which ranks came to them."""
    found: list[Message] = []
    for step, run in enumerate(runs):
        traffic = [each.moved(-runs[0].when[0]) for each in run.traffic]  # by one clock
        crossed = [(rank, one) for rank, own in enumerate(traffic) for one in own.crossed]
        sent = {(rank, one.peer, one.label): one.begun for rank, one in crossed if one.sends}
        each = [message for rank, own in enumerate(traffic) for message in _of_rank(step, rank, own, sent)]
        found += sorted(each, key=lambda message: (message.asked, message.rank))
    return found


def _of_rank(step: int, rank: int, own: Traffic, sent: Mapping[tuple[int, int, Label], float]) -> Iterator[Message]:
    yield from _reductions(step, rank, own)
    for one in own.crossed:
        named = _named(one, own)
        if named is not None:
            begun = one.begun if one.sends else sent.get((one.peer, rank, one.label), one.asked)
            what, stage, micro_batch = named
            yield Message(
                kind="send" if one.sends else "receive",
                rank=rank,
                peer=one.peer,
                step=step,
                micro_batch=micro_batch,
                what=what,
                stage=stage,
                phase="backward" if one.label.gradient else "forward",
                bytes=sum(tensor.size for tensor in one.tensors),
                dtypes=tuple(tensor.dtype for tensor in one.tensors),
                shapes=tuple(tensor.shape for tensor in one.tensors),
                asked=one.asked,
                begun=min(max(one.asked, begun), one.ended),
                ended=one.ended,
            )


def _named(one: Crossed, own: Traffic) -> tuple[str, int | None, int | None] | None:
    """What a message is, and of which stage and micro-batch; None: words about the run."""
    route, number, gradient = one.label
    if route >= 0:
        ends = parse_route(own.routes[route])
        return own.routes[route], ends.source if one.sends is not gradient else ends.target, number
    match _control(one.label):
        case Control.BATCHNORM:  # one that is used several times counts on
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
    """What a label that has no route is of; those of BatchNorm are numbered downwards."""
    return Control(max(label.route, Control.BATCHNORM))


def _reductions(step: int, rank: int, own: Traffic) -> Iterator[Message]:
    """The messages of each stage's reduction as one: of its first, ranks tell which gradients they have."""
    found = [one for one in own.crossed if one.label.route < 0 and _control(one.label) in REDUCED]
    for stage, of_stage in groupby(found, key=lambda one: one.label.micro_batch // MESSAGES_PER_STAGE):
        parts = list(of_stage)
        first = [one for one in parts if one.label.micro_batch % MESSAGES_PER_STAGE == MESSAGES_PER_STAGE - 1]
        buckets = {one.label.micro_batch: one.tensors[0] for one in parts if one not in first}
        yield Message(
            kind="reduce",
            rank=rank,
            peer=tuple(sorted({one.peer for one in parts})),
            step=step,
            micro_batch=None,
            what="gradients",
            stage=stage,
            phase="backward",
            bytes=sum(bucket.size for bucket in buckets.values()),
            dtypes=tuple(dict.fromkeys(bucket.dtype for bucket in buckets.values())),
            shapes=(),
            asked=min(one.asked for one in parts),
            begun=max(one.ended for one in first),
            ended=max(one.ended for one in parts),
        )


def write_messages(path: Path, messages: Iterable[Message]) -> None:
    """Writes messages as JSON lines, behind one that names the schema."""
    lines = [SCHEMA, *map(asdict, messages)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read_messages(path: str | Path) -> list[Message]:
    """Reads what `recording.save("messages.jsonl")` wrote.

    Raises:
        ValueError: It is another file, or of another version.

    >>> from tempfile import TemporaryDirectory
    >>> sent = Message("send", 0, 1, 0, 3, "x:0>1", 0, "forward", 32, ("float32",), ((2, 4),), 0.5, 0.5, 0.75)
    >>> with TemporaryDirectory() as folder:
    ...     write_messages(Path(folder, "messages.jsonl"), [sent])
    ...     read_messages(Path(folder, "messages.jsonl")) == [sent]
    True
    """
    head, *lines = Path(path).read_text(encoding="utf-8").splitlines() or [""]
    if head != (schema := json.dumps(SCHEMA)):
        raise ValueError(f"{path} does not begin with {schema}; give what recording.save('messages.jsonl') wrote")
    return [Message(**{name: _tuples(value) for name, value in json.loads(line).items()}) for line in lines]


def _tuples(value: Any) -> Any:
    """The tuples that JSON has made lists of."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
