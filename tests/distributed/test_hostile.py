"""What a peer sends may be anything: the receiver says whose it is, and runs, imports and allocates nothing by it."""

import fcntl
import json
import os
import random
import socket
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from gpipe.distributed.codec import CorruptMessage, PeerClosed, decode, encode
from gpipe.distributed.connection import LARGEST_CONTROL_BYTES, SLOT_HEADER_BYTES, Connection, Frame, TcpConnection
from gpipe.distributed.endpoint import Endpoint
from gpipe.errors import RemoteError
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Label
from tests.support.endpoints import KINDS, endpoints, label_of, outgoing

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
LABEL = Label(0, 0, gradient=False)

VALUES: list[Any] = [
    torch.arange(6.0).view(2, 3),
    (torch.ones(3), {"a": torch.ones(2, 2).t(), "b": [None, 1, 2.5, "text", torch.Size([2])]}),
    OrderedDict(a=torch.ones(1, 4).expand(3, 4), b=torch.ones(4, dtype=torch.complex128)),
    defaultdict[Any, Any](list, {(1, "k"): torch.zeros(0, 3), None: torch.ones(2, 5)[:, ::2]}),
]


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes with a few of them changed, cut off, or put in twice."""
    drawn, spoiled = random.Random(seed), bytearray(data)
    for _ in range(drawn.randint(1, 4)):
        at = drawn.randrange(len(spoiled))
        match drawn.randrange(4):
            case 0:
                spoiled[at] = drawn.randrange(256)
            case 1:
                spoiled[at] = ord(drawn.choice('0123456789-[]{}",.eEnul'))
            case 2:
                del spoiled[at : at + drawn.randint(1, 8)]
            case _:
                spoiled[at:at] = spoiled[at : at + drawn.randint(1, 8)]
        if not spoiled:
            break
    return bytes(spoiled)


@settings(LAW, max_examples=400)
@given(st.sampled_from(VALUES), st.integers(0, 2**32))
def test_a_damaged_layout_is_refused_or_gives_some_message(value: Any, seed: int) -> None:
    encoded, before = encode(BoundaryValue(value, [])), set(sys.modules)
    memory = bytearray(b"".join(map(bytes, encoded.pieces())) or b"\0")
    with suppress(CorruptMessage):
        decode(damaged(encoded.layout, seed), memory)
    assert set(sys.modules) == before


def layout_of(
    size: Sequence[object], strides: Sequence[object], wants: bool = False, dtype: str = "float32", times: int = 1
) -> str:
    """The layout of a value that is one tensor."""
    return json.dumps([True, ["tensor", 0], [[dtype, size, strides, wants, 0]] * times, []])


def tree_of(written: object) -> str:
    """The layout of a value without tensors."""
    return json.dumps([True, written, [], []])


HOSTILE_LAYOUTS = {
    "no JSON": "[true,",
    "deep": "[" * 100_000,
    "a deep tree": "[true, " + '["list", null, [' * 300 + "null" + "]]" * 300 + ", []]",
    "of an encoding that would have to be guessed, and loaded": "[1]".encode("utf-16-be").decode("latin-1"),
    "NaN": layout_of([float("nan")], [1]),
    "true as a size": layout_of([True], [1]),
    "huge": layout_of([7], [1]).replace("7", "9" * 5000),
    "many sizes": layout_of([2**31, 2**31, 2**31], [0, 0, 0]),
    "negative size": layout_of([-4], [1]),
    "negative stride": layout_of([2], [-1]),
    "far strides": layout_of([2], [2**40]),
    "more than there is": layout_of([1000], [1]),
    "other strides": layout_of([1, 1], [1]),
    "65 dimensions": layout_of([1] * 65, [1] * 65),
    "any attribute": layout_of([1], [1], dtype="load"),
    "gradients of integers": layout_of([1], [1], wants=True, dtype="int64"),
    "two for one": layout_of([1], [1], times=2),
    "no such tensor": layout_of([1], [1]).replace('["tensor", 0]', '["tensor", 1]'),
    "leaf of any kind": tree_of(["module", "os"]),
    "dtype of any name": tree_of(["dtype", "load"]),
    "a list that says nothing": tree_of([]),
    "true for a tensor": layout_of([1], [1]).replace('["tensor", 0]', '["tensor", true]'),
    "a tensor before the first": layout_of([1], [1]).replace('["tensor", 0]', '["tensor", -1]'),
    "half of a complex number": tree_of(["complex", 1]),
    "bytes of words": tree_of(["bytes", "a word"]),
    "memory shared by none": layout_of([1], [1]).replace(", []]", ", [1]]"),
    "a container among gradients": json.dumps([False, [["list", None, []]], [], []]),
}


TREES: dict[str, Any] = {
    "torch's own text": [1, {"type": "builtins.list", "context": "null", "children_spec": []}],
    "a module of its choice": ["planted.Class", None, [None]],
    "a registered class of that name": ["registered planted.Class", None, [None]],
    "a builtin": ["registered builtins.tuple", None, [None]],
    "without a name": ["registered NO_SERIALIZED_TYPE_NAME_FOUND", None, [None]],
    "a named tuple that is none": ["namedtuple builtins.list", None, [None]],
    "an enum": ["dict", [{"__enum__": True, "fqn": "planted:Colour", "name": "RED"}], [None]],
    "what makes anything": ["defaultdict", ["list", None, ["planted.Class", ["list", None, ["a"]]]], [None]],
    "a type of any name": ["type", "planted.Class"],
    "keys for nobody": ["dict", ["list", None, ["a", "b"]], [None]],
    "a key twice": ["dict", ["list", None, [1, True]], [None, None]],
    "a key that is a list": ["dict", ["list", None, [["list", None, []]]], [None]],
    "no children": ["list", None, None],
    "a length of words": ["deque", "3", [None]],
    "fewer than there are": ["deque", 1, [1, 2]],
}


def test_a_hostile_layout_is_refused_and_names_only_what_is_known_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    for name, layout in (HOSTILE_LAYOUTS | {name: tree_of(tree) for name, tree in TREES.items()}).items():
        with pytest.raises(CorruptMessage):
            pytest.fail(f"{name}: {decode(layout.encode(), bytearray(64))}")
    assert set(sys.modules) == before
    assert not (tmp_path / "ran").exists()
    back = decode(layout_of([3], [1]).encode(), bytearray(64))  # what these are made of is read
    assert isinstance(back, BoundaryValue)
    assert isinstance(back.value, torch.Tensor)
    assert back.value.tolist() == [0.0, 0.0, 0.0]


class Kept:
    """A class of the user."""

    def __init__(self, parts: list[Any], name: object) -> None:
        self.parts, self.name = parts, name


def test_a_class_goes_where_it_is_registered_and_nowhere_else() -> None:
    def unflatten(parts: Any, name: Any) -> Kept:
        return Kept(list(parts), name)

    with pytest.raises(TypeError, match="Kept"):
        encode(BoundaryValue(Kept([torch.ones(2)], "a"), []))
    pytree.register_pytree_node(
        Kept,
        lambda kept: (kept.parts, kept.name),
        unflatten,
        serialized_type_name="tests.distributed.test_hostile.Kept",
    )
    try:
        encoded = encode(BoundaryValue(Kept([torch.ones(2)], (1, "a")), []))
        back = decode(encoded.layout, bytearray(b"".join(map(bytes, encoded.pieces()))))
        assert isinstance(back, BoundaryValue)
        assert isinstance(back.value, Kept)
        assert back.value.name == (1, "a")
    finally:
        pytree._deregister_pytree_node(Kept)
    with pytest.raises(CorruptMessage, match="not registered"):
        decode(tree_of(["registered tests.distributed.test_hostile.Kept", None, []]).encode(), bytearray(8))


def test_who_lays_a_tensor_absurdly_far_apart_is_told_what_to_do() -> None:
    far = torch.empty_strided((2, 1), (2**45, 1), device="meta")
    with pytest.raises(TypeError, match=r"tensor\.contiguous\(\)"):
        encode(BoundaryValue(far, []))
    encode(BoundaryValue(torch.empty(64, 50_000, device="meta")[:, :1], []))  # a column of a wide matrix may go


@contextmanager
def at_the_mercy(kind: type[Connection]) -> Iterator[tuple[Endpoint, socket.socket, socket.socket]]:
    """An endpoint, and the ends of its peer's streams, on which anything can be written."""
    with endpoints(2, kind) as (endpoint, other):
        connection = other.connections[0]
        yield endpoint, outgoing(connection), connection.control.socket


