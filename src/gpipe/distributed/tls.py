"""Encrypts connections between hosts with mutual TLS 1.3. Needs a certificate, its key, and the authority (CA).

Both processes of a connection must present a certificate of the authority, otherwise the connection fails. With a
certificate, a process can act as any rank, so use one authority per job. Connections within a host use shared memory
and are not encrypted.
"""

import hashlib
import logging
import os
import ssl
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

CERT, KEY, CA = VARIABLES = ("GPIPE_TLS_CERT", "GPIPE_TLS_KEY", "GPIPE_TLS_CA")

logger = logging.getLogger("gpipe")


class Identity(NamedTuple):
    """The TLS configuration of this process.

    Attributes:
        client: The context for outgoing connections.
        server: The context for incoming connections.
        authority: A fingerprint of the authority.
        about: A description with the certificate, its expiry date, and the authority.
    """

    client: ssl.SSLContext
    server: ssl.SSLContext
    authority: str
    about: str


def identity() -> Identity | None:
    """Reads the three configured files. Returns None if no file is configured.

    Raises:
        ValueError: If only some files are configured, or if files cannot be read or do not belong together.
    """
    files = [os.environ.get(name, "") for name in VARIABLES]
    if not any(files):
        return None
    if not all(files):
        missing = ", ".join(name for name, file in zip(VARIABLES, files, strict=True) if not file)
        raise ValueError(f"TLS between hosts: {missing} not set. Set all of {', '.join(VARIABLES)}, or none of them.")
    _check_key_mode(files[1])
    client, server = (_context(side, *files) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    server.num_tickets = 0  # session tickets are never used
    certificates = sorted(client.get_ca_certs(binary_form=True))
    authority = hashlib.sha256(b"".join(certificates)).hexdigest()[:16]
    certificate = _verify_certificate(client, server, files)
    about = f"{files[0]} until {certificate['notAfter']}, of authority {authority}"
    return Identity(client, server, authority, about)


def _check_key_mode(key: str) -> None:
    """Logs a warning if other users can read the key. A missing file is reported later."""
    with suppress(OSError):
        if os.stat(key).st_mode & stat.S_IROTH:
            logger.warning(
                f"{KEY}: all users can read {key}, and act as a rank. Run `chmod 600 {key}`. [readable-key]"
            )


def _context(side: int, cert: str, key: str, ca: str) -> ssl.SSLContext:
    def reject_passphrase() -> str:
        raise ValueError("The key has a passphrase. Use a key without a passphrase.")

    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # certificates do not name addresses, which are known only when the job starts
    context.verify_mode = ssl.CERT_REQUIRED
    setting = f"{CA}={ca}"
    try:
        context.load_verify_locations(ca)
        setting = f"{CERT}={cert}, {KEY}={key}"
        context.load_cert_chain(cert, key, reject_passphrase)
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting}: {error}") from error
    return context


def _verify_certificate(client: ssl.SSLContext, server: ssl.SSLContext, files: list[str]) -> dict[str, object]:
    """Verifies the certificate on both sides of a handshake in memory. Returns the certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for end in ends * 2:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", error)
        raise ValueError(f"{CERT}={files[0]} is not valid for the authority {CA}={files[2]}: {why}.") from error
    return dict(ends[0].getpeercert() or {})


def is_tampering(error: BaseException) -> bool:
    """Returns whether TLS rejected received bytes or a certificate, and not only the connection has ended."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLSyscallError))


def check_authorities(authorities: Sequence[str]) -> None:
    """Checks that all ranks use the same TLS authority, or that no rank uses TLS.

    Raises:
        ValueError: If the authorities differ, or if only some ranks use TLS.
    """
    ranks: dict[str, list[int]] = {}
    for rank, authority in enumerate(authorities):
        ranks.setdefault(authority, []).append(rank)
    if len(ranks) > 1:
        used = "; ".join(
            f"ranks {members} use {f'authority {authority}' if authority else 'no TLS'}"
            for authority, members in ranks.items()
        )
        raise ValueError(
            f"TLS between hosts: ranks have different settings ({used}). Set the same authority in {CA}, and {CERT} "
            f"and {KEY}, on all ranks."
        )
