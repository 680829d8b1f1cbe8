"""TLS between hosts: who shows no certificate of the authority is no rank, and what is altered is never a number."""

import math
import random
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe.cli.doctor import CHECKS
from gpipe.distributed import linking
from gpipe.distributed.codec import CorruptMessage, PeerClosed, encode
from gpipe.distributed.connection import TcpConnection
from gpipe.distributed.linking import STREAMS_WITH_TLS, Listener, dial, hello
from gpipe.distributed.tls import CA, CERT, KEY, VARIABLES, identity
from gpipe.errors import RemoteError
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label
from tests.support.certificates import REASON, authority, encrypted, identity_of, known, set_files
from tests.support.endpoints import LIMIT, TlsConnection, endpoints, label_of, receive, send, together
from tests.support.jobs import apart as jobs
from tests.support.processes.digests import digests, wrong
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.progress import wait_until
from tests.support.same_bits_stories import STORIES, maker

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
TOKEN = "0123456789abcdef" * 2
SECRET = b"a tensor of sixty-four bytes, of which nobody is to see any bit."


# Laws.


@pytest.mark.parametrize("name", STORIES)
def test_scripts_have_the_bits_of_the_local_run(name: str, pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.over_tls, authority().files, "same_bits", "tell", name, world=3))
    assert not wrong(
        [said for said, _ in found], digests(STORIES[name].run(maker(1, driver="lockstep", remat="never")))
    )
    for _, each in found:
        assert each
        assert all(each)


SENT = [torch.arange(size, dtype=torch.int64) for size in (1, 100, 3000, 20_000)]
REPORT = b"a report of why"


def test_tensors_of_gpus_do_not_go_in_the_clear_beside_it(pool: WorkerPool) -> None:
    """No backend encrypts: they go by the connections."""
    found = answers(pool.run(jobs.over_tls, authority().files, "process_groups", "count", world=2))
    assert found == [[[[], []], [True]]] * 2
    plain = answers(pool.run(jobs.over_tls, {}, "process_groups", "count", world=2))
    assert all(sends and receives for (sends, receives), _ in plain)


