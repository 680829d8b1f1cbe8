"""Where processes connect: only who knows the token gets in, and strangers keep nobody waiting."""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gpipe.distributed import listener as listener_module
from gpipe.distributed.listener import HELLO_BYTES, STREAMS, Listener, dial
from tests.support.processes.listening import listening_sockets

LIMIT = 240.0  # seconds that no sound test needs


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, *, crosses_hosts: bool = False) -> Iterator[Listener]:
    """A process that can be reached; other hosts would reach it by the loopback device."""
    monkeypatch.setattr(listener_module, "own_host", lambda: "127.0.0.1")
    with listener_module.listening(crosses_hosts=crosses_hosts) as own:
        yield own


def connect(own: Listener, local: bool = True) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
    connection.connect(f"{own.address.folder}/listener" if local else (own.address.host, own.address.port))
    return connection


def check_accepted(own: Listener, peers: range, *, local: bool = True) -> None:
    """All peers get in, and are who they say they are."""
    hellos = [(peer, stream) for peer in peers for stream in STREAMS]
    with ThreadPoolExecutor(len(hellos) + 1) as pool, ExitStack() as ends:
        accepted = pool.submit(own.accept, peers, LIMIT, lambda: None)
        dialled = {hello: pool.submit(dial, own.address, *hello, LIMIT, local=local) for hello in hellos}
        found = accepted.result(LIMIT)
        assert found.keys() == set(hellos)
        for hello in hellos:
            theirs, ours = dialled[hello].result(LIMIT), found[hello]
            for end in (theirs, ours):
                ends.enter_context(end)
            theirs.sendall(repr(hello).encode())
            ours.settimeout(LIMIT)
            assert ours.recv(100) == repr(hello).encode()


STRANGERS: dict[str, Callable[[Listener], bytes]] = {
    "says nothing": lambda own: b"",
    "says little": lambda own: own.address.token.encode()[:20],
    "knows half": lambda own: own.address.token.encode(),
    "guesses": lambda own: f"{'0' * 32} 1 messages".ljust(HELLO_BYTES).encode(),
    "says much": lambda own: b"\xff" * 10_000,
}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_do_no_harm_and_are_sent_away(stranger: str, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=not local) as own, ExitStack() as strangers:
        for hangs_up in (True, True, False):
            connection = strangers.enter_context(connect(own, local))
            connection.sendall(STRANGERS[stranger](own))
            if hangs_up:
                connection.close()
        check_accepted(own, range(1, 3), local=local)
        connection.settimeout(LIMIT)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_a_hello_may_come_in_pieces_and_control_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch) as own, ExitStack() as ends:
        ours = {stream: ends.enter_context(connect(own)) for stream in reversed(STREAMS)}

        def speak() -> None:
            for stream, connection in ours.items():
                for byte in f"{own.address.token} 1 {stream}".ljust(HELLO_BYTES).encode():
                    connection.sendall(bytes([byte]))

        speaker = threading.Thread(target=speak)
        speaker.start()
        found = own.accept(range(1, 2), LIMIT, lambda: None)
        speaker.join()
        for (_, stream), end in found.items():
            ends.enter_context(end)
            ours[stream].sendall(stream.encode())
            assert end.recv(100) == stream.encode()


def test_who_does_not_connect_is_named_also_if_strangers_come_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by a second whenever a stranger has come."""
    strangers: list[socket.socket] = []
    monkeypatch.setattr("time.monotonic", lambda: float(len(strangers)))
    with listening(monkeypatch) as own, ExitStack() as ends:

        def come() -> None:
            strangers.append(ends.enter_context(connect(own)))

        with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect within 5 s"):
            own.accept(range(1, 3), 5.0, come)
        assert len(strangers) == 6


def test_only_its_user_can_come_to_the_path_and_it_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch) as own:
        folder = Path(own.address.folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert listening_sockets([os.getpid()]) == []  # no port
    assert not folder.exists()


def test_between_hosts_it_listens_at_one_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, crosses_hosts=True) as own:
        (found,) = listening_sockets([os.getpid()])
        assert (found.address, found.port) == (own.address.host, own.address.port) == ("127.0.0.1", own.address.port)
    assert listening_sockets([os.getpid()]) == []


def test_a_first_host_at_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    refused = pytest.raises(ValueError, match=r"MASTER_ADDR=127\.0\.0\.1 is the loopback address")
    with refused, listener_module.listening(crosses_hosts=True):
        pass
