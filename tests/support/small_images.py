"""Trainings of a small network on few digits, in this process."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from gpipe.recipes.images import DigitsRecipe
from gpipe.recipes.options.training import ImagesOptions, TrainOptions, flag
from gpipe.recipes.prepare import Epoch, Job, prepare
from gpipe.recipes.recipe import Recipe
from gpipe.recipes.training import run

OPTIONS = ImagesOptions(
    filters=16, image_size=16, classes=("0", "1", "2"), per_class=6, batch_size=8, micro_batches=2, epochs=1
)
"""An epoch is two steps."""
EVERYTHING = replace(
    OPTIONS,
    image_size=67,  # the least for an auxiliary head
    flip=True,
    cutout=9,
    aux_head=0.4,
    drop_path=0.7,
    label_smoothing=0.1,
    optimizer="rmsprop",
    learning_rate=0.02,
    weight_decay=1e-2,
    warm_up=0.5,
    decay="exponential",
    decay_rate=0.5,
    decay_epochs=1.0,
    ema=0.15,
)
"""All that can be on is on."""


def prepared(options: ImagesOptions, recipe: type[Recipe[Any]] = DigitsRecipe) -> Job:
    """A job whose layers are not measured."""
    settled = options.resolved()
    return prepare(recipe(settled), measure=False)


def train(
    options: ImagesOptions, recipe: type[Recipe[Any]] = DigitsRecipe, *, terminal: bool = False
) -> tuple[list[Epoch], str]:
    """Trains; gives the epochs and what was shown."""
    file = io.StringIO()
    job = prepared(options, recipe)
    return run(job, Console(file=file, width=80, force_terminal=terminal)), file.getvalue()


def shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("epoch")]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def flags(options: TrainOptions) -> list[str]:
    """What to tell the command for options that are no defaults."""
    default = type(options)()
    told: list[str] = []
    for name, value in vars(options).items():
        if value == getattr(default, name):
            continue
        match value:
            case bool():
                told.append(flag(name) if value else f"--no-{name}")
            case tuple():
                told += [flag(name), *map(str, value)]
            case _:
                told += [flag(name), str(value)]
    return told
