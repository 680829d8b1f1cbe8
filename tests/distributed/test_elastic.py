"""A replica that is lost does not end the others: the bits are those of a run that had fewer from that step on."""

import errno
import os
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import gpipe
from gpipe.distributed.folder_rendezvous import FolderRendezvous
from tests.support.certificates import REASON as REASON_TLS
from tests.support.certificates import authority
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.said import said
from tests.support.survivors import (
    LIMIT,
    PLACES_OF_A_RETURN,
    PLACES_OF_A_SAVE,
    Fleet,
    assert_undisturbed,
    network,
    undisturbed,
)
from two_hosts.hosts import missing, two_hosts

PLACES = ["forward", "backward", "reduce", "between", "end", "told two"]
STEPS = 6
WHY = missing()
on_two_hosts = pytest.mark.skipif(bool(WHY), reason=WHY)


@pytest.fixture
def fleets() -> Iterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.close()


def started(fleets: list[Fleet], folder: Path, replicas: int, rows: int, steps: int = STEPS, **how: Any) -> Fleet:
    fleet = Fleet(folder, replicas, rows, steps, how)
    fleets.append(fleet)
    for replica in range(replicas):
        fleet.start(replica)
    return fleet


def wait_for(fleet: Fleet, replica: int, row: int, step: int) -> None:
    until = time.monotonic() + 60
    while not any(record.get("ended", -1) >= step for record in fleet.records(replica, row)):
        assert time.monotonic() < until, "no step for a minute"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("rows", "replica", "row", "place"),
    [
        *((2, at % 2, at // 2 % 2, place) for at, place in enumerate(PLACES[:-1])),
        *((3, 1, at % 3, place) for at, place in enumerate(PLACES[:-1])),
        (2, 0, 0, "told two"),
    ],
)
def test_a_kill_anywhere_costs_the_replica_and_no_bit(
    rows: int, replica: int, row: int, place: str, tmp_path: Path, fleets: list[Fleet]
) -> None:
    fleet = started(fleets, tmp_path, 2, rows, die=[replica, row, 3, place])
    assert fleet.end(1 - replica) == [0] * rows
    codes = fleet.end(replica)
    assert codes[row] == -9
    assert codes[:row] + codes[row + 1 :] == [1] * (rows - 1)
    living = assert_undisturbed(fleet, [1 - replica])
    last = 4 if place == "told two" else 3  # in which one survivor had seen step 3 end: it counts
    assert living == [[0, 1]] * last + [[1 - replica]] * (STEPS - last)


@pytest.mark.parametrize(("row", "place"), [(0, "forward"), (1, "backward"), (1, "end")])
def test_ctrl_c_in_a_process_costs_its_replica_alone(
    row: int, place: str, tmp_path: Path, fleets: list[Fleet]
) -> None:
    fleet = started(fleets, tmp_path, 2, 2, die=[1, row, 3, place], signal=signal.SIGINT)
    assert fleet.end(0) == [0, 0]
    assert fleet.end(1) == [1, 1]
    assert assert_undisturbed(fleet, [0]) == [[0, 1]] * 3 + [[0]] * 3


@pytest.mark.parametrize("how", [{"schedule": "1f1b"}, {"deferred": True}])
def test_of_three_replicas_two_go_on(how: dict[str, Any], tmp_path: Path, fleets: list[Fleet]) -> None:
    fleet = started(fleets, tmp_path, 3, 2, die=[1, 0, 2, "backward"], **how)
    assert [fleet.end(0), fleet.end(2)] == [[0, 0]] * 2
    assert fleet.end(1) == [-9, 1]
    if "deferred" in how:  # the loop here knows no statistics over replicas
        one, other = fleet.final(0), fleet.final(2)
        pairs = [(x[0][name], y[0][name]) for x, y in zip(one, other, strict=True) for name in x[0]]
        assert all(torch.equal(a, b) for a, b in pairs)
    else:
        assert assert_undisturbed(fleet, [0, 2]) == [[0, 1, 2]] * 2 + [[0, 2]] * 4


def leaves_for_three_steps(
    replica: int, folder: Path, fleets: list[Fleet], tears: bytes | None = None, **how: Any
) -> None:
    """A replica is lost in step 2 of 9, and is back from step 6 on."""
    back = folder / "back"
    fleet = started(fleets, folder, 2, 2, 9, die=[replica, 1, 2, "forward"], waits={"5": str(back)}, **how)
    wait_for(fleet, 1 - replica, 0, 4)
    fleet.end(replica)
    if tears is not None:
        tear(folder / "meeting", tears)
    fleet.start(replica)
    until = time.monotonic() + 60
    while len([*(folder / "meeting").glob(f"came-3-{replica}-*")]) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    back.touch()
    assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    living = assert_undisturbed(fleet, [0, 1])
    assert living == [[0, 1]] * 2 + [[1 - replica]] * 4 + [[0, 1]] * 3


def tear(meeting: Path, content: bytes) -> None:
    for path in meeting.iterdir():
        path.write_bytes(content)


TORN = [b"", b"\xff\x00garbage", b'{"members": 1}']


@pytest.mark.parametrize("content", TORN)
def test_torn_files_are_written_again_for_a_replica_that_comes_back(
    content: bytes, tmp_path: Path, fleets: list[Fleet]
) -> None:
    leaves_for_three_steps(1, tmp_path, fleets, tears=content)


@pytest.mark.parametrize("content", TORN)
def test_torn_files_do_not_hold_up_a_new_start(content: bytes, tmp_path: Path, fleets: list[Fleet]) -> None:
    """Bug story: after a crash of the host, no replica could read the file of the last epoch, for ever."""
    fleet = started(fleets, tmp_path, 2, 2)
    assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    tear(tmp_path / "meeting", content)
    for replica in (0, 1):
        fleet.start(replica)
    assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    assert_undisturbed(fleet, [0, 1])


def test_a_full_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GPIPE_MEETING", str(tmp_path)), ("GPIPE_REPLICA", "0"), ("GPIPE_REPLICAS", "1")):
        monkeypatch.setenv(name, value)
    tmp_path.chmod(0o700)
    rendezvous = FolderRendezvous(0, 1, "nonce", 5.0, {})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    with pytest.raises(OSError, match="Check the folder and its free space") as raised:
        rendezvous.meet(list)
    assert raised.value.filename == f"{tmp_path}/came-1-0-nonce-0"
    rendezvous._alive.close()  # A process keeps this file open until it ends.


def test_a_replica_comes_back_with_the_state_of_the_others(tmp_path: Path, fleets: list[Fleet]) -> None:
    leaves_for_three_steps(0, tmp_path, fleets)


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("saves", [[1, 7, 8], [4, 7, 8]])
def test_a_replica_comes_back_while_a_checkpoint_of_the_others_is_pending(
    replica: int, saves: list[int], tmp_path: Path, fleets: list[Fleet]
) -> None:
    """Bug story: the others waited for their earlier checkpoint with one that knew of none, and all ended."""
    leaves_for_three_steps(replica, tmp_path, fleets, saves=saves, background=True)
    for step in saves[1:] if replica == 0 else saves:  # of a checkpoint of a lost replica nothing is promised
        assert gpipe.load(tmp_path / "saved" / f"step_{step}").step_number == step


def test_who_is_left_and_who_comes_back_go_by_one_table_that_was_searched(
    tmp_path: Path, fleets: list[Fleet]
) -> None:
    fleet = started(
        fleets, tmp_path, 2, 2, 10**9, seconds=0.002, schedule="auto", memory=4_000, die=[1, 0, 2, "backward"]
    )
    fleet.end(1)
    fleet.start(1)
    wait_for(fleet, 1, 0, 3)
    fleet.stop(10)
    assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    assert_gone_and_back(fleet)
    every = [record for at in product((0, 1), (0, 1), (0, 1)) for record in fleet.records(*at)]
    first, *others = [record["plan"] for record in every if "plan" in record]
    assert first["table"]
    assert all(other == first for other in others)


def assert_gone_and_back(fleet: Fleet) -> None:
    """Replica 1 is in at the beginning and at the end, and not in between; all bits are as undisturbed."""
    living = assert_undisturbed(fleet, [0, 1])
    assert living[0] == living[-1] == [0, 1]
    assert [0] in living


@pytest.mark.parametrize("place", PLACES_OF_A_RETURN)
@pytest.mark.parametrize("row", [0, 1])
def test_a_kill_while_a_replica_joins_holds_up_nobody(
    place: str, row: int, tmp_path: Path, fleets: list[Fleet]
) -> None:
    fleet = started(
        fleets, tmp_path, 2, 2, 10**9, seconds=0.002, die=[1, 0, 2, "forward"], dies_in=[1, row, 1, place]
    )
    fleet.end(1)
    fleet.start(1)
    assert sorted(map(str, fleet.end(1))) == ["-9", "1"]
    fleet.start(1)
    wait_for(fleet, 1, 0, 3)
    fleet.stop(20)
    assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    assert_gone_and_back(fleet)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("replica", "row"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("place", PLACES_OF_A_SAVE)
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
def test_a_kill_while_all_save_leaves_a_whole_checkpoint(
    apart: bool, replica: int, row: int, place: str, background: bool, tmp_path: Path, fleets: list[Fleet]
) -> None:
    """Apart, each process saves its part to its folder, and the parts may come from both replicas."""
    saves = [3, 4] if background else [3]  # a thread's may not be there, which is told; then the next one is
    dies_in = [replica, row, 0, place]
    fleet = started(fleets, tmp_path, 2, 2, saves=saves, background=background, dies_in=dies_in, apart=apart)
    assert fleet.end(1 - replica) == [0, 0]
    living = assert_undisturbed(fleet, [1 - replica])
    assert living[:3] + living[-1:] == [[0, 1]] * 3 + [[1 - replica]]
    pipe = gpipe.GPipe(network(), 2, 3)
    for host in sorted((tmp_path / "saved").glob("host-*")):
        shutil.copytree(host, tmp_path / "saved", dirs_exist_ok=True)
    gpipe.load(tmp_path / "saved", pipe)
    assert pipe.step_number == saves[-1]
    expected = undisturbed(living[: saves[-1]])[1][1 - replica].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pipe.state_dict().items())


def test_replicas_that_all_ended_load_a_checkpoint_before_they_join(tmp_path: Path, fleets: list[Fleet]) -> None:
    """Bug story: the page advised it, and `load` said that `join` had to come first."""
    hold = tmp_path / "hold"
    fleet = started(fleets, tmp_path, 2, 2, saves=[3], background=False, loads=True, waits={"5": str(hold)})
    wait_for(fleet, 0, 0, 4)
    for replica in (0, 1):
        fleet.kill(replica)
        fleet.end(replica)
    hold.touch()
    for replica in (0, 1):
        fleet.start(replica)
    assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    records = [record for at in product((0, 1), (0, 1)) for record in fleet.records(*at)]
    assert [record["loaded"] for record in records if "loaded" in record] == [3] * 4
    # A checkpoint has the statistics of BatchNorm of the first replica, so those of replica 1 differ.
    assert assert_undisturbed(fleet, [0]) == [[0, 1]] * STEPS


def test_a_replica_that_loads_an_old_checkpoint_before_it_joins_has_the_state_of_the_others(
    tmp_path: Path, fleets: list[Fleet]
) -> None:
    leaves_for_three_steps(1, tmp_path, fleets, saves=[1], background=False, loads=True)


def test_nothing_is_saved_before_join(tmp_path: Path, fleets: list[Fleet]) -> None:
    fleet = started(fleets, tmp_path, 1, 2, saves_first=True, background=False)
    assert fleet.end(0) == [1, 1]
    assert "Call pipe.join" in fleet.records(0, 0)[-1]["refused"]
    assert not list((tmp_path / "saved").glob("step_*"))


@pytest.mark.parametrize("row", [0, 1])
def test_a_kill_while_all_evaluate_costs_the_replica(row: int, tmp_path: Path, fleets: list[Fleet]) -> None:
    fleet = started(fleets, tmp_path, 2, 2, evaluates=3, dies_in=[1, row, 0, "evaluates"])
    assert fleet.end(0) == [0, 0]
    assert assert_undisturbed(fleet, [0]) == [[0, 1]] * 3 + [[0]] * 3


@pytest.mark.parametrize("row", [0, 1])
def test_a_kill_while_all_generate_ends_all_with_the_reason(row: int, tmp_path: Path, fleets: list[Fleet]) -> None:
    pytest.importorskip("transformers")
    fleet = started(fleets, tmp_path, 2, 2, generates=[1, row])
    assert fleet.end(0) == [1, 1]
    for at in (0, 1):
        assert "is gone" in fleet.records(0, at)[-1]["refused"]


@on_two_hosts
@pytest.mark.parametrize("row", [0, 1])
def test_replicas_on_two_hosts_go_on_and_come_back(row: int, tmp_path: Path, fleets: list[Fleet]) -> None:
    """By TLS, where openssl makes certificates."""
    files = {} if REASON_TLS else authority().files
    with two_hosts() as hosts:
        fleet = started(fleets, tmp_path, 2, 2, 10**9, seconds=0.002, networks=hosts.networks, tls=files)
        wait_for(fleet, 0, 0, 2)
        fleet.kill(1, row)
        assert sorted(map(str, fleet.end(1))) == ["-9", "1"]
        wait_for(fleet, 0, 0, max(fleet.ended()) + 3)
        fleet.start(1)
        wait_for(fleet, 1, 0, 3)
        fleet.stop(20)
        assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    assert_gone_and_back(fleet)
    for replica in (0, 1):
        (told,) = (record["by TLS"] for record in fleet.records(replica, row) if "by TLS" in record)
        assert told == ([] if REASON_TLS else [2 * (1 - replica), 2 * (1 - replica) + 1])


@on_two_hosts
@pytest.mark.parametrize("blind", [[], [1]], ids=str)
def test_a_cut_wire_leaves_one_replica_which_goes_on(blind: list[int], tmp_path: Path, fleets: list[Fleet]) -> None:
    """Bug story: the connections of one row had not ended yet, and both were taken for living until both gave up."""
    with two_hosts() as hosts:
        fleet = started(fleets, tmp_path, 2, 2, 10**9, seconds=0.002, networks=hosts.networks, tls={}, blind=blind)
        wait_for(fleet, 0, 0, 2)
        hosts.cut()
        codes: dict[int, Any] = {}
        until = time.monotonic() + LIMIT
        while not codes and time.monotonic() < until:
            codes = {replica: found for replica in (0, 1) if None not in (found := fleet.end(replica, 0.1))}
        ((lost, ended),) = codes.items()
        assert ended == [1, 1]
        fleet.start(lost)
        assert fleet.end(lost) == [1, 1]  # it is let in, and cannot be reached
        wait_for(fleet, 1 - lost, 0, max(fleet.ended()) + 3)
        hosts.mend()
        while not any("ended" in record for record in fleet.records(lost, 0)) and time.monotonic() < until:
            fleet.start_ended()
            time.sleep(0.1)
        fleet.stop(20)
        assert [fleet.end(0), fleet.end(1)] == [[0, 0]] * 2
    living = assert_undisturbed(fleet, [0, 1])
    assert living[0] == living[-1] == [0, 1]
    assert [1 - lost] in living


@pytest.mark.parametrize(
    ("what", "told"), [("weights", "weights or buffers"), ("optimizer", "optimizers or other arguments")]
)
def test_replicas_that_begin_otherwise_are_refused(what: str, told: str, tmp_path: Path, fleets: list[Fleet]) -> None:
    fleet = started(fleets, tmp_path, 2, 2, odd=[1, what])
    assert [fleet.end(0), fleet.end(1)] == [[1, 1]] * 2
    for replica in range(2):
        assert f"Replicas 0 and 1 begin with different {told}" in fleet.records(replica, 0)[-1]["refused"]


@pytest.mark.parametrize("what", ["optimizer", "groups", "scheduler", "nested"])
def test_a_replica_that_comes_back_with_other_classes_is_refused_alone(
    what: str, tmp_path: Path, fleets: list[Fleet]
) -> None:
    """Bug story: a RAdam received the state of an AdamW, and all losses were wrong from then on."""
    fleet = started(fleets, tmp_path, 2, 2, 10**9, seconds=0.002, die=[1, 0, 2, "forward"], returns_with=what)
    fleet.end(1)
    fleet.start(1)
    assert fleet.end(1) == [1, 1]
    told = [fleet.records(1, row, 1)[-1]["refused"] for row in (0, 1)]
    assert any("different classes of optimizers or other join() arguments" in text for text in told)
    fleet.stop(3)
    assert fleet.end(0) == [0, 0]
    living = assert_undisturbed(fleet, [0])
    assert living[:2] + living[-1:] == [[0, 1], [0, 1], [0]]


def test_two_that_die_at_once_leave_the_third(tmp_path: Path, fleets: list[Fleet]) -> None:
    fleet = started(fleets, tmp_path, 3, 2, 40, seconds=0.005)
    wait_for(fleet, 2, 0, 3)
    fleet.kill(0, 1)
    fleet.kill(1, 0)
    assert fleet.end(2) == [0, 0]
    living = assert_undisturbed(fleet, [2])
    assert living[0] == [0, 1, 2]
    assert living[-1] == [2]


def test_the_last_replica_ends_with_its_process(tmp_path: Path, fleets: list[Fleet]) -> None:
    fleet = started(fleets, tmp_path, 2, 2, 10_000)
    wait_for(fleet, 0, 0, 1)
    fleet.kill(0)
    fleet.end(0)
    fleet.kill(1, 0)
    assert fleet.end(1, 30) == [-9, 1]


def test_who_comes_back_when_the_others_are_through_is_told_so(tmp_path: Path, fleets: list[Fleet]) -> None:
    """It was told to wait for others that let in between steps."""
    fleet = started(fleets, tmp_path, 2, 2, die=[1, 0, 2, "forward"])
    assert [fleet.end(0), fleet.end(1)] == [[0, 0], [-9, 1]]
    fleet.how["timeout"] = 5
    fleet.start(1)
    assert fleet.end(1, 60) == [1, 1]
    (told,) = (record["refused"] for record in fleet.records(1, 0, 1) if "refused" in record)
    assert (
        f"Timeout: replica 1 waits in {tmp_path}/meeting, for up to 5 s, for these replicas to start: [0]. All"
        in told
    )


@pytest.mark.parametrize("exits", ["without an error", "with an error"])
def test_a_replica_that_torchrun_starts_when_the_others_are_through_ends_well(
    exits: str, tmp_path: Path, fleets: list[Fleet]
) -> None:
    """Bug story: it waited for the timeout and was started again, a hundred times."""
    fleet = started(fleets, tmp_path, 2, 2, die=[1, 0, 2, "forward"], exits=exits)
    assert [fleet.end(0), fleet.end(1)] == [[0, 0], [-9, 1]]
    fleet.how["timeout"] = 5
    fleet.start(1)
    assert fleet.end(1, 60) == ([0, 0] if exits == "without an error" else [1, 1])


WRONG: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {"GPIPE_REPLICAS": ""}, "GPIPE_REPLICAS=''"),
    ({}, {"GPIPE_REPLICA": "2"}, "GPIPE_REPLICA='2'"),
    ({"batch_norm": "synchronized"}, {}, "survive=True does not support batch_norm='synchronized'"),
    ({"sample": [[1.0] * 4] * 4}, {}, "measured costs differ per replica"),
    ({"seed": None}, {}, "survive=True requires a seed"),
    ({}, {"GPIPE_MEETING": "open"}, "accessible by other users"),
    ({}, {"GPIPE_MEETING": "file"}, "is not a folder and cannot be created"),
]


