"""What crosses between processes: what the program predicts, no more and no less, at both ends."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.batch.microbatch import rows_of_parts
from gpipe.features.recorder import RecordedRun, Recorder, RemoteRecord
from gpipe.profiling.messages import Message, messages_of, read_messages, write_messages
from gpipe.schedule.action import Kind, parse_action
from gpipe.schedule.timeline import Span, Timeline
from gpipe.stages.messages import Control, Label
from gpipe.stages.traffic import Crossed, Payload, Traffic
from tests.support.jobs import crossing as jobs
from tests.support.jobs import process_groups
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

FLOAT = 4  # bytes
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)]


def recorded(
    pool: WorkerPool, folder: Path, ranks: int, schedule: str, rows: Sequence[int], **how: Any
) -> list[Message]:
    """What a file says of some steps, which is what the program predicts."""
    per_rank, file = dict(SCHEDULES)[schedule], str(folder / "messages.jsonl")
    given = ([1] * ranks * per_rank, schedule, list(rows), file)
    world = ranks * len(rows)
    if how.get("grouped"):
        found = answers(pool.run(process_groups.over_wires, True, "crossing", "train", *given, world=world))
    else:
        found = answers(pool.run(how.get("job", jobs.train), *given, world=world))
    messages = read_messages(file)
    assert {one["messages"] for one in found} == {len(messages)}  # every rank has those of all
    check_times(messages, one_clock=how.get("job") is not jobs.train_remotely)
    check_transfers(messages, found[0], ranks, rows)
    check_reductions(messages, found, ranks, len(rows))
    return messages


def check_times(messages: Sequence[Message], *, one_clock: bool = True) -> None:
    """Steps do not overlap, by the clock that all have; several are laid side by side anew in each step."""
    assert all(one.asked <= one.begun <= one.ended for one in messages)
    if one_clock:
        ended = max(one.ended for one in messages if one.step == 0)
        assert min(one.asked for one in messages if one.step == 1) >= ended


def check_transfers(messages: Sequence[Message], expected: dict[str, Any], ranks: int, rows: Sequence[int]) -> None:
    """Each transfer of the program once in each step and replica, with the bytes of its boundary tensor."""
    wanted: Counter[tuple[object, ...]] = Counter()
    for replica, of_replica in enumerate(rows):
        each = rows_of_parts(of_replica, jobs.MICRO_BATCHES)
        for rank, row in enumerate(expected["transfers"]):
            for action in map(parse_action, row):
                assert action.route is not None
                assert action.micro_batch is not None
                sends = action.kind is Kind.SEND
                other = expected["placement"][action.peer.stage]
                shape = each[action.micro_batch], jobs.WIDTHS[action.route.source + 1]
                key = (
                    "send" if sends else "receive",
                    replica * ranks + rank,
                    replica * ranks + other,
                    action.stage,
                    action.micro_batch,
                    str(action.route),
                    "backward" if action.carries_gradient else "forward",
                    (shape,),
                    prod(shape) * FLOAT,
                    ("float32",),
                )
                wanted.update((step, *key) for step in range(jobs.STEPS))
    found = Counter(
        (m.step, m.kind, m.rank, m.peer, m.stage, m.micro_batch, m.what, m.phase, m.shapes, m.bytes, m.dtypes)
        for m in messages
        if m.kind != "reduce"
    )
    assert found == wanted
    sent, received = (sum(m.bytes for m in messages if m.kind == kind) for kind in ("send", "receive"))
    assert sent == received


def check_reductions(messages: Sequence[Message], found: Sequence[Any], ranks: int, replicas: int) -> None:
    """One of each stage in each step, on each rank, of the bytes of its gradients."""
    reductions = [message for message in messages if message.kind == "reduce"]
    wanted = len(found[0]["placement"]) * replicas if replicas > 1 else 0
    assert Counter(message.step for message in reductions) == ({0: wanted, 1: wanted} if wanted else {})
    for rank, one in enumerate(found if wanted else ()):
        own = [message for message in reductions if (message.rank, message.step) == (rank, 0)]
        assert sum(message.bytes for message in own) == one["gradients"]
        others = {rank % ranks + replica * ranks for replica in range(replicas)} - {rank}
        assert {message.peer for message in own} == {tuple(sorted(others))}
        assert {(message.dtypes, message.what, message.micro_batch) for message in own} == {
            (("float32",), "gradients", None)
        }


# Laws.


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", dict(SCHEDULES))
def test_what_crosses_is_what_the_program_predicts(
    schedule: str, ranks: int, pool: WorkerPool, tmp_path: Path
) -> None:
    messages = recorded(pool, tmp_path, ranks, schedule, [12])
    check_pairs(messages)


def check_pairs(messages: Sequence[Message]) -> None:
    """By the one clock of a host, what is received was sent before."""
    sent = {(m.step, m.rank, m.peer, m.micro_batch, m.what, m.phase): m for m in messages if m.kind == "send"}
    for m in messages:
        if m.kind == "receive":
            send = sent[m.step, m.peer, m.rank, m.micro_batch, m.what, m.phase]  # type: ignore[index]  # one peer
            assert send.begun <= m.ended
            assert m.begun == max(m.asked, send.begun)


@pytest.mark.parametrize(
    ("ranks", "schedule", "rows", "how"),
    [
        (1, "gpipe", [12, 8], {}),
        (2, "gpipe", [12, 8], {}),
        (2, "1f1b", [11], {}),  # uneven micro-batches
        (2, "interleaved", [11, 8], {"job": jobs.train_remotely}),
        (2, "gpipe", [11, 8], {"grouped": True}),
    ],
)
def test_so_it_is_with_replicas_hosts_and_process_groups(
    ranks: int, schedule: str, rows: list[int], how: dict[str, Any], pool: WorkerPool, tmp_path: Path
) -> None:
    recorded(pool, tmp_path, ranks, schedule, rows, **how)


words = st.sampled_from(["x:0>1", "output", "gradients"])
counts, seconds = st.integers(0, 2**40), st.floats(0, 1e6)
messages = st.builds(
    Message,
    kind=st.sampled_from(["send", "receive", "reduce"]),
    rank=counts,
    peer=st.one_of(counts, st.lists(counts, max_size=3).map(tuple)),
    step=counts,
    micro_batch=st.none() | counts,
    what=words,
    stage=st.none() | counts,
    phase=st.sampled_from(["forward", "backward"]),
    bytes=counts,
    dtypes=st.lists(st.just("float32"), max_size=2).map(tuple),
    shapes=st.lists(st.lists(counts, max_size=3).map(tuple), max_size=2).map(tuple),
    asked=seconds,
    begun=seconds,
    ended=seconds,
)


@given(st.lists(messages, max_size=4))
def test_a_file_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, some: list[Message]) -> None:
    path = tmp_path_factory.getbasetemp() / "some.jsonl"
    write_messages(path, some)
    assert read_messages(path) == some


# Examples, on paper.

PAYLOAD = (Payload("float32", (2, 4), 32),)
VALUE, GRADIENT = Label(0, 0, gradient=False), Label(0, 0, gradient=True)


def crossed(sends: bool, peer: int, label: Label, asked: float, begun: float, ended: float) -> Crossed:
    return Crossed(sends, peer, label, PAYLOAD, asked, begun, ended)


def run_of(*each: Sequence[Crossed], began: float = 0.0) -> RecordedRun:
    routes = ("x:0>1",)
    return RecordedRun(
        Timeline(len(each), (), 9.0), (began, began + 9.0), tuple(Traffic(routes, 4, tuple(e)) for e in each)
    )


@pytest.mark.parametrize(
    ("asked", "ended", "begun"),
    [
        (1.0, 4.0, 2.5),  # waited for what was sent later
        (3.0, 4.0, 3.0),  # had been sent before
        (1.0, 2.0, 2.0),  # clocks of two hosts are not quite aligned
    ],
)
def test_a_receive_begins_when_it_was_sent_and_asked_for(asked: float, ended: float, begun: float) -> None:
    run = run_of([crossed(True, 1, VALUE, 2.0, 2.5, 2.75)], [crossed(False, 0, VALUE, asked, asked, ended)])
    (received,) = [message for message in messages_of([run]) if message.kind == "receive"]
    assert (received.asked, received.begun, received.ended) == (asked, begun, ended)
    assert (received.rank, received.stage, received.what, received.phase) == (1, 1, "x:0>1", "forward")


def test_clocks_of_hosts_are_laid_side_by_side() -> None:
    """Two hosts, whose clocks are a hundred seconds apart, as forward and backward between them say."""

    def record(host: str, began: float, spans: dict[str, tuple[float, float]], *own: Crossed) -> RemoteRecord:
        done = tuple(Span(0, parse_action(action), *when) for action, when in spans.items())
        return RemoteRecord(host, began, Timeline(1, done, 5.0), Traffic(("x:0>1",), 4, own))

    recorder = Recorder(1)
    recorder.ended = RecordedRun(Timeline(1, (), 5.0), (10.0, 15.0))
    first, last = {"0F0": (0.0, 1.0), "0B0": (4.0, 5.0)}, {"1F0": (2.0, 2.5), "1B0": (2.5, 3.0)}
    sent, received = crossed(True, 1, VALUE, 0.5, 0.5, 0.75), crossed(False, 0, VALUE, 0.25, 0.25, 1.0)
    recorder.join(0, [record("one", 10.0, first, sent), record("other", 110.0, last, received)])
    recorder.runs.append(recorder.ended)
    assert [(m.kind, m.asked, m.begun, m.ended) for m in messages_of(recorder.runs)] == [
        ("receive", 0.25, 0.5, 1.0),
        ("send", 0.5, 0.5, 0.75),
    ]


def test_times_are_since_the_first_run_began() -> None:
    sent = crossed(True, 1, GRADIENT, 120.5, 120.5, 121.0)
    runs = [run_of([], [], began=100.0), run_of([], [sent._replace(peer=0)], began=120.0)]
    (message,) = messages_of(runs)
    assert (message.step, message.asked, message.ended) == (1, 20.5, 21.0)
    assert (message.stage, message.phase) == (1, "backward")


def test_words_about_the_run_are_left_out() -> None:
    words = Control.AGREEMENT, Control.HEADER, Control.WEIGHT, Control.MICRO_BATCHES, Control.REDUCTION
    own = [crossed(True, 1, Label(control, 0, gradient=False), 0.0, 0.0, 1.0) for control in words]
    assert messages_of([run_of(own, [])]) == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for text in ("", "{}\n", '{"schema": "gpipe.messages", "version": 2}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"does not start with .*recording.save\('messages.jsonl'\)"):
            read_messages(path)


# Examples, over processes.


def of(expected: Sequence[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    return [message for message in expected if wanted.items() <= message.items()]


def test_shared_weights_and_the_output_of_a_call_cross_too(pool: WorkerPool) -> None:
    expected, *_ = answers(pool.run(jobs.train_tied, world=4))
    weight = 6 * 6 * FLOAT
    shared = of(expected, what="shared weights", step=0)
    assert Counter(message["kind"] for message in shared) == {"send": 4, "receive": 4}
    assert {(message["bytes"], message["phase"]) for message in shared} == {(weight, "backward")}
    outputs = of(expected, what="output", step=1)
    assert {(m["kind"], m["rank"], m["peer"], m["micro_batch"]) for m in outputs} == {
        (kind, *ranks, m)
        for m in range(2)
        for kind, pairs in {"send": [(1, 0), (3, 2)], "receive": [(0, 1), (2, 3)]}.items()
        for ranks in pairs
    }
    assert {message["phase"] for message in of(expected, what="x:0>1", step=1)} == {"forward"}
    assert {message["phase"] for message in of(expected, what="x:0>1", step=2)} == {"backward"}
    assert {message["step"] for message in of(expected, kind="reduce")} == {0, 2}


def test_statistics_of_batchnorm_cross_between_replicas(pool: WorkerPool) -> None:
    synced, *_ = answers(pool.run(jobs.train_synced, world=4))
    norms = of(synced, what="batch norm", kind="send", step=0)
    assert Counter((m["rank"], m["micro_batch"], m["phase"]) for m in norms) == Counter(
        (rank, m, phase) for rank in range(4) for m in range(2) for phase in ("forward", "backward")
    )
    deferred, *_ = answers(pool.run(jobs.train_deferred, world=4))
    found = {(m["rank"], m["peer"], m["stage"]) for m in of(deferred, what="statistics", kind="send", step=0)}
    assert found == {(0, 2, 0), (2, 0, 0), (1, 3, 1), (3, 1, 1)}


def test_nothing_is_noted_unless_it_is_recorded(pool: WorkerPool) -> None:
    assert answers(pool.run(jobs.note_unrecorded, world=2)) == [[False, True]] * 2


def test_the_page_says_what_the_fields_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "data-formats.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 5]
    assert listed == [field.name for field in fields(Message)]
