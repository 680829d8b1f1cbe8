"""The command `gpipe train`: a subcommand for each recipe."""

import os
from typing import Annotated

import tyro
from tyro.extras import SubcommandApp

from gpipe.cli.ending import ending_by_failures_elsewhere, ending_by_mistakes
from gpipe.recipes.options import TrainOptions

train = SubcommandApp()


@train.command(name="digits")
def digits(options: Annotated[TrainOptions, tyro.conf.arg(name="")] = TrainOptions()) -> None:  # noqa: B008 frozen
    """Trains AmoebaNet-D on scikit-learn's handwritten digits, 1797 real images, here of 64x64 pixels."""
    with ending_by_mistakes():
        options.check()
    from gpipe.recipes import digits as job  # torch loads here, so that --help and mistakes stay quick
    from gpipe.recipes.world import find_world, joined

    world = find_world(os.environ)
    with ending_by_mistakes():  # before the processes meet: who leaves meanwhile would have the others fail worse
        options = options.settled(world.size if world.launched else None)
    with joined(world), ending_by_failures_elsewhere():
        with ending_by_mistakes():
            prepared = job.prepare(options, world=world)
        job.run(prepared)
