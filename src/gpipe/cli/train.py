"""The command `gpipe train`: a subcommand for each recipe."""

import os
from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from gpipe.cli.ending import ending_by_failures_elsewhere, ending_by_mistakes
from gpipe.recipes.options.files import OPTIONS, expanded
from gpipe.recipes.options.images import DigitsOptions, ImagesOptions
from gpipe.recipes.options.training import TrainOptions
from gpipe.recipes.options.translation import TranslationOptions

train = SubcommandApp()
own_names = tyro.conf.arg(name="")


@train.command(name="digits")
def digits(options: Annotated[DigitsOptions, own_names] = DigitsOptions()) -> None:  # noqa: B008 frozen
    """Trains AmoebaNet on scikit-learn's handwritten digits, 1797 real images, here of 64x64 pixels."""
    _train("digits", options)


@train.command(name="images")
def images(options: Annotated[ImagesOptions, own_names] = ImagesOptions()) -> None:  # noqa: B008 frozen
    """Trains AmoebaNet on a folder that has a folder of images for each class; --config paper: as the paper does."""
    _train("images", options)


@train.command(name="translation")
def translation(options: Annotated[TranslationOptions, own_names] = TranslationOptions()) -> None:  # noqa: B008 frozen
    """Trains one Transformer to translate from many languages to English."""
    _train("translation", options)


def with_files(arguments: Sequence[str]) -> list[str]:
    """Puts what files say, to which `--config`, `--resume` and `--from` send, in front of a training's flags."""
    if len(arguments) < 2 or arguments[0] != "train" or arguments[1] not in OPTIONS:
        return list(arguments)
    command, recipe, *given = arguments
    with ending_by_mistakes():
        return [command, recipe, *expanded(recipe, OPTIONS[recipe], given)]


def _train(name: str, options: TrainOptions) -> None:
    with ending_by_mistakes():
        options.check()
    from gpipe.recipes.by_name import make_recipe  # torch loads here, so that --help and mistakes stay quick
    from gpipe.recipes.data import UnreadableImage
    from gpipe.recipes.prepare import prepare
    from gpipe.recipes.training import run
    from gpipe.recipes.world import find_world, joined

    world = find_world(os.environ)
    with ending_by_mistakes():  # before the processes meet: who leaves meanwhile would have the others fail worse
        recipe = make_recipe(name, options.settled(world.size if world.launched else None))
    with joined(world), ending_by_failures_elsewhere():
        with ending_by_mistakes():
            job = prepare(recipe, world=world)
        with ending_by_mistakes(UnreadableImage):
            run(job)
