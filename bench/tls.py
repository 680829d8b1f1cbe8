"""Measures how fast TLS between hosts rejects attacks, and what it costs in a step of a Transformer.

    python -m bench.tls    # as root: creates network namespaces

One bit is changed in transit: in handshakes, which both ends perform in memory, and in later messages and notices
over sockets. Strangers connect to a listener, and ranks connect to impostors. Then two processes in two network
namespaces train the same layers with two pipes, with and without TLS, one step each in turns.
"""

import argparse
import math
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch.distributed as dist

from bench.link import HERE, MADE
from bench.machine import facts
from bench.report import describe, spread, table, write
from bench.workloads import WORKLOADS
from gpipe import GPipe
from gpipe.distributed import linking
from gpipe.distributed.codec import CorruptMessage, PeerClosed, encode
from gpipe.distributed.connection import ControlChannel, TcpConnection
from gpipe.distributed.tls import CA, CERT, KEY, Identity, identity
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label
from two_hosts.hosts import ADDRESSES, missing, two_hosts
from two_hosts.relay import WIRE

SENT = torch.arange(1000)
REPORT = b"a report of why"
TOKEN = "0" * 32
WORK = WORKLOADS["transformer"]
PORT = 5300
WARM_UP = 2
SECONDS = 10.0  # after which something counts as a hang
EXPIRED = "openssl x509 -req -in rank.csr -CA ca.pem -CAkey ca.key -days -1 -out expired.pem"
Outcomes = Counter[str]


def certificates(folder: str) -> dict[str, str]:
    """Creates an authority with a valid and an expired certificate, and returns their environment variables."""
    subprocess.run(["sh", "-e", "-c", MADE + EXPIRED], cwd=folder, check=True, capture_output=True)
    return {CERT: f"{folder}/rank.pem", KEY: f"{folder}/rank.key", CA: f"{folder}/ca.pem"}


def known(files: Mapping[str, str]) -> Identity:
    os.environ.update(files)
    found = identity()
    assert found is not None
    return found


def altered_handshakes(own: Identity, count: int) -> Outcomes:
    """Changes one bit in one of the three flights of a handshake, and returns which ends still connect."""
    found: Outcomes = Counter()
    for seed in range(count):
        (there, back), draw = (ssl.MemoryBIO(), ssl.MemoryBIO()), random.Random(seed)
        one, other = own.client.wrap_bio(back, there), own.server.wrap_bio(there, back, server_side=True)
        flight = draw.randrange(3)
        outcome = "waits for bytes that do not come"
        with suppress(ssl.SSLWantReadError):
            try:
                for number, (end, written) in enumerate([(one, there), (other, back), (one, there), (other, back)]):
                    with suppress(ssl.SSLWantReadError):
                        end.do_handshake()
                    data = bytearray(written.read())
                    if number == flight:
                        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                    written.write(bytes(data))
                one.write(REPORT)
                is_same = other.read(100) == REPORT
                outcome = "changes nothing" if is_same else "ACCEPTED"
            except ssl.SSLError as error:
                if isinstance(error, ssl.SSLWantReadError):
                    raise
                outcome = "refused"
        found[outcome] += 1
    return found


def hand_on(source: socket.socket, target: socket.socket, at: Callable[[], int]) -> None:
    """Forwards data between two ends, and changes a bit of one byte."""
    seen = 0
    with suppress(OSError), source, target:
        while data := bytearray(source.recv(2**16)):
            if 0 <= (here := at() - seen) < len(data):
                data[here] ^= 1 << at() % 8
            seen += len(data) if at() >= 0 else 0
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def altered_record(own: Identity, draw: random.Random, *, news: bool) -> tuple[str, float]:
    """Changes one bit of a message or notice. Returns the outcome, and the seconds until the receiver reports it."""
    (one, near), (far, other) = socket.socketpair(), socket.socketpair()
    place = [-1]
    for source, target, at in ((near, far, lambda: place[0]), (far, near, lambda: -1)):
        threading.Thread(target=hand_on, args=(source, target, at), daemon=True).start()
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(own.server.wrap_socket, other, server_side=True)
        end, theirs = own.client.wrap_socket(one), answered.result()
    size = len(REPORT) + 4 if news else SENT.nbytes
    place[0] = draw.randrange(size + 22)  # with the record's header and seal
    return (_news if news else _message)(end, theirs)


def _news(end: ssl.SSLSocket, theirs: ssl.SSLSocket) -> tuple[str, float]:
    writes, reads = ControlChannel(end), ControlChannel(theirs)
    writes.send(REPORT)
    end.close()
    begun = time.perf_counter()
    with theirs:
        while time.perf_counter() - begun < SECONDS:
            try:
                if reads.read():
                    return "ACCEPTED", 0.0
            except CorruptMessage:
                return "refused, and told as altered", time.perf_counter() - begun
            if reads.gone:
                return "refused, as the connection ends", time.perf_counter() - begun
            time.sleep(0.0002)
    return "HANGS", SECONDS


