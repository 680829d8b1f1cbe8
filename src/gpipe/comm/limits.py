"""What to say where a process may have too few files and connections open: links to other processes need some."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

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
