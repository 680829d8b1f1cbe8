"""Certificates of an authority of their own, made by the openssl command, for connections by TLS."""

import shutil
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpipe.distributed.tls import CA, CERT, KEY, VARIABLES, Identity, identity

REASON = "" if shutil.which("openssl") else "openssl not found, which makes certificates: apt-get install openssl"
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]


class Authority:
    """One that vouches for certificates, in a folder that goes with it."""

    def __init__(self, name: str = "gpipe job") -> None:
        self._folder = TemporaryDirectory(prefix="authority-")
        self.path = Path(self._folder.name)
        self._openssl(
            "req", "-x509", *CURVE, "-subj", f"/CN={name}", "-keyout", "ca.key", "-out", "ca.pem", "-days", "7"
        )
        self.files = self.certificate("host")

    def certificate(self, name: str, days: int = 7, usage: str = "serverAuth,clientAuth") -> dict[str, str]:
        """The variables that name a new certificate of it; one of -1 days has expired."""
        extended = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"extendedKeyUsage={usage}"]
        key, asked, cert = (f"{name}.{ending}" for ending in ("key", "csr", "pem"))
        self._openssl("req", *CURVE, *extended, "-subj", f"/CN={name}", "-keyout", key, "-out", asked)
        vouch = ["-CA", "ca.pem", "-CAkey", "ca.key", "-copy_extensions", "copy", "-days", str(days)]
        self._openssl("x509", "-req", "-in", asked, *vouch, "-out", cert)
        return {CERT: str(self.path / cert), KEY: str(self.path / key), CA: str(self.path / "ca.pem")}

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.path, check=True, capture_output=True)


@cache
def authority(name: str = "gpipe job") -> Authority:
    """One for all tests."""
    return Authority(name)


def set_files(patch: pytest.MonkeyPatch, files: Mapping[str, str]) -> None:
    """Has this process show these certificates, or none."""
    for name in VARIABLES:
        patch.delenv(name, raising=False)
    for name, file in files.items():
        patch.setenv(name, file)


def identity_of(files: Mapping[str, str]) -> Identity:
    with pytest.MonkeyPatch.context() as patch:
        set_files(patch, files)
        found = identity()
    assert found is not None
    return found


@cache
def known() -> Identity:
    """What all tests show that do not care."""
    return identity_of(authority().files)


def encrypted(one: socket.socket, other: socket.socket) -> tuple[socket.socket, socket.socket]:
    """The two ends of a stream, by TLS from now on."""
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(known().server.wrap_socket, one, server_side=True)
        asked = known().client.wrap_socket(other)
        return answered.result(), asked