def _message(end: ssl.SSLSocket, theirs: ssl.SSLSocket) -> tuple[str, float]:
    others = [socket.socketpair() for _ in range(3)]
    writes = TcpConnection(others[0][0], others[1][0], end)
    reads = TcpConnection(theirs, others[1][1], others[2][0])
    try:
        writes.put(1, Label(0, 0, gradient=False), encode(BoundaryValue(SENT, [])), 0.0)
        while not writes.flush():
            time.sleep(0.0002)
        writes.close()
        begun = time.perf_counter()
        while time.perf_counter() - begun < SECONDS:
            try:
                if reads.head() is not None:
                    return "ACCEPTED", 0.0
            except CorruptMessage:
                return "refused, and told as altered", time.perf_counter() - begun
            except PeerClosed:
                return "refused, as the connection ends", time.perf_counter() - begun
            time.sleep(0.0002)
        return "HANGS", SECONDS
    finally:
        reads.close()
        writes.close()
        for pair in others:
            for each in pair:
                each.close()


SHOWN = ("no certificate", "another authority's", "expired")


def strange(shown: str, folders: Sequence[str], side: int) -> ssl.SSLContext:
    """Returns an end that trusts any certificate and presents this one."""
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    folder, name = folders[shown == SHOWN[1]], "expired" if shown == SHOWN[2] else "rank"
    if shown != SHOWN[0]:
        context.load_cert_chain(f"{folder}/{name}.pem", f"{folder}/rank.key")
    return context


def refused_strangers(own: Identity, shown: str, folders: Sequence[str], count: int) -> list[float]:
    """Measures the seconds until a listener closes the connection of a stranger that knows the token."""
    context, seconds, ended = strange(shown, folders, ssl.PROTOCOL_TLS_CLIENT), [], threading.Event()

    def stop() -> None:
        if ended.is_set():
            raise InterruptedError

    with ExitStack() as opened:
        opened.enter_context(patch.object(linking, "own_host", lambda: "127.0.0.1"))
        listener = opened.enter_context(linking.listening(crosses_hosts=True))
        thread = opened.enter_context(ThreadPoolExecutor(1))
        accepted = thread.submit(listener.accept, [(1, "messages")], TOKEN, math.inf, stop, own)
        for _ in range(count):
            begun, given = time.perf_counter(), b""
            with suppress(ssl.SSLError, ConnectionError), socket.create_connection(listener.address[1:3]) as bare:
                end = context.wrap_socket(bare)
                end.sendall(linking.hello(TOKEN, 1, "messages"))
                given = end.recv(1)
            seconds.append(time.perf_counter() - begun)
            assert given == b"", "it has been let in"
        ended.set()
        with suppress(InterruptedError):
            accepted.result()
    return seconds


def refused_impostors(own: Identity, shown: str, folders: Sequence[str], count: int) -> list[float]:
    """Measures the seconds until a rank rejects an impostor that listens at a peer's address."""
    seconds, heard = list[float](), list[bytes]()
    context = strange(shown, folders, ssl.PROTOCOL_TLS_SERVER)

    def answer(server: socket.socket) -> None:
        for _ in range(count):
            with suppress(ssl.SSLError, ConnectionError), server.accept()[0] as bare:
                heard.append(context.wrap_socket(bare, server_side=True).recv(100))

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        answers = thread.submit(answer, server)
        address = linking.Address("", "127.0.0.1", server.getsockname()[1], "")
        for _ in range(count):
            begun = time.perf_counter()
            with suppress(ssl.SSLError, ConnectionError):
                linking.dial(address, linking.hello(TOKEN, 1, "messages"), SECONDS, local=False, tls=own)
                raise AssertionError("it has been believed")
            seconds.append(time.perf_counter() - begun)
        answers.result()
    assert not any(TOKEN.encode() in one for one in heard)
    return seconds


def refused_own(files: Mapping[str, str], folder: str, count: int) -> list[float]:
    """Measures the seconds until a rank rejects its own expired certificate."""
    seconds = []
    os.environ.update({**files, CERT: f"{folder}/expired.pem"})
    for _ in range(count):
        begun = time.perf_counter()
        with suppress(ValueError):
            identity()
            raise AssertionError("it has been taken")
        seconds.append(time.perf_counter() - begun)
    os.environ.update(files)
    return seconds