class Middle:
    """Stands between two ends: keeps what the first sends, and alters a bit of it on its way."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.altered = -1

    def between(self) -> tuple[socket.socket, socket.socket]:
        (one, near), (far, other) = socket.socketpair(), socket.socketpair()
        for source, target, looks in ((near, far, True), (far, near, False)):
            threading.Thread(target=self._hand_on, args=(source, target, looks), daemon=True).start()
        return one, other

    def _hand_on(self, source: socket.socket, target: socket.socket, looks: bool) -> None:
        with suppress(OSError), source, target:
            while data := bytearray(source.recv(2**16)):
                if looks:
                    if 0 <= (at := self.altered - len(self.seen)) < len(data):
                        data[at] ^= 1 << self.altered % 8
                    self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def exchange(stream: str, altered: int = -1, *, tls: bool = True) -> tuple[list[torch.Tensor], list[bytes], Middle]:
    """What comes of `SENT` and `REPORT` if a byte of one of the streams is altered, and what the middle saw."""
    middle = Middle()
    pairs = [middle.between() if name == stream else socket.socketpair() for name in STREAMS_WITH_TLS[:3]]
    (m0, m1), (c0, c1), (a0, a1) = [encrypted(*pair) for pair in pairs] if tls else pairs
    middle.seen.clear()  # a handshake has all come: the other end has answered it
    middle.altered = altered
    one, other = TcpConnection(a0, c0, m0), TcpConnection(m1, c1, a1)
    tensors, reports = [], []
    try:
        for number, tensor in enumerate(SENT):
            one.put(1, Label(number, 0, gradient=False), encode(BoundaryValue(tensor, [])), 0.0)
        one.control.send(REPORT)
        with suppress(PeerClosed):  # the other end may have hung up
            wait_until(one.flush)
        one.close()
        with suppress(PeerClosed, CorruptMessage):
            while True:
                wait_until(lambda: other.head() is not None)
                head = other.head()
                assert head is not None
                message = other.message(head)
                assert isinstance(message, BoundaryValue)
                tensors.append(message.value)
                other.done(head)
        with suppress(CorruptMessage):
            while not other.control.gone:
                reports += other.control.read()
    finally:
        one.close()
        other.close()
    return tensors, reports, middle


def check_altered(stream: str, draws: int, seed: int) -> None:
    """What is altered is not taken, and all before is what was sent."""
    _, _, middle = exchange(stream)
    draw, size = random.Random(seed), len(middle.seen)
    for _ in range(draws):
        at = draw.choice([draw.randrange(size), draw.randrange(min(size, 200))])
        tensors, reports, _ = exchange(stream, at)
        assert all(map(torch.equal, tensors, SENT)), at
        assert [one.dtype for one in tensors] == [torch.int64] * len(tensors)
        assert reports in ([], [REPORT])
        assert len(tensors) < len(SENT) if stream == "messages" else not reports, at


@pytest.mark.parametrize(("stream", "draws"), [("messages", 40), ("control", 20)])
def test_what_is_altered_is_never_a_number(stream: str, draws: int) -> None:
    tensors, reports, middle = exchange(stream)
    assert [len(tensors), reports] == [len(SENT), [REPORT]]
    assert all(map(torch.equal, tensors, SENT))
    for tensor in SENT[1:]:
        assert tensor.numpy().tobytes()[8:72] not in middle.seen
    assert REPORT not in middle.seen
    check_altered(stream, draws, seed=5)


def test_in_the_clear_it_is_one() -> None:
    """So what stands between does alter."""
    _, _, middle = exchange("messages", tls=False)
    at = middle.seen.find(SENT[-1].numpy().tobytes()) + 81
    tensors, _, middle = exchange("messages", at, tls=False)
    assert [torch.equal(*pair) for pair in zip(tensors, SENT, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize("seed", range(60))
def test_a_handshake_that_is_altered_ends_or_changes_nothing(seed: int) -> None:
    """Of a few bytes TLS looks at no bit, as of the version that a record is said to have."""
    (there, back), draw = (ssl.MemoryBIO(), ssl.MemoryBIO()), random.Random(seed)
    ends = known().client.wrap_bio(back, there), known().server.wrap_bio(there, back, server_side=True)
    flight, done = draw.randrange(3), 0
    for number, (end, written) in enumerate([(ends[0], there), (ends[1], back), (ends[0], there), (ends[1], back)]):
        try:
            end.do_handshake()
            done += 1
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            return
        data = bytearray(written.read())
        if number == flight:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        written.write(bytes(data))
    if done == 2:
        ends[0].write(SECRET)
        assert ends[1].read(100) == SECRET


# Who is refused.


Make = Callable[[Path], Mapping[str, str]]


def encrypted_key(folder: Path) -> Mapping[str, str]:
    key = folder / "locked.key"
    command = ["openssl", "pkey", "-in", authority().files[KEY], "-aes256", "-passout", "pass:x", "-out", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return authority().files | {KEY: str(key)}


def written(folder: Path, text: str) -> str:
    (folder / "file").write_text(text)
    return str(folder / "file")


MISTAKES: dict[str, tuple[Make, str]] = {
    "one is missing": (lambda _: {**authority().files, KEY: ""}, "TLS between hosts: GPIPE_TLS_KEY not set"),
    "two are": (lambda _: {CA: authority().files[CA]}, "GPIPE_TLS_CERT, GPIPE_TLS_KEY not set"),
    "no such file": (lambda _: authority().files | {CERT: "/no/file"}, r"GPIPE_TLS_CERT=/no/file, .*No such file"),
    "no such authority": (lambda _: authority().files | {CA: "/no/ca"}, r"GPIPE_TLS_CA=/no/ca: .*No such file"),
    "no certificate": (lambda p: authority().files | {CERT: written(p, "text")}, "GPIPE_TLS_CERT=.*file, .*PEM"),
    "no authority": (lambda p: authority().files | {CA: written(p, "")}, "GPIPE_TLS_CA=.*file: "),
    "another's key": (lambda _: authority().files | {KEY: authority("2").files[KEY]}, "KEY_VALUES_MISMATCH"),
    "a passphrase": (encrypted_key, "GPIPE_TLS_KEY=.*locked.key: The key has a passphrase"),
    "another authority's": (
        lambda _: authority("2").files | {CA: authority().files[CA]},
        "GPIPE_TLS_CERT=.* is not valid for the authority GPIPE_TLS_CA=.*: unable to get local issuer",
    ),
    "one that has expired": (lambda _: authority().certificate("old", -1), "old.pem is not valid .*expired"),
    "one for servers alone": (lambda _: authority().certificate("half", usage="serverAuth"), "half.pem .* purpose"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_with_the_files_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, why = MISTAKES[name]
    set_files(monkeypatch, make(tmp_path))
    with pytest.raises(ValueError, match=why):
        identity()


def test_without_files_there_is_no_tls_and_with_them_it_is_said_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    set_files(monkeypatch, dict.fromkeys(VARIABLES, ""))
    assert identity() is None
    own, other = known(), identity_of(authority("2").files)
    assert own.about.startswith(f"{authority().files[CERT]} until ")
    assert own.about.endswith(f"of authority {own.authority}")
    assert own.authority == identity_of(authority().certificate("another host")).authority != other.authority


def test_the_doctor_says_whose_certificate_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_files(monkeypatch, {})
    assert CHECKS["TLS between hosts"]().startswith("off: GPIPE_TLS_CERT")
    set_files(monkeypatch, authority().files)
    assert CHECKS["TLS between hosts"]() == known().about


def test_all_ranks_refuse_if_some_have_no_certificate_or_one_of_another_authority(pool: WorkerPool) -> None:
    files = [authority().files, {}, authority("2").files]
    own, other = (identity_of(files[rank]).authority for rank in (0, 2))
    said = (
        f"TLS between hosts: ranks have different settings (ranks [0] use authority {own}; ranks [1] use no TLS; "
        f"ranks [2] use authority {other}). Set the same authority in {CA}, and {CERT} and {KEY}, on all ranks."
    )
    found = answers(pool.run(jobs.refused, files, world=3))
    assert {kind for kind, _, _ in found} <= {"ValueError", "RemoteError"}  # which tells that of the first
    assert all(text.endswith(said) for _, text, _ in found)
    assert answers(pool.run(jobs.refused, [authority().files] * 3, world=3)) == [None] * 3


def test_a_certificate_that_has_expired_is_told_by_rank(pool: WorkerPool) -> None:
    files = [authority().files, authority().files, authority().certificate("gone", -1)]
    found = answers(pool.run(jobs.refused, files, world=3))
    assert [kind for kind, _, _ in found] == ["RemoteError", "RemoteError", "ValueError"]
    for kind, text, rank in found:
        assert "gone.pem is not valid for the authority" in text
        assert "certificate has expired" in text
        assert (rank, "rank 2 failed" in text) == ((2, True) if kind == "RemoteError" else (None, False))


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(linking, "own_host", lambda: "127.0.0.1")
    with linking.listening(crosses_hosts=True) as own:
        yield own


def in_the_clear(own: Listener) -> socket.socket:
    end = socket.create_connection((own.address.host, own.address.port))
    end.sendall(hello(TOKEN, 1, "messages"))
    return end


def by_tls(own: Listener, shown: Mapping[str, str] | None, version: ssl.TLSVersion | None = None) -> socket.socket:
    """A client that trusts anybody, and says the right words."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if shown is not None:
        context.load_cert_chain(shown[CERT], shown[KEY])
    with ExitStack() as on_failure:
        end = socket.create_connection((own.address.host, own.address.port))
        end = on_failure.enter_context(context.wrap_socket(on_failure.enter_context(end)))
        end.sendall(hello(TOKEN, 1, "messages"))
        on_failure.pop_all()
        return end


