"""Runs the command `gpipe`, by way of its subcommands."""

import sys
from collections.abc import Sequence

from tyro.extras import SubcommandApp

import gpipe
from gpipe.cli import ending_by_interrupt
from gpipe.cli.doctor import doctor
from gpipe.cli.explain import explain
from gpipe.cli.plan import plan
from gpipe.cli.report import report
from gpipe.cli.schedule import schedule
from gpipe.cli.train import evaluate, record, train_app, translate


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Mistakes of its user end it with a message and status 2, a failure in another process with status 1, SIGTERM in a
    training with 143, and Ctrl-C with 130; either saves a training.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(f"gpipe {gpipe.__version__}")
        return
    app = SubcommandApp()
    words = "Trains a network, partitioned and pipelined, and shows where the time went."
    app.command(train_app(given), name="train", help=words)
    for command in (evaluate, translate, schedule, report, record, plan, doctor, explain):
        app.command(name=command.__name__)(command)
    with ending_by_interrupt():
        app.cli(prog="gpipe", args=given, description="Pipeline parallelism for PyTorch.")
