"""Mutual TLS 1.3 between hosts, if files are named: certificate and key of this host, and the authority of the job.

Both ends show a certificate of that authority, or there is no connection; nothing goes on in the clear. Whoever has
such a certificate may be any rank: an authority is for one job. Within a host nothing is encrypted: memory is shared.
"""

import hashlib
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

CERT, KEY, CA = VARIABLES = ("GPIPE_TLS_CERT", "GPIPE_TLS_KEY", "GPIPE_TLS_CA")


class Identity(NamedTuple):
    """What this process shows others and asks of them; `authority` and `about` say of whom and until when."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    authority: str
    about: str


def identity() -> Identity | None:
    """That of the files that are named; None if there are none. A ValueError says what is wrong with them."""
    files = [os.environ.get(name, "") for name in VARIABLES]
    if not any(files):
        return None
    if not all(files):
        absent = " and ".join(name for name, file in zip(VARIABLES, files, strict=True) if not file)
        raise ValueError(f"{absent} not set: TLS between hosts needs all of {', '.join(VARIABLES)}, or none")
    client, server = (_context(side, *files) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    server.num_tickets = 0  # nobody would read them
    known = sorted(client.get_ca_certs(binary_form=True))
    authority = hashlib.sha256(b"".join(known)).hexdigest()[:16]
    shown = _shown_to_itself(client, server, files)
    return Identity(client, server, authority, f"{files[0]} until {shown['notAfter']}, of authority {authority}")


def _context(side: int, cert: str, key: str, ca: str) -> ssl.SSLContext:
    def has_passphrase() -> str:
        raise ValueError("a key with a passphrase, which nobody is asked for; give one without")

    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # addresses are found as the job starts
    context.verify_mode = ssl.CERT_REQUIRED
    named = f"{CA}={ca}"
    try:
        context.load_verify_locations(ca)
        named = f"{CERT}={cert}, {KEY}={key}"
        context.load_cert_chain(cert, key, has_passphrase)
    except (OSError, ValueError) as error:
        raise ValueError(f"{named}: {error}") from error
    return context


def _shown_to_itself(client: ssl.SSLContext, server: ssl.SSLContext, files: list[str]) -> dict[str, object]:
    """The certificate, once both ends have taken it in a handshake without a network."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for end in ends * 2:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", error)
        raise ValueError(f"{CERT}={files[0]} is refused by the authority {CA}={files[2]}: {why}") from error
    return dict(ends[0].getpeercert() or {})


def altered(error: BaseException) -> bool:
    """Whether what came by TLS is not what was sent, or was refused at the other end; else the connection ended."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLSyscallError))


def check_authorities(authorities: Sequence[str]) -> None:
    """Checks that all processes of the world, by rank, have the same authority for TLS, or none."""
    ranks: dict[str, list[int]] = {}
    for rank, authority in enumerate(authorities):
        ranks.setdefault(authority, []).append(rank)
    if len(ranks) > 1:
        said = "; ".join(
            f"ranks {of} have {f'the authority {authority}' if authority else 'no certificate'}"
            for authority, of in ranks.items()
        )
        raise ValueError(
            f"TLS between hosts is for all ranks, or for none: {said}. Set {', '.join(VARIABLES)} on all"
        )
