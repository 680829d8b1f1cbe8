"""Runs the command `gpipe`."""

import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from tyro.extras import SubcommandApp

import gpipe
from gpipe.cli import exit_on_interrupt, exit_on_user_errors
from gpipe.cli.doctor import doctor
from gpipe.cli.explain import explain
from gpipe.cli.plan import plan
from gpipe.cli.report import report
from gpipe.cli.schedule import schedule
from gpipe.cli.train import evaluate, record, train_app, translate
from gpipe.recipes.options.training import OPTIONS

EXAMPLES = """\
  gpipe train digits --partitions 2 --out out/digits
  gpipe train digits --out out/digits --resume
  torchrun --nproc-per-node 2 -m gpipe train digits
  gpipe train images --image-folder photos --partitions 2
  gpipe train images --image-folder imagenet --partitions 4 --config paper
  gpipe train translation --tsv sentences.tsv --languages de fr
  gpipe evaluate out/digits out/digits2
  echo 'Guten Tag' | gpipe translate --run out/translation
  gpipe schedule 1f1b -k 4 -m 8
  gpipe schedule gpipe zb_h1 -k 4 -m 8 --svg schedules.svg
  gpipe report out/digits
  gpipe report out/digits --text
  torchrun --nproc-per-node 2 -m gpipe record out/digits --steps 3
  gpipe plan transformer_lm --size layers=103 --devices 8xtpuv3 --batch 32
  gpipe plan my_module:make_model --devices 4xa100 --batch 256
  gpipe doctor
  gpipe doctor --gpu --quick
  gpipe explain branch-on-value"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with these arguments. Default: the arguments of the process.

    Exits with one of these statuses:

    - 0: success.
    - 1: another process failed, or a check of `gpipe doctor` failed.
    - 2: an error that the user can fix. The message explains the fix.
    - 130 or 143: stopped by Ctrl-C or SIGTERM. `gpipe train` saves a checkpoint first.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"gpipe {gpipe.__version__}")
        return
    commands = (evaluate, translate, schedule, report, record, plan, doctor, explain)
    with exit_on_user_errors():
        _check_name("gpipe", arguments, ["train", *(function.__name__ for function in commands)])
        if arguments[:1] == ["train"]:
            _check_name("gpipe train", arguments[1:], OPTIONS)
    app = SubcommandApp()
    summary = "Trains a model as a pipeline, and shows where the time of a step goes."
    app.command(train_app(arguments), name="train", help=summary)
    for function in commands:
        function.__doc__ = re.sub(r"\n {12}", " ", function.__doc__ or "")  # tyro would print these line breaks.
        app.command(name=function.__name__)(function)
    with exit_on_interrupt():
        try:
            app.cli(prog="gpipe", args=arguments, description="Pipeline parallelism for PyTorch.")
        except SystemExit as end:
            if not end.code and {"-h", "--help"} & {*arguments}:
                words = arguments[:2] if arguments[0] == "train" else arguments[:1]
                command = " ".join(["gpipe", *filter(str.isalpha, words)])
                print("Examples:", *(line for line in EXAMPLES.splitlines() if command in line), sep="\n")
            raise


def _check_name(command: str, arguments: Sequence[str], names: Collection[str]) -> None:
    """Raises a ValueError if the first argument is neither one of these subcommands nor an option."""
    name = next(iter(arguments), "--help")
    if name.startswith("-") or name in names:
        return
    close = get_close_matches(name, names, 1)
    fix = f"Did you mean `{command} {close[0]}`?" if close else f"Choose one of {', '.join(names)}."
    raise ValueError(f"{name!r} is not a command of `{command}`. {fix}")
