"""The command `gpipe`: one module for each of its commands.

They end by a message and a status where a traceback would say nothing more to their user.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 5.0  # seconds in which the first process says what is wrong in all, and torchrun then ends the others


@contextmanager
def ending_by_mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the command with what its user did wrong and what to do, and status 2."""
    kinds = kinds or (ValueError, ImportError, OSError)
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as mistake:
        if not _talks():
            time.sleep(PATIENCE)
        _say(str(mistake))
        sys.exit(2)


@contextmanager
def ending_by_failures_elsewhere() -> Iterator[None]:
    """Ends the command with status 1 after a failure in another process, which shows the traceback."""
    import gpipe

    try:
        yield
    except gpipe.RemoteError as failure:
        if _talks():
            _say(str(failure))
        sys.exit(1)


@contextmanager
def ending_by_interrupt() -> Iterator[None]:
    """Ends the command with status 130 after Ctrl-C, and by SIGPIPE when nobody reads what it writes any more."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending; a second Ctrl-C would only mar it
        if _talks():
            _say("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # whoever read has enough
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def _talks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    print("gpipe: " + text.replace("\n", "\n       "), file=sys.stderr)