def frame(slot: int = -1, layout: int = 0, size: int = 0, capacity: int = 0) -> bytes:
    return Frame(1, LABEL, slot, layout, size, capacity, 0.0).pack()


LAYOUT = encode(BoundaryValue(torch.ones(2), [])).layout
SENT: dict[str, bytes] = {
    "a layout of 4 GiB": frame(layout=2**32 - 1),
    "a slot that is none": frame(slot=3, size=8),
    "a slot of a number that is none": frame(slot=-7, size=8),
    "a new slot without a handle": frame(slot=0, size=8, capacity=64),
    "a slot of any size": frame(slot=0, size=8, capacity=2**63),
    "no layout": frame(size=8) + bytes(8),
    "a layout of tensors that are not there": frame(layout=len(LAYOUT), size=0) + LAYOUT,
    "noise": random.Random(1).randbytes(4096),
    "ones": b"\xff" * 4096,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SENT)
def test_a_hostile_frame_names_the_peer(name: str, kind: type[Connection]) -> None:
    with at_the_mercy(kind) as (endpoint, stream, _):
        stream.sendall(SENT[name])
        with pytest.raises(RemoteError, match="rank 1 sent a message that gpipe never sends"):
            endpoint.receive(1, LABEL)


class Bell:
    """Rung by a reading thread that found something wrong in the very moment in which the bell is asked."""

    def __init__(self, find: Callable[[], None]) -> None:
        self._find = find

    def recv(self, size: int) -> bytes:
        self._find()
        return b"!"