STRANGERS: dict[str, Callable[[Listener], socket.socket]] = {
    "in the clear": in_the_clear,
    "without a certificate": lambda own: by_tls(own, None),
    "of another authority": lambda own: by_tls(own, authority("2").files),
    "expired": lambda own: by_tls(own, authority().certificate("late", -1)),
    "TLS 1.2": lambda own: by_tls(own, authority().files, ssl.TLSVersion.TLSv1_2),
    "hung up": lambda own: socket.create_connection((own.address.host, own.address.port)),
    "says half": lambda own: in_half(own),
}  # fmt: skip


def in_half(own: Listener) -> socket.socket:
    end = socket.create_connection((own.address.host, own.address.port))
    end.sendall(b"\x16\x03\x01\x02")
    return end


@pytest.mark.parametrize("name", STRANGERS)
def test_who_shows_no_certificate_of_the_authority_is_a_stranger_though_it_knows_the_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(monkeypatch) as own, ThreadPoolExecutor(2) as threads:

        def come() -> bytes:
            """What a stranger is given, and then the ranks come."""
            given = b""
            with suppress(ssl.SSLError, ConnectionError), STRANGERS[name](own) as end:
                if name not in ("hung up", "says half"):
                    given = end.recv(100)
            return given

        def dial_all() -> list[socket.socket]:
            stranger.result()
            return [
                dial(own.address, hello(TOKEN, 1, one), LIMIT, local=False, tls=known()) for one in STREAMS_WITH_TLS
            ]

        stranger = threads.submit(come)
        dialled = threads.submit(dial_all)
        found = own.accept([(1, one) for one in STREAMS_WITH_TLS], TOKEN, math.inf, lambda: None, known())
        assert linking.WELCOME not in stranger.result()
        for stream, end in zip(STREAMS_WITH_TLS, dialled.result(), strict=True):
            with end, found[1, stream] as theirs:
                end.sendall(b"here")
                assert theirs.recv(100) == b"here"


