"""Memory that is freed, kept for the next layer.

glibc gives large blocks back to the system and takes fresh pages, zeroed by the kernel, for the next ones; a step
frees and takes again all that it keeps for the backward. What that costs is in `bench/results/allocator.md`.
"""

import ctypes
import logging
import os
import platform

logger = logging.getLogger("gpipe")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Has the C library keep freed memory instead of giving it back to the system; on the CPU, steps become faster.

    Call it once, at the start of the program: rank threads that run already are not reached. It holds for the whole
    process until it ends, which then stays as large as it ever was. All threads share one heap, since the others
    cannot keep tensors of 64 MiB and more. It needs Linux with glibc; elsewhere it does nothing and logs a warning.
    CUDA's memory has nothing to do with it.

    Returns:
        Whether it was done.

    Example:
        >>> import gpipe
        >>> kept = gpipe.keep_freed_memory()  # doctest: +SKIP
    """
    if not _is_glibc():
        logger.warning(
            "keep_freed_memory does nothing on this system: it needs Linux with glibc (%s)", platform.platform()
        )
        return False
    options = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _LARGEST, _ARENA_MAX: 1}
    mallopt = ctypes.CDLL(None).mallopt
    refused = [option for option, value in options.items() if not mallopt(option, value)]
    if refused:
        logger.warning("keep_freed_memory was refused by this glibc (mallopt %s)", refused)
    return not refused


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no confstr at all, or not of this C library
        return False