@pytest.mark.parametrize("error", [CorruptMessage("odd"), PeerClosed("odd")])
def test_what_is_found_while_the_bell_is_heard_is_not_missed(error: Exception) -> None:
    """It rings once: who looked first, and then took the ring away, waited for another."""
    with endpoints(2, TcpConnection) as (endpoint, _):
        connection = endpoint.connections[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "_notified", Bell(lambda: patch.setattr(connection, "_broken", error)))
            with pytest.raises(type(error), match="odd"):
                connection.head()


HANDLES: dict[str, Callable[[int], int]] = {
    "memory that can be taken away": lambda size: _memory(size, sealed=False),
    "memory of another size": lambda size: _memory(size // 2, sealed=True),
    "no memory": lambda _: os.open("/dev/zero", os.O_RDWR),
}


def _memory(size: int, *, sealed: bool) -> int:
    handle = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, size)
    if sealed:
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return handle


@pytest.mark.parametrize("name", HANDLES)
def test_memory_that_a_peer_could_take_away_is_not_touched(name: str) -> None:
    """Who reads where a file has ended dies of SIGBUS."""
    with at_the_mercy(Connection) as (endpoint, stream, _):
        handle = HANDLES[name](SLOT_HEADER_BYTES + 2**20)
        socket.send_fds(stream, [frame(slot=0, layout=len(LAYOUT), size=8, capacity=2**20) + LAYOUT], [handle])
        os.close(handle)
        with pytest.raises(RemoteError, match="rank 1 sent a message that gpipe never sends: a descriptor without"):
            endpoint.receive(1, LABEL)


NEWS = {
    "no JSON": b"[",
    "deep": b"[" * 100_000,
    "another run": b'["1", 1, "", "", ""]',
    "a list": b"[1]",
    "no text": b"\xff\xfe",
    "without end": b"",
}


@pytest.mark.parametrize("name", NEWS)
def test_hostile_reports_name_the_peer(name: str) -> None:
    with at_the_mercy(Connection) as (endpoint, _, control):
        control.sendall(struct.pack("<I", len(NEWS[name]) or LARGEST_CONTROL_BYTES + 1) + NEWS[name])
        with pytest.raises(RemoteError, match="rank 1 sent a message that gpipe never sends"):
            endpoint.receive(1, label_of(0))


@pytest.mark.parametrize("kind", KINDS)
def test_room_is_made_for_what_comes_and_not_for_what_is_said(kind: type[Connection]) -> None:
    """A header says that a TiB follows, or as much as this machine has; nothing does."""
    for said in (2**40, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2):
        layout, before = layout_of([said // 4], [1]).encode(), getrusage(RUSAGE_SELF).ru_maxrss
        with at_the_mercy(kind) as (endpoint, stream, news):
            stream.sendall(frame(layout=len(layout), size=said // 4 * 4) + layout + bytes(2**16))
            stream.shutdown(socket.SHUT_RDWR)
            news.shutdown(socket.SHUT_RDWR)
            with pytest.raises((RemoteError, MemoryError), match=r"rank 1 is gone|No memory for"):
                endpoint.receive(1, LABEL)
            assert len(endpoint.connections[1]._buffer.memory) < 2**20
        assert getrusage(RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB, whatever else this process does