@pytest.mark.parametrize("shown", ["nothing", "another authority", "expired"])
def test_who_dials_an_impostor_says_nothing_to_it(shown: str) -> None:
    files = {"another authority": authority("2").files, "expired": authority().certificate("worn", -1)}.get(shown)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def answer() -> bytes:
            end: socket.socket = server.accept()[0]
            with suppress(ssl.SSLError):
                if files is not None:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(files[CERT], files[KEY])
                    end = context.wrap_socket(end, server_side=True)
                with end:
                    return end.recv(2**16)
            return b""

        said = thread.submit(answer)
        address = linking.Address("", "127.0.0.1", server.getsockname()[1], "")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            dial(address, hello(TOKEN, 1, "messages"), LIMIT, local=False, tls=known())
        assert TOKEN.encode() not in said.result()


def test_a_rank_whose_certificate_the_other_end_refuses_hears_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by clocks that differ: the handshake is over for who dials before the other end has looked."""
    own_files, theirs = identity_of(authority("2").files), known()
    mixed = own_files._replace(client=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    mixed.client.check_hostname = False
    mixed.client.load_verify_locations(authority().files[CA])
    mixed.client.load_cert_chain(authority("2").files[CERT], authority("2").files[KEY])
    with listening(monkeypatch) as own, ThreadPoolExecutor(1) as thread:
        ended = threading.Event()

        def stop() -> None:
            if ended.is_set():
                raise InterruptedError

        accepted = thread.submit(own.accept, [(1, "messages")], TOKEN, math.inf, stop, theirs)
        try:
            with pytest.raises(ssl.SSLError, match="unknown ca"):
                dial(own.address, hello(TOKEN, 1, "messages"), LIMIT, local=False, tls=mixed)
        finally:
            ended.set()
        with pytest.raises(InterruptedError):
            accepted.result()


# What is told, and what is seen.


@pytest.mark.parametrize("which", ["messages", "control"])
def test_bytes_that_are_altered_are_told_as_that_with_the_rank(which: str) -> None:
    with endpoints(2, TlsConnection) as (first, second):
        connection = second.connections[0]
        end = connection._outgoing if which == "messages" else connection.control.socket  # type: ignore[attr-defined]
        socket.socket.send(end, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that nobody has encrypted
        with pytest.raises(
            RemoteError, match=r"rank 1 sent a message that gpipe never sends: TLS rejected the received bytes"
        ):
            receive(first, 1, 0)


def test_both_ends_may_send_much_at_a_time() -> None:
    with endpoints(2, TlsConnection) as (first, second):

        def both(own: Any, peer: int) -> None:
            for number in range(12):
                send(own, peer, number, 2**20)
            for number in range(12):
                receive(own, peer, number, 2**20)

        for own, peer in ((first, 1), (second, 0)):
            own.expect({label_of(number): 0 for number in range(12)}, [peer], lambda peer, seen: "")
        assert together(lambda: both(first, 1), lambda: both(second, 0)) == [None, None]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_key_that_all_users_can_read_is_reported(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    files = authority().certificate(f"mode-{mode}")
    Path(files[KEY]).chmod(mode)
    assert identity_of(files)
    assert ("[readable-key]" in caplog.text) == (mode == 0o644)
