"""What a peer tells is believed only as far as it can be: a hostile message costs no memory and no process.

What to say where a process may have too few files and connections open: links to other processes need some.
"""

import errno
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpipe.errors import RemoteError, heard
from gpipe.stages.layout import UNITS

MOST_DIMENSIONS = 64  # torch's kernels take no more
SPARE, SPREAD = 2**30, 2**16
"""Bytes that a tensor may reach over, and how many for each byte of it besides: a column of a wide matrix."""
TOO_WIDE = (
    "a tensor of size {size} and strides {strides} would take {reach} bytes elsewhere, of which {sent} are its "
    "own; return its .contiguous()"
)


class Damaged(ValueError):  # noqa: N818 a state of the message
    """What came is nothing that gpipe sends."""


def damaged(peer: int, error: object) -> RemoteError:
    """What to raise where a process sent what cannot be."""
    return heard(f"rank {peer} sent what gpipe never sends: {error}", peer)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """While something is read that may be damaged."""
    try:
        yield
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError, AttributeError) as error:
        raise Damaged(f"{what} that gpipe does not send: {type(error).__name__}: {str(error)[:300]}") from error


def check_shape(
    dtype: torch.dtype, size: tuple[int, ...], strides: tuple[int, ...], wants_gradient: object, aligned: object
) -> None:
    """Checks that a tensor can lie like this, and takes little more memory than its elements need."""
    numbers = (*size, *strides)
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"sizes and strides {numbers}")
    if len(size) != len(strides) or len(size) > MOST_DIMENSIONS:
        raise ValueError(f"{len(size)} sizes and {len(strides)} strides")
    if type(wants_gradient) is not bool or (wants_gradient and not (dtype.is_floating_point or dtype.is_complex)):
        raise ValueError(f"a gradient {wants_gradient!r} of {dtype}")
    if type(aligned) is not int or not 0 <= aligned < max(UNITS.values()):
        raise ValueError(f"an address that is {aligned!r} past a unit")
    if math.prod(max(n, 1) for n in size) * dtype.itemsize >= 2**63:
        raise ValueError(f"a tensor of size {size}")
    too_wide = why_too_wide(dtype, size, strides)
    if too_wide:
        raise ValueError(too_wide)


def why_too_wide(dtype: torch.dtype, size: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Why a tensor is laid too far apart to be laid so at the other end, if it is."""
    if 0 in size:
        return None
    pairs = [(n, stride) for n, stride in zip(size, strides, strict=True) if stride]  # others are only repeated
    sent = math.prod(n for n, _ in pairs) * dtype.itemsize
    reach = (sum((n - 1) * stride for n, stride in pairs) + 1) * dtype.itemsize
    if reach <= SPARE + SPREAD * sent:
        return None
    return TOO_WIDE.format(size=size, strides=strides, reach=reach, sent=sent)


LIMITS = (errno.EMFILE, errno.ENFILE)


def too_many_files() -> OSError:
    """What to raise where the system leaves out, without a word, handles that would be too many."""
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@contextmanager
def explaining_limits() -> Iterator[None]:
    """Has an error that comes of too few file descriptors say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in LIMITS and not getattr(error, "__notes__", []):
            may = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            error.add_note(
                f"this process may have {may} files and connections open, and links to other processes need some: "
                f"allow more where it is started, as by `ulimit -n {max(4096, 4 * may)}`"
            )
        raise
