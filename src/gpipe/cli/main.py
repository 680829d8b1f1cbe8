"""Runs the command `gpipe`."""

import sys
from collections.abc import Sequence

from tyro.extras import SubcommandApp

import gpipe
from gpipe.cli import exit_on_interrupt
from gpipe.cli.doctor import doctor
from gpipe.cli.explain import explain
from gpipe.cli.plan import plan
from gpipe.cli.report import report
from gpipe.cli.schedule import schedule
from gpipe.cli.train import evaluate, record, train_app, translate

EXAMPLES = {
    "": ("gpipe doctor", "gpipe train digits --partitions 2"),
    "train": ("gpipe train digits --partitions 2", "gpipe train translation --help"),
    "train digits": (
        "gpipe train digits --partitions 2 --out out/digits",
        "gpipe train digits --out out/digits --resume",
        "torchrun --nproc-per-node 2 -m gpipe train digits",
    ),
    "train images": (
        "gpipe train images --image-folder photos --partitions 2",
        "gpipe train images --config paper --image-folder imagenet --partitions 4",
    ),
    "train translation": (
        "gpipe train translation --partitions 2",
        "gpipe train translation --tsv sentences.tsv --languages de fr",
    ),
    "evaluate": ("gpipe evaluate out/digits", "gpipe evaluate out/a out/b"),
    "translate": ("echo 'Guten Tag' | gpipe translate --run out/translation",),
    "schedule": ("gpipe schedule 1f1b -k 4 -m 8", "gpipe schedule gpipe zb_h1 -k 4 -m 8 --svg schedules.svg"),
    "report": ("gpipe report out/digits", "gpipe report out/digits --text"),
    "record": ("torchrun --nproc-per-node 2 -m gpipe record out/digits --steps 3",),
    "plan": (
        "gpipe plan transformer_lm --size layers=103 --devices 8xtpuv3 --batch 32",
        "gpipe plan my_module:make_model --devices 4xa100 --batch 256",
    ),
    "doctor": ("gpipe doctor", "gpipe doctor --gpu --quick"),
    "explain": ("gpipe explain branch-on-value",),
}
"""Command lines that `--help` of each command prints."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with these arguments. Default: the arguments of the process.

    Exits with one of these statuses:

    - 0: success.
    - 1: another process failed, or a check of `gpipe doctor` failed.
    - 2: an error that the user can fix. The message says how.
    - 130 or 143: stopped by Ctrl-C or SIGTERM. A training saves a checkpoint first.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(f"gpipe {gpipe.__version__}")
        return
    app = SubcommandApp()
    summary = "Trains a model as a pipeline, and shows where the time of a step goes."
    app.command(train_app(given), name="train", help=summary)
    for function in (evaluate, translate, schedule, report, record, plan, doctor, explain):
        app.command(name=function.__name__)(function)
    with exit_on_interrupt():
        try:
            app.cli(prog="gpipe", args=given, description="Pipeline parallelism for PyTorch.")
        except SystemExit as end:
            if not end.code and {"-h", "--help"} & {*given}:
                command = next(name for n in (2, 1, 0) if (name := " ".join(given[:n])) in EXAMPLES)
                print("Examples:", *EXAMPLES[command], sep="\n  ")
            raise
