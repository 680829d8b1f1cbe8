"""The command `gpipe train`, a subcommand for each recipe; and `evaluate`, `record` and `translate` for its runs."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.extras import SubcommandApp

from gpipe.cli import ending_by_failures_elsewhere, ending_by_mistakes
from gpipe.recipes.options.files import options_before
from gpipe.recipes.options.training import OPTIONS, Count, TrainOptions, out_of_bounds, refuse

if TYPE_CHECKING:
    from gpipe.recipes.trained import Translator

AT_ONCE = 64  # lines that are read before they are translated, unless somebody types them


def train_app(arguments: Sequence[str]) -> SubcommandApp:
    """The subcommands of `gpipe train`; of the one that is called, defaults are those of the files it is sent to."""
    app = SubcommandApp()
    for name, options in OPTIONS.items():
        default = options()
        if list(arguments[:2]) == ["train", name]:
            with ending_by_mistakes():
                default = options_before(name, arguments[2:])
        app.command(name=name, help=options.__doc__)(_trainer(name, default))
    return app


def _trainer(name: str, default: TrainOptions) -> Callable[[TrainOptions], None]:
    def trainer(options: TrainOptions = default) -> None:
        _train(name, options)

    trainer.__annotations__["options"] = Annotated[type(default), tyro.conf.arg(name="")]
    return trainer


def _train(name: str, options: TrainOptions) -> None:
    with ending_by_mistakes():
        options.check()
    from gpipe.recipes.data.images import UnreadableImage
    from gpipe.recipes.prepare import prepare
    from gpipe.recipes.trained import RECIPES  # torch loads here, so that --help and mistakes stay quick
    from gpipe.recipes.training import run
    from gpipe.recipes.world import find_world, joined

    world = find_world(os.environ)
    with ending_by_mistakes():  # before the processes meet: who leaves meanwhile would have the others fail worse
        recipe = RECIPES[name](options.settled(world.size if world.launched else None))
    with joined(world), ending_by_failures_elsewhere():
        with ending_by_mistakes():
            job = prepare(recipe, world=world)
        with ending_by_mistakes(UnreadableImage):
            run(job)


def evaluate(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")],
    partitions: Count | None = None,
    beam: Count | None = None,
    sentences: Count | None = None,
) -> None:
    """Evaluates a run on data that its training has not seen: a table, and RUN/evaluation.json.

    Args:
        runs: The folders of runs of `gpipe train`; of several the mean and the spread are printed too.
        partitions: K: how many partitions the network is cut into; by default 2, or under torchrun as many as there
            are processes. Numbers do not depend on it.
        beam: Of a translation, how many translations of a sentence are followed at once, beside the greedy one; 1:
            none.
        sentences: Of a translation, how many sentences of each language are translated at most; by default all of
            the test.
    """
    changes = {"beam": beam, "sentences": sentences}
    with ending_by_mistakes():
        if not runs:
            raise ValueError("give the folder of a run, such as out/digits; `gpipe train` writes it")
        refuse(out_of_bounds(evaluate, {"partitions": partitions, **changes}))
        from gpipe.recipes.options.files import recipe_of
        from gpipe.recipes.trained import evaluate_run, spread
        from gpipe.recipes.world import find_world, joined

        for run in runs:
            recipe_of(run)
    world = find_world(os.environ)
    with joined(world), ending_by_failures_elsewhere():
        found = []
        for run in runs:
            with ending_by_mistakes():
                found.append(evaluate_run(run, partitions, changes, world))
            if not world.rank:
                print(f"{run}: {found[-1].text}\n" if len(runs) > 1 else found[-1].text)
        if len(found) > 1 and not world.rank:
            print(spread(found))


def record(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    steps: Count = 10,
    partitions: Count | None = None,
) -> None:
    """Writes each message between the processes of torchrun as a line of JSON, to RUN/messages.jsonl.

    Args:
        run: The folder of a run of `gpipe train`.
        steps: How many mini-batches are trained on meanwhile; the run stays as it is.
        partitions: K: how many partitions the network is cut into; by default as many as there are processes.
    """
    with ending_by_mistakes():
        refuse(out_of_bounds(record, {"steps": steps, "partitions": partitions}))
        from gpipe.recipes.world import find_world, joined

        world = find_world(os.environ)
        if not world.launched:
            remedy = f"run it by torchrun, say\ntorchrun --nproc-per-node 2 -m gpipe record {run}"
            raise ValueError(f"within one process nothing crosses: {remedy}")
        from gpipe.recipes.trained import record_run
    with joined(world), ending_by_failures_elsewhere(), ending_by_mistakes():
        said = record_run(run, steps, partitions, world)
    if not world.rank:
        print(said)


def translate(run: Path, beam: Count = 4, partitions: Count | None = None) -> None:
    """Translates each line of stdin to English, a line of stdout each.

    Args:
        run: The folder of a run of `gpipe train translation`.
        beam: How many translations are followed at once; 1: the likeliest word is taken each time.
        partitions: K: how many partitions the network is cut into; by default 2. Translations do not depend on it.
    """
    with ExitStack() as stack:
        with ending_by_mistakes():
            refuse(out_of_bounds(translate, {"beam": beam, "partitions": partitions}))
            from gpipe.recipes.prepare import WEIGHTS
            from gpipe.recipes.trained import opened_translator

            to_english = stack.enter_context(opened_translator(run, partitions, beam))
        if not (run / WEIGHTS).is_file():
            print(f"{run} has not ended: by the weights of its latest checkpoint", file=sys.stderr)
        with ending_by_mistakes():
            _translate(to_english)


def _translate(to_english: "Translator") -> None:
    """Prints a line for each of stdin, up to one that cannot be translated."""
    number = 1
    try:
        for lines in _chunks(1 if sys.stdin.isatty() else AT_ONCE):
            for english in to_english(lines):
                print(english, flush=True)
                number += 1
    except ValueError as mistake:
        raise ValueError(f"line {number} of stdin: {mistake}") from None


def _chunks(size: int) -> Iterator[list[str]]:
    """The lines of stdin, so many at once; a ValueError comes after those before a line that is no UTF-8."""
    lines: list[str] = []
    for line in getattr(sys.stdin, "buffer", sys.stdin):
        try:
            lines.append((line.decode() if isinstance(line, bytes) else line).rstrip("\r\n"))
        except UnicodeDecodeError as error:
            yield lines
            raise ValueError(f"it is no UTF-8, from byte {error.start + 1} on") from None
        if len(lines) == size:
            yield lines
            lines = []
    yield lines
