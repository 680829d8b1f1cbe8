"""The command `gpipe` on few small images, so that an epoch is two steps: what tests run under torchrun."""

import sys
from functools import partial

from gpipe.cli import main
from gpipe.data import Digits, load_digits
from gpipe.train import digits as job
from gpipe.train.recipe import Recipe

BATCH_SIZE = 16
STEPS = 2


def few() -> Digits:
    digits = load_digits(size=32)
    return Digits(train=digits.train[: STEPS * BATCH_SIZE + 2], held_out=digits.held_out[:12])


if __name__ == "__main__":
    vars(job).update(load_digits=few, Recipe=partial(Recipe, batch_size=BATCH_SIZE))
    main(sys.argv[1:])
