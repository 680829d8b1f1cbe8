"""Other jobs, whose ranks take each other for ranks of other hosts, and show certificates if they are given some."""

import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch

import gpipe
from gpipe.distributed import linking, rendezvous
from gpipe.distributed.connection import TcpConnection

Json = Any


@contextmanager
def apart(rank: int, files: Mapping[str, str]) -> Iterator[list[bool]]:
    """Has this rank be on a host of its own; notes of each connection that it makes whether it is encrypted."""
    encrypted: list[bool] = []

    class Noted(TcpConnection):
        def __init__(self, *ends: Any) -> None:
            super().__init__(*ends)
            encrypted.append(len(ends) == 3 and all(isinstance(end, ssl.SSLSocket) for end in ends))

    with (
        mock.patch.object(rendezvous, "host_name", return_value=f"host {rank}"),
        mock.patch.object(linking, "own_host", return_value="127.0.0.1"),
        mock.patch.object(linking, "TcpConnection", Noted),
        mock.patch.dict(os.environ, files),
    ):
        yield encrypted


def over_tls(rank: int, world: int, files: Mapping[str, str], module: str, name: str, *args: Any) -> Json:
    """What another job says, and whether each connection was encrypted."""
    with apart(rank, files) as encrypted:
        return [getattr(import_module(f"tests.support.jobs.{module}"), name)(rank, world, *args), encrypted]


def refused(rank: int, world: int, files: Sequence[Mapping[str, str]]) -> Json:
    """How the making of a pipe ends: kind and text of the exception, and the rank that it names."""
    with apart(rank, files[rank]):
        try:
            gpipe.GPipe([torch.nn.Linear(2, 2) for _ in range(world)], world, 2, driver="process").close()
        except (ValueError, gpipe.RemoteError) as error:
            return [type(error).__name__, str(error), getattr(error, "rank", None)]
    return None
