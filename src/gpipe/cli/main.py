"""The command `gpipe`."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from gpipe.recipes.options import TrainOptions

PATIENCE = 5.0  # seconds in which the first process says what is wrong

app = SubcommandApp()
train = SubcommandApp()
app.command(train, name="train", help="Trains a network, partitioned and pipelined, and shows where the time went.")


@train.command(name="digits")
def digits(options: Annotated[TrainOptions, tyro.conf.arg(name="")] = TrainOptions()) -> None:  # noqa: B008 frozen
    """Trains AmoebaNet-D on scikit-learn's handwritten digits, 1797 real images, here of 64x64 pixels."""
    from gpipe.recipes import digits as job  # torch loads here, so that --help and mistyped options stay quick
    from gpipe.recipes.world import find_world, joined

    world = find_world(os.environ)
    with _mistakes():  # before the processes meet: who leaves meanwhile would have the others fail in a worse way
        options = options.settled(world.size if world.launched else None)
    with joined(world), _failures_elsewhere():
        with _mistakes():
            prepared = job.prepare(options, world=world)
        job.run(prepared)


@contextmanager
def _mistakes() -> Iterator[None]:
    """Ends the command with what is wrong and what to do; a traceback would say nothing more to its user.

    Most mistakes are those of all processes, and torchrun ends the others when the first has said it.
    """
    try:
        yield
    except (ValueError, ImportError, OSError) as mistake:
        if not _talks():
            time.sleep(PATIENCE)
        _say(str(mistake))
        sys.exit(2)


@contextmanager
def _failures_elsewhere() -> Iterator[None]:
    """Ends the command after a failure in another process, which shows the traceback."""
    import gpipe

    try:
        yield
    except gpipe.RemoteError as failure:
        if _talks():
            _say(str(failure))
        sys.exit(1)


def _talks() -> bool:
    """Whether this is the only process, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    print("gpipe: " + text.replace("\n", "\n       "), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Mistakes of its user end it with a message and status 2, a failure in another process with status 1, SIGTERM in a
    training, which is saved, with status 143, and Ctrl-C with status 130.
    """
    try:
        app.cli(prog="gpipe", args=arguments, description="Pipeline parallelism for PyTorch.")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending; a second Ctrl-C would only mar it
        if _talks():
            _say("interrupted")
        sys.exit(130)
