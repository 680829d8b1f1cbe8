"""Where processes connect: only who knows the token gets in, and strangers keep nobody waiting."""

import errno
import math
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gpipe.distributed import linking
from gpipe.distributed.failures import Status
from gpipe.distributed.linking import STREAMS, Address, Listener, dial, hello, token_of
from tests.support.endpoints import LIMIT
from tests.support.processes.listening import Listening, family, listening_sockets


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, *, crosses_hosts: bool = False) -> Iterator[Listener]:
    """A process that can be reached; other hosts would reach it by the loopback device."""
    monkeypatch.setattr(linking, "own_host", lambda: "127.0.0.1")
    with linking.listening(crosses_hosts=crosses_hosts) as own:
        yield own


def connect(own: Listener, local: bool = True) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
    connection.connect(f"{own.address.folder}/listener" if local else (own.address.host, own.address.port))
    return connection


def check_connected(ours: socket.socket, theirs: socket.socket) -> None:
    """What one end says comes to the other."""
    with ours, theirs:
        theirs.sendall(b"here")
        assert ours.recv(100) == b"here"


TOKEN = "0123456789abcdef" * 2
STRANGERS: dict[str, bytes] = {
    "says nothing": b"",
    "says little": TOKEN.encode()[:20],
    "knows half": TOKEN.encode(),
    "guesses": hello("0" * 32, 1, "messages"),
    "says much": b"\xff" * 10_000,
}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_do_no_harm_and_are_sent_away(stranger: str, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=not local) as own, ExitStack() as strangers:
        for hangs_up in (True, True, False):
            connection = strangers.enter_context(connect(own, local))
            connection.sendall(STRANGERS[stranger])
            if hangs_up:
                connection.close()
        hellos = [(peer, stream) for peer in (1, 2) for stream in STREAMS]
        dialled = {each: dial(own.address, hello(TOKEN, *each), LIMIT, local=local) for each in hellos}
        found = own.accept(hellos, TOKEN, math.inf, lambda: None)
        assert found.keys() == dialled.keys()
        for each in hellos:
            check_connected(found[each], dialled[each])
        with suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_who_was_given_another_address_of_anybody_knows_another_token() -> None:
    known = [Address("/a", "10.0.0.1", 5000, "17"), Address("/b", "10.0.0.2", 5000, "29")]
    assert len(hello(token_of(known), 12_345, "messages")) == len(hello(token_of(known), 0, "control")) == 48
    others = [
        [known[0]],
        known[::-1],
        [known[0], known[1]._replace(port=5001)],
        [known[0]._replace(nonce="18"), known[1]],
    ]
    assert len({token_of(one) for one in (known, *others)}) == 5


def test_a_hello_may_come_in_pieces_and_control_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch) as own:
        dialled = {(1, stream): connect(own) for stream in reversed(STREAMS)}
        unsaid = {each: list(hello(TOKEN, *each)) for each in dialled}

        def say_a_byte() -> None:
            for each, said in unsaid.items():
                if said:
                    dialled[each].sendall(bytes([said.pop(0)]))

        found = own.accept([(1, stream) for stream in STREAMS], TOKEN, math.inf, say_a_byte)
        for each, theirs in dialled.items():
            check_connected(found[each], theirs)


def test_who_does_not_connect_is_named_also_if_strangers_come_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second whenever a stranger has come."""
    strangers: list[socket.socket] = []
    monkeypatch.setattr("time.monotonic", lambda: float(len(strangers)))
    with listening(monkeypatch) as own, ExitStack() as ends:

        def come() -> None:
            strangers.append(ends.enter_context(connect(own)))

        with pytest.raises(TimeoutError, match=r"Ranks \[1, 2\] did not connect within 5 s"):
            own.accept([(1, "messages"), (2, "control")], TOKEN, 5.0, come)
        assert len(strangers) == 6


def test_only_its_user_can_come_to_the_path_and_others_to_one_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listening_sockets([os.getpid()])  # of tests that were here before
    with listening(monkeypatch) as own:
        folder = Path(own.address.folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert listening_sockets([os.getpid()]) == before  # no port
    assert not folder.exists()
    with listening(monkeypatch, crosses_hosts=True) as own:
        (found,) = (one for one in listening_sockets([os.getpid()]) if one not in before)
        assert (found.address, found.port) == (own.address.host, own.address.port) == ("127.0.0.1", own.address.port)
    assert listening_sockets([os.getpid(), 2**22 + 1]) == before  # a process that is gone listens nowhere


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:7f00:1"])
def test_the_look_for_what_listens_is_right_itself(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        try:
            server.bind((address, 0))
        except OSError as error:
            pytest.skip(f"this machine has no such address: {error}")
        server.listen()
        one = Listening(os.getpid(), address, server.getsockname()[1])
        assert one in listening_sockets(family(os.getpid()))
        assert one.is_loopback == (address not in {"0.0.0.0", "::"})


def test_what_killed_processes_left_is_removed_and_what_lives_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed with -9 while they linked up, processes left folders for ever in the memory of the host."""
    monkeypatch.setattr(linking, "SHARED_MEMORY", str(tmp_path))
    for name, files in {
        "gpipe-7-dead": ("status", "listener"),
        "gpipe-8-early": ("status",),
        "gpipe-9-my": "ab",
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    with listening(monkeypatch) as first, listening(monkeypatch) as second:
        kept = {Path(own.address.folder).name for own in (first, second)} | {"gpipe-9-my"}
        assert {path.name for path in tmp_path.iterdir()} == kept
        with connect(first), connect(second):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["gpipe-9-my"]


def test_where_the_memory_of_the_host_is_full_a_folder_on_disk_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where it could not be written at all that was so; a full one ended GPipe(...) with a bare OSError."""
    monkeypatch.setattr(linking, "SHARED_MEMORY", str(tmp_path))
    create_in = Status.create_in

    def show(folder: str) -> Status:
        if Path(folder).parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create_in(folder)

    monkeypatch.setattr(Status, "create_in", show)
    with listening(monkeypatch) as own:
        connect(own).close()
