"""Implements `gpipe train`, with one subcommand per recipe, and `evaluate`, `record` and `translate` for its runs."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.extras import SubcommandApp

from gpipe.cli import exit_on_disk_errors, exit_on_remote_errors, exit_on_user_errors
from gpipe.recipes.options.files import options_before
from gpipe.recipes.options.training import OPTIONS, Count, OptionalCount, TrainOptions, check_bounds, optional

if TYPE_CHECKING:
    from gpipe.recipes.trained import Translator

LINES_AT_ONCE = 64  # Lines that are translated together, unless they are typed in a terminal.


def train_app(arguments: Sequence[str]) -> SubcommandApp:
    """Returns the subcommands of `gpipe train`.

    The options --config, --resume and --from name files. The values in these files become the defaults of the
    subcommand.
    """
    app = SubcommandApp()
    for name, options in OPTIONS.items():
        default = options()
        if list(arguments[:2]) == ["train", name]:
            with exit_on_user_errors():
                default = options_before(name, arguments[2:])
        app.command(name=name, help=options.__doc__)(_make_command(name, default))
    return app


def _make_command(name: str, default: TrainOptions) -> Callable[[TrainOptions], None]:
    def trainer(options: TrainOptions = default) -> None:
        _train(name, options)

    trainer.__annotations__["options"] = Annotated[type(default), tyro.conf.arg(name="")]
    return trainer


def _train(name: str, options: TrainOptions) -> None:
    with exit_on_user_errors():
        options.check()
    from gpipe.recipes.data.images import UnreadableImage
    from gpipe.recipes.prepare import prepare
    from gpipe.recipes.trained import RECIPES  # Imports torch, which takes a second, after --help and the check.
    from gpipe.recipes.training import run
    from gpipe.recipes.world import find_world, joined

    # If a process exited while the processes connect, the others would fail with less helpful errors.
    with exit_on_user_errors():
        world = find_world(os.environ)
        recipe = RECIPES[name](options.resolved(world.size if world.launched else None))
    with joined(world) as world, exit_on_remote_errors():
        with exit_on_user_errors():
            job = prepare(recipe, world=world)
        command = f"gpipe train {name} --out {shlex.quote(str(recipe.options.out))} --resume"
        remedy = f"Free space, and resume from the last checkpoint with\n  {command}"
        with exit_on_user_errors(UnreadableImage), exit_on_disk_errors(remedy):
            run(job)


def evaluate(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, optional("RUN [RUN ...]")],
    partitions: OptionalCount = None,
    beam: OptionalCount = None,
    sentences: OptionalCount = None,
) -> None:
    """Evaluates runs on data that was not used in training. Prints a table and writes RUN/evaluation.json.

    Args:
        runs: Folders of runs that `gpipe train` wrote. For several runs, also prints the mean and standard deviation
            of each metric.
        partitions: K: the number of partitions of the model. Default: 2, or the number of processes of torchrun. K
            does not change the results.
        beam: Number of beams of the beam search, for runs of the translation recipe. With 1, only greedy decoding.
            Default: the option of the run.
        sentences: Maximum number of test sentences per language, for runs of the translation recipe. Default: the
            option of the run.
    """
    changes = {"beam": beam, "sentences": sentences}
    with exit_on_user_errors():
        if not runs:
            raise ValueError("RUN: got no folder. Pass the folder of a run of `gpipe train`, such as out/digits.")
        check_bounds(evaluate, {"partitions": partitions, **changes})
        from gpipe.recipes.options.files import recipe_of
        from gpipe.recipes.trained import evaluate_run, spread
        from gpipe.recipes.world import find_world, joined

        for run in runs:
            recipe_of(run)
        world = find_world(os.environ)
    with joined(world), exit_on_remote_errors():
        evaluations = []
        for run in runs:
            with exit_on_user_errors():
                evaluations.append(evaluate_run(run, partitions, changes, world))
            if not world.rank:
                print(f"{run}: {evaluations[-1].text}\n" if len(runs) > 1 else evaluations[-1].text)
        if len(evaluations) > 1 and not world.rank:
            print(spread(evaluations))


def record(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    steps: Count = 10,
    partitions: OptionalCount = None,
) -> None:
    """Records the messages between the processes of torchrun in RUN/messages.jsonl, one JSON object per line.

    Args:
        run: Folder of a run that `gpipe train` wrote. The weights and checkpoints of the run do not change.
        steps: Number of training steps to record.
        partitions: K: the number of partitions of the model. Default: the number of processes.
    """
    with exit_on_user_errors():
        check_bounds(record, {"steps": steps, "partitions": partitions})
        from gpipe.recipes.world import find_world, joined

        world = find_world(os.environ)
        if not world.launched:
            command = f"torchrun --nproc-per-node 2 -m gpipe record {run}"
            raise ValueError(f"gpipe record: a single process sends no messages. Run several processes:\n{command}")
        from gpipe.recipes.trained import record_run
    with joined(world), exit_on_remote_errors(), exit_on_user_errors():
        summary = record_run(run, steps, partitions, world)
    if not world.rank:
        print(summary)


def translate(run: Path, beam: Count = 4, partitions: OptionalCount = None) -> None:
    """Translates each line of standard input to English, and prints one line per input line.

    Args:
        run: Folder of a run of `gpipe train translation`.
        beam: Number of beams of the beam search. With 1, greedy decoding.
        partitions: K: the number of partitions of the model. Default: 2. K does not change the translations.
    """
    with ExitStack() as stack:
        with exit_on_user_errors():
            check_bounds(translate, {"beam": beam, "partitions": partitions})
            from gpipe.recipes.prepare import WEIGHTS
            from gpipe.recipes.trained import opened_translator

            to_english = stack.enter_context(opened_translator(run, partitions, beam))
        if not (run / WEIGHTS).is_file():
            print(f"{run}: training has not finished. Using the latest checkpoint.", file=sys.stderr)
        with exit_on_user_errors():
            _translate(to_english)


def _translate(to_english: "Translator") -> None:
    """Prints the translation of each line of stdin. Raises a ValueError at a line that cannot be translated."""
    number = 1
    try:
        for lines in _chunks(1 if sys.stdin.isatty() else LINES_AT_ONCE):
            for english in to_english(lines):
                print(english, flush=True)
                number += 1
    except ValueError as error:
        raise ValueError(f"stdin, line {number}: {error}") from None


def _chunks(size: int) -> Iterator[list[str]]:
    """Yields the lines of stdin, `size` at a time. Raises a ValueError at the first line that is not UTF-8."""
    lines: list[str] = []
    for line in getattr(sys.stdin, "buffer", sys.stdin):
        try:
            lines.append((line.decode() if isinstance(line, bytes) else line).rstrip("\r\n"))
        except UnicodeDecodeError as error:
            yield lines
            raise ValueError(f"byte {error.start + 1} is not valid UTF-8. Convert the text to UTF-8.") from None
        if len(lines) == size:
            yield lines
            lines = []
    yield lines