def alone(rank: int, world: int, folder: str, settings: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """A pipe of one process, and what it says when it is used before `join`, or in ways that cannot be done again."""
    Path(f"{folder}/open").mkdir(0o755)
    Path(f"{folder}/file").touch()
    given = {"GPIPE_MEETING": "meeting", "GPIPE_REPLICA": "0", "GPIPE_REPLICAS": "1", **variables}
    os.environ |= {**given, "GPIPE_MEETING": f"{folder}/{given['GPIPE_MEETING']}"}
    made: list[gpipe.GPipe] = []

    def make() -> None:
        given: Any = {"driver": gpipe.Processes(survive=True), "seed": 1, **settings}
        if "sample" in settings:
            given["sample"] = torch.tensor(settings["sample"])
        made.append(gpipe.GPipe([nn.Linear(4, 4)], 1, 2, **given))

    told = [said(make)]
    if made:
        (pipe,), x = made, torch.ones(4, 4)
        told += [said(lambda: pipe.step(x, x, nn.functional.mse_loss)), said(pipe.join)]
        told += [said(lambda: pipe(x, gather=True))]
        pipe.step(x, x, nn.functional.mse_loss)
        with torch.no_grad():
            pipe(x, gather=True)
    return told


@pytest.mark.parametrize(("settings", "variables", "text"), WRONG)
def test_what_cannot_survive_is_refused_with_the_reason(
    settings: dict[str, Any], variables: dict[str, str], text: str, tmp_path: Path, pool: WorkerPool
) -> None:
    ((told,),) = answers(pool.run(alone, str(tmp_path), settings, variables, world=1))
    assert text in told


def test_a_pipe_is_joined_before_it_steps_and_calls_have_no_backward(tmp_path: Path, pool: WorkerPool) -> None:
    (told,) = answers(pool.run(alone, str(tmp_path), {}, {}, world=1))
    made, step, joined, call = told
    assert not (made + joined).startswith(("Value", "Type")), told
    assert "[join-first]" in step
    assert "[survive-needs-step]" in call
