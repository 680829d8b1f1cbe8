"""Implements the command `gpipe`, with one module per subcommand.

If the user can fix an error, or if a different process fails, a command prints a message and exits with a status. The
command prints no traceback.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# When a process exits, torchrun stops the others: this is the time for rank 0 to print the message.
PATIENCE = 5.0  # Seconds.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


@contextmanager
def exit_on_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Exits with status 2 and the message of an exception of these kinds.

    Default: ValueError, ImportError and OSError.
    """
    kinds = kinds or (ValueError, ImportError, OSError)
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        if not _is_first_rank():
            time.sleep(PATIENCE)
        _print_error(str(error))
        sys.exit(2)


@contextmanager
def exit_on_disk_errors(remedy: str) -> Iterator[None]:
    """Exits with status 2 and a remedy if a file cannot be written, for example on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        _print_error(f"{where}{error.strerror}. {remedy}")
        sys.exit(2)


@contextmanager
def exit_on_remote_errors() -> Iterator[None]:
    """Exits with status 1 if a different process fails. That process prints its own traceback."""
    import gpipe

    try:
        yield
    except gpipe.RemoteError as error:
        if _is_first_rank():
            _print_error(str(error))
        sys.exit(1)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Exits with status 130 after Ctrl-C. Exits by SIGPIPE if the reader of the output has closed the pipe."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second Ctrl-C would print a traceback during the exit.
        if _is_first_rank():
            _print_error("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_error(text: str) -> None:
    print("gpipe: " + text.replace("\n", "\n       "), file=sys.stderr)
