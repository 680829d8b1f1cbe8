import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from gpipe.recipes.options.training import OPTIONS, DigitsOptions, ImagesOptions, TrainOptions
from gpipe.schedule.schedules import SCHEDULES


def test_all_options_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="--epochs: -1 is out of range") as refusal:
        ImagesOptions(micro_batches=0, layers=3, filters=8, epochs=-1, seed=-2, batch_size=0, ema=1).check()
    assert str(refusal.value).splitlines() == [
        "--micro-batches: 0 is out of range. Choose at least 1.",
        "--epochs: -1 is out of range. Choose at least 1.",
        "--seed: -2 is out of range. Choose at least 0 and less than 2^63.",
        "--filters: 8 is out of range. Choose at least 16.",
        "--batch-size: 0 is out of range. Choose at least 1.",
        "--ema: 1 is out of range. Choose at least 0 and less than 1.",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"classes": ("1",)}, "--classes: 1 is not a list of different classes"),
        ({"classes": ("1", "2", "1")}, "--classes: 1 2 1 is not a list of different classes"),
        ({"classes": ("1", "cat")}, "--classes: cat is not a digit"),
        ({"cutout": 65}, "--cutout: 65 is out of range. Choose 0 to 64"),
        ({"crop": 0.5}, "--crop: 0.5 requires --image-folder"),
        ({"crop": 0.0, "image_folder": Path()}, "--crop: 0.0 is out of range"),
        ({"drop_path": 0.0}, "--drop-path: 0.0 is out of range"),
        ({"label_smoothing": 1.0}, "--label-smoothing: 1.0 is out of range"),
        ({"learning_rate": float("inf")}, "--learning-rate: inf is out of range. Choose a finite number"),
        ({"weight_decay": float("nan")}, "--weight-decay: nan is out of range"),
        ({"seed": 2**70}, f"--seed: {2**70} is out of range"),
        ({"per_class": 0}, "--per-class: 0 is out of range"),
        ({"bf16": True, "image_size": 18}, "--image-size: 18 is too small for --bf16"),
        ({"image_size": 15}, "--image-size: 15 is out of range"),
        ({"plan": "auto", "schedule": "1f1b"}, "--plan: auto cannot be combined with --schedule"),
        ({"paper": True, "remat": "never"}, "Remove --remat, or --paper"),
        ({"paper": True, "plan": "auto"}, "Remove --plan, or --paper"),
        ({"from_": Path("here"), "out": Path("here")}, "--out: here is also the folder of --from"),
    ],
)
def test_what_images_cannot_be_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as refusal:
        replace(DigitsOptions(), **changes).check()
    assert len(str(refusal.value).splitlines()) == 1


def test_the_defaults_are_legal_and_every_schedule_can_be_trained_by() -> None:
    for options in OPTIONS.values():
        options().check()
    assert get_args(get_type_hints(TrainOptions)["schedule"]) == tuple(SCHEDULES)
