"""Where processes link up: only who knows the number gets in, and strangers keep nobody waiting."""

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gpipe.distributed import rendezvous
from gpipe.distributed.rendezvous import HELLO, _call, _Listening
from tests.support.processes.listening import listening_sockets

SILENCE = 60.0
LIMIT = 60.0
Stranger = Callable[[socket.socket, _Listening], None]


def nobody_fails() -> None:
    pass


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, *, crosses_hosts: bool) -> Iterator[_Listening]:
    """A process that can be reached; other hosts would reach it by the loopback device."""
    monkeypatch.setattr(rendezvous, "_own_address", lambda: "127.0.0.1")
    with _Listening(crosses_hosts=crosses_hosts) as own:
        yield own


def check_linked(own: _Listening, peers: range, *, local: bool) -> None:
    """All peers get in, and are who they say they are."""
    with ThreadPoolExecutor(len(peers) + 1) as pool, ExitStack() as ends:
        welcome = pool.submit(own.welcome, peers, SILENCE, LIMIT, nobody_fails)
        calls = {peer: pool.submit(_call, own.door, peer, SILENCE, local=local) for peer in peers}
        found = welcome.result(LIMIT)
        assert sorted(found) == list(peers)
        for peer, call in calls.items():
            for number, (theirs, ours) in enumerate(zip(call.result(LIMIT), found[peer], strict=True)):
                ends.enter_context(theirs)
                ends.enter_context(ours)
                theirs.sendall(b"%d %d" % (peer, number))
                ours.settimeout(LIMIT)
                assert ours.recv(100) == b"%d %d" % (peer, number)


def says_nothing(connection: socket.socket, own: _Listening) -> None:
    pass


def hangs_up(connection: socket.socket, own: _Listening) -> None:
    connection.close()


def says_little(connection: socket.socket, own: _Listening) -> None:
    connection.sendall(own.door.token.encode()[:20])


def knows_half(connection: socket.socket, own: _Listening) -> None:
    connection.sendall(own.door.token.encode())
    connection.close()


def guesses(connection: socket.socket, own: _Listening) -> None:
    connection.sendall(f"{'0' * 32} 1 messages".ljust(HELLO).encode())


def says_much(connection: socket.socket, own: _Listening) -> None:
    connection.sendall(b"\xff" * 10_000)


STRANGERS: list[Stranger] = [says_nothing, hangs_up, says_little, knows_half, guesses, says_much]


@pytest.mark.parametrize("local", [True, False])
def test_peers_find_each_other(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=not local) as own:
        check_linked(own, range(1, 6), local=local)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_do_no_harm(stranger: Stranger, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=not local) as own, ExitStack() as strangers:
        for _ in range(3):
            connection = strangers.enter_context(socket.socket(socket.AF_UNIX if local else socket.AF_INET))
            connection.connect(own.door.path if local else (own.door.address, own.door.port))
            stranger(connection, own)
        check_linked(own, range(1, 3), local=local)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_sent_away(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=False) as own, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(own.door.path)
        stranger(connection, own)
        check_linked(own, range(1, 2), local=True)
        if connection.fileno() >= 0:
            connection.settimeout(LIMIT)
            with suppress(ConnectionError):
                assert connection.recv(1) == b""


def test_a_greeting_may_come_in_pieces_and_the_news_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=False) as own, ExitStack() as ends:
        ours = {}
        for which in ("news", "messages"):
            ours[which] = ends.enter_context(socket.socket(socket.AF_UNIX))
            ours[which].connect(own.door.path)

        def speak() -> None:
            for which, connection in ours.items():
                for byte in f"{own.door.token} 1 {which}".ljust(HELLO).encode():
                    connection.sendall(bytes([byte]))

        speaker = threading.Thread(target=speak)
        speaker.start()
        stream, news = (ends.enter_context(end) for end in own.welcome(range(1, 2), SILENCE, LIMIT, nobody_fails)[1])
        speaker.join()
        for end, which in ((stream, "messages"), (news, "news")):
            ours[which].sendall(which.encode())
            assert end.recv(100) == which.encode()


def test_who_does_not_come_is_named_also_if_strangers_come_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=False) as own:
        ended = threading.Event()

        def knock() -> None:
            while not ended.wait(0.05):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(own.door.path)

        stranger = threading.Thread(target=knock)
        stranger.start()
        try:
            with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect within 0\.5 s"):
                own.welcome(range(1, 3), SILENCE, 0.5, nobody_fails)
        finally:
            ended.set()
            stranger.join()


def test_only_its_user_can_come_to_the_door_and_it_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=False) as own:
        folder = Path(own.door.path).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert listening_sockets([os.getpid()]) == []  # no port
    assert not folder.exists()


def test_between_hosts_it_listens_at_one_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=True) as own:
        (found,) = listening_sockets([os.getpid()])
        assert (found.address, found.port) == (own.door.address, own.door.port) == ("127.0.0.1", own.door.port)
    assert listening_sockets([os.getpid()]) == []


def test_a_first_host_at_loopback_is_refused_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match=r"MASTER_ADDR=127\.0\.0\.1 is the loopback address"):
        _Listening(crosses_hosts=True)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_for_temporary_files_may_have_a_long_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with listening(monkeypatch, crosses_hosts=False) as own:
        check_linked(own, range(1, 2), local=True)
