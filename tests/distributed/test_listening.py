"""The look for what listens, by which R12 is judged, is right itself."""

import os
import socket

import pytest

from tests.support.processes.listening import Listening, family, listening_sockets


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:7f00:1"])
def test_a_listening_socket_is_found_until_it_is_closed(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        try:
            server.bind((address, 0))
        except OSError as error:
            pytest.skip(f"this machine has no such address: {error}")
        server.listen()
        one = Listening(os.getpid(), address, server.getsockname()[1])
        assert one in listening_sockets(family(os.getpid()))
        assert one.is_loopback == (address not in {"0.0.0.0", "::"})
    assert one not in listening_sockets([os.getpid(), 2**22 + 1])  # a process that is gone listens nowhere
