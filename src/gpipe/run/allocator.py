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
_LARGEST_ONCE = 2**25  # the most that older glibc takes as the threshold of mmap


def keep_freed_memory(*, one_heap: bool = False) -> bool:
    """Has the C library keep freed memory instead of giving it back to the system: on the CPU, large tensors pay.

    It holds until the process ends, which stays as large as it ever was, and gaps between blocks can make it larger.
    It needs Linux with glibc; elsewhere it does nothing and logs a warning. CUDA's memory has nothing to do with it.

    Args:
        one_heap: All threads share one heap: the heap of a single thread cannot keep tensors of 64 MiB and more.
            Where layers are tiny, threads wait for each other at it. It reaches threads that begin later: call it at
            the start of the program.

    Returns:
        Whether it was done.

    Example:
        >>> import gpipe
        >>> kept = gpipe.keep_freed_memory()  # doctest: +SKIP
    """
    if not _is_glibc():
        logger.warning("keep_freed_memory does nothing here: it needs Linux with glibc (%s)", platform.platform())
        return False
    options = {_MMAP_THRESHOLD: (_LARGEST, _LARGEST_ONCE), _TRIM_THRESHOLD: (_LARGEST,)}
    if one_heap:
        options[_ARENA_MAX] = (1,)
    mallopt = ctypes.CDLL(None).mallopt
    refused = [option for option, values in options.items() if not any(mallopt(option, v) for v in values)]
    if refused:
        logger.warning("keep_freed_memory was refused by this glibc (mallopt %s)", refused)
    return not refused


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no confstr at all, or not of this C library
        return False
