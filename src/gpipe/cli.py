"""The command `gpipe`."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from gpipe.train.options import TrainOptions

app = SubcommandApp()
train = SubcommandApp()
app.command(train, name="train", help="Trains a network, partitioned and pipelined, and shows where the time went.")


@train.command(name="digits")
def digits(options: Annotated[TrainOptions, tyro.conf.arg(name="")] = TrainOptions()) -> None:  # noqa: B008 frozen
    """Trains AmoebaNet-D on scikit-learn's handwritten digits, 1797 real images, here of 64x64 pixels."""
    from gpipe.train import digits as job  # torch loads here, so that --help and mistyped options stay quick

    with _mistakes():
        prepared = job.prepare(options)
    job.run(prepared)


@contextmanager
def _mistakes() -> Iterator[None]:
    """Ends the command with what is wrong and what to do; a traceback would say nothing more to its user."""
    try:
        yield
    except (ValueError, ImportError, OSError) as mistake:
        print("gpipe: " + str(mistake).replace("\n", "\n       "), file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. Mistakes of its user end it with a message and status 2, Ctrl-C with status 130."""
    try:
        app.cli(prog="gpipe", args=arguments, description="Pipeline parallelism for PyTorch.")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending; a second Ctrl-C would only mar it
        print("gpipe: interrupted", file=sys.stderr)
        sys.exit(130)