def steps(rank: int, rounds: int, files: Mapping[str, str]) -> None:
    """Trains on one host with two pipes in turns. Rank 0 prints the seconds of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=2)
    pipes = []
    for shown in ({}, files):
        os.environ.update(dict.fromkeys(files, "") | dict(shown))
        layers = WORK.layers()
        cuts = [len(layers) - len(layers) // 2, len(layers) // 2]
        pipe = GPipe(layers, cuts, WORK.micro_batches, remat="never", driver="process", seed=0)
        for _ in range(WARM_UP):
            pipe.step(*WORK.data(), WORK.loss_fn)
        pipes.append(pipe)
    losses = set()
    for at in range(rounds):
        for which in (0, 1) if at % 2 else (1, 0):
            begun = time.perf_counter()
            losses.add(float(pipes[which].step(*WORK.data(), WORK.loss_fn)))
            if not rank:
                print(which, time.perf_counter() - begun, flush=True)
    assert len(losses) == 1, losses


def cost(rounds: int, files: Mapping[str, str]) -> list[list[float]]:
    """Measures the seconds of each step with and without TLS."""
    with two_hosts() as hosts:
        command = [sys.executable, "-m", "bench.tls", "--rounds", f"{rounds}", "--serve"]
        env = {**os.environ, **files, "GLOO_SOCKET_IFNAME": WIRE, "MASTER_ADDR": ADDRESSES[0]}
        first, second = (
            hosts.start(rank, [*command, f"{rank}"], cwd=HERE, env=env, text=True, stdout=subprocess.PIPE)
            for rank in (0, 1)
        )
        found: list[list[float]] = [[], []]
        for line in first.communicate()[0].splitlines():
            which, seconds = line.split()
            found[int(which)].append(float(seconds))
        if first.returncode or second.wait():
            raise RuntimeError("a rank has failed")
    return found


def markdown(altered: Mapping[str, Outcomes], late: float, refused: Mapping[str, list[float]], of: int) -> str:
    kinds = ["ACCEPTED", "HANGS", *sorted({kind for one in altered.values() for kind in one} - {"ACCEPTED", "HANGS"})]
    rows = [[f"{name}, {one.total()}", *(f"{one[kind]}" for kind in kinds)] for name, one in altered.items()]
    times = [[name, spread(seconds), f"{len(seconds)} of {of}"] for name, seconds in refused.items()]
    return (
        f"{table(['bits altered in', *kinds], rows)}\n\nA record was refused at most {late:.3g} s after it was sent. "
        "In a handshake TLS looks at no bit of the version that a first record is said to have. Whoever waits for "
        "bytes that do not come, as a length says that was altered, gives up as with a wire that is cut.\n\n"
        f"{table(['refused', 'ms (least-greatest)', ''], times)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each pipe")
    parser.add_argument("--altered", type=int, default=10_000)
    parser.add_argument("--refused", type=int, default=100)
    parser.add_argument("--keep", default="tls", help="write the result under another name")
    parser.add_argument("--serve", type=int, metavar="RANK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        steps(options.serve, options.rounds, {name: os.environ[name] for name in (CERT, KEY, CA)})
        return
    if why := missing():
        raise SystemExit(why)
    about = facts()
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        files = certificates(one)
        certificates(other)
        seconds = cost(options.rounds, files)
        own, folders, draw = known(files), (one, other), random.Random(0)
        found = {"handshakes": altered_handshakes(own, options.altered // 2)}
        late = 0.0
        for name, eighths in (("messages", 3), ("news", 1)):
            found[name] = Counter()
            for _ in range(options.altered * eighths // 8):
                outcome, waited = altered_record(own, draw, news=name == "news")
                found[name][outcome] += 1
                late = max(late, waited)
        refused = {
            **{f"who connects: {s}": refused_strangers(own, s, folders, options.refused) for s in SHOWN},
            **{f"who is connected to: {s}": refused_impostors(own, s, folders, options.refused) for s in SHOWN},
            "its own, expired": refused_own(files, one, options.refused),
        }
    ratios = [by_tls / clear for clear, by_tls in zip(*seconds, strict=True)]
    rows = [[name, spread(one)] for name, one in zip(("in the clear", "by TLS"), seconds, strict=True)]
    text = (
        f"# What TLS between hosts refuses, and what it costs\n\n{describe(about)}\n\n"
        f"{markdown(found, late, refused, options.refused)}\n\n{WORK.title}; K=2, M={WORK.micro_batches}, one "
        f"process of one thread on each of two network namespaces, joined by a veth pair; {options.rounds} "
        f"steps each in turns, of the same loss. By TLS a step takes {median(ratios):.3f} x as long, the median of "
        f"neighbours. Load average at the end: {os.getloadavg()[0]:.1f}.\n\n"
        f"{table(['a step', 'ms (least-greatest)'], rows)}"
    )
    write(options.keep, text, {"facts": about, "steps": seconds, "altered": found, "late": late, "refused": refused})


if __name__ == "__main__":
    main()
