"""By which interface, of IPv4 or IPv6, and at which ports other hosts reach a process; and why they cannot."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpipe.distributed import network
from gpipe.distributed.linking import _keep_alive
from gpipe.distributed.network import interface_of, interfaces, listen, own_host
from two_hosts.hosts import ADDRESSES, ADDRESSES6, Hosts, missing, two_hosts
from two_hosts.relay import WIRE, enter

REASON = missing()
on_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)
Found = TypeVar("Found")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "GPIPE_INTERFACE", "GLOO_SOCKET_IFNAME", "GPIPE_PORTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts(ipv6=True) as made:
        yield made


def on(hosts: Hosts, host: int, work: Callable[[], Found]) -> Found:
    """What a thread finds on a host."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(enter, hosts.networks[host]).result()
        return thread.submit(work).result()


@on_hosts
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"MASTER_ADDR": ADDRESSES[1]}, ADDRESSES[0]),
        ({"MASTER_ADDR": ADDRESSES[0]}, ADDRESSES[0]),
        ({"MASTER_ADDR": ADDRESSES6[1]}, ADDRESSES6[0]),
        ({"MASTER_ADDR": ADDRESSES6[0]}, ADDRESSES6[0]),
        ({"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": WIRE}, ADDRESSES[0]),
        ({"GPIPE_INTERFACE": WIRE}, ADDRESSES[0]),
        ({"MASTER_ADDR": "::1", "GPIPE_INTERFACE": WIRE}, ADDRESSES6[0]),
        ({"GPIPE_INTERFACE": WIRE, "GLOO_SOCKET_IFNAME": "lo"}, ADDRESSES[0]),
        ({"GLOO_SOCKET_IFNAME": f"lo,{WIRE}"}, ADDRESSES[0]),
        ({"MASTER_ADDR": "", "GPIPE_INTERFACE": ""}, ADDRESSES[0]),
        ({}, ADDRESSES[0]),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else given,
)
def test_the_interface_that_is_named_is_taken_and_else_the_way_to_the_first_host(
    given: dict[str, str], expected: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert on(hosts, 0, own_host) == expected


@on_hosts
def test_of_a_host_those_addresses_are_told_by_which_others_reach_it(hosts: Hosts) -> None:
    assert dict(on(hosts, 1, lambda: list(interfaces()))) == {WIRE: [ADDRESSES[1], ADDRESSES6[1]]}
    for address in (ADDRESSES[0], ADDRESSES6[0]):
        assert on(hosts, 1, lambda address=address: interface_of(address)) == WIRE  # type: ignore[misc]


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "loopback": ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR=127.0.0.1 is the loopback address"),
    "loopback of IPv6": ({"MASTER_ADDR": "::1"}, "MASTER_ADDR=::1 is the loopback address"),
    "a name of its own": (
        {"MASTER_ADDR": "node1"},
        "MASTER_ADDR=node1 resolves to this host itself (127.0.1.1)",
    ),
    "no name": ({"MASTER_ADDR": "node2"}, "MASTER_ADDR=node2 cannot be resolved (no such name)"),
    "no way": ({"MASTER_ADDR": "192.0.2.7"}, "it has no route to MASTER_ADDR=192.0.2.7"),
    "no interface": ({"GPIPE_INTERFACE": "wlan7"}, "GPIPE_INTERFACE=wlan7 is not an interface"),
    "loopback device": (
        {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": ADDRESSES[1]},
        "GLOO_SOCKET_IFNAME=lo is not an interface",
    ),
}


@on_hosts
@pytest.mark.parametrize("name", REFUSED)
def test_who_cannot_be_reached_is_told_why_and_what_to_do(
    name: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def known(host: str, *given: Any, **named: Any) -> Any:
        if host == "node2":
            raise socket.gaierror("no such name")
        return resolve("127.0.1.1" if host == "node1" else host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    given, why = REFUSED[name]
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=r"\[no-host-address\]") as refusal:
        on(hosts, 0, own_host)
    text = str(refusal.value)
    assert why in text
    assert f"(here: {WIRE} ({ADDRESSES[0]}, {ADDRESSES6[0]}))" in text


@on_hosts
def test_without_master_addr_the_route_to_the_store_is_taken(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Ray, which passes init_method="tcp://..."."""
    monkeypatch.setattr(network, "store_host", lambda: ADDRESSES6[1])
    assert on(hosts, 0, own_host) == ADDRESSES6[0]
    monkeypatch.setattr(network, "store_host", lambda: "127.0.0.1")
    with pytest.raises(ValueError, match=r"init_method=127\.0\.0\.1 is the loopback address.*\[no-host-address\]"):
        on(hosts, 0, own_host)
    monkeypatch.setattr(network, "store_host", lambda: "")
    monkeypatch.setattr(network, "interfaces", lambda: [("eth0", [ADDRESSES[0]]), ("eth1", [ADDRESSES[1]])])
    with pytest.raises(ValueError, match=r"MASTER_ADDR is not set.*\[no-host-address\]"):
        on(hosts, 0, own_host)


def test_without_ipv6_its_addresses_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "IPV6", tmp_path / "if_inet6")
    assert all(":" not in address for _, addresses in interfaces() for address in addresses)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that were free."""
    for low in range(20_000, 60_000, 97):
        try:
            for port in range(low, low + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return low
    raise AssertionError("no free ports")


def test_processes_listen_at_the_ports_that_are_set_each_at_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    low = free_ports(2)
    monkeypatch.setenv("GPIPE_PORTS", f"{low}-{low + 1}")
    with listen("127.0.0.1") as one, listen("127.0.0.1") as other:
        assert [end.getsockname()[1] for end in (one, other)] == [low, low + 1]
        with pytest.raises(ValueError, match=rf"GPIPE_PORTS={low}-{low + 1} has no free port at 127\.0\.0\.1"):
            listen("127.0.0.1")
    monkeypatch.setenv("GPIPE_PORTS", str(low))
    with listen("127.0.0.1") as one:
        assert one.getsockname()[1] == low


@pytest.mark.parametrize("given", ["0", "5100-5000", "1-65536", "many", "-", "5000-", "5000:5100", "0-10"])
def test_what_are_no_ports_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_PORTS", given)
    with pytest.raises(ValueError, match=f"GPIPE_PORTS={given} is not a range of ports"):
        listen("127.0.0.1")


@on_hosts
@pytest.mark.parametrize("address", [ADDRESSES[0], ADDRESSES6[0]])
@pytest.mark.parametrize(("stream", "limit"), [("messages", 0), ("back", 0), ("control", 30_000), ("query", 30_000)])
def test_a_connection_between_hosts_is_kept_alive(address: str, stream: str, limit: int, hosts: Hosts) -> None:
    """That of tensors has no limit while they are under way: who is busy takes none, and is waited for."""

    def ask() -> list[int]:
        with listen(address) as server, socket.create_connection(server.getsockname()[:2]) as end:
            _keep_alive(end, stream, 30.0)
            names = ("USER_TIMEOUT", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "NODELAY")
            return [
                end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                *(end.getsockopt(6, getattr(socket, f"TCP_{name}")) for name in names),
            ]

    assert on(hosts, 0, ask) == [1, limit, 1, 1, 30, 1]
