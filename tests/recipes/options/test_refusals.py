import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from gpipe.recipes.options.training import OPTIONS, DigitsOptions, ImagesOptions, TrainOptions
from gpipe.schedule.schedules import SCHEDULES


def test_all_options_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="--epochs is -1: choose 1 or more") as refusal:
        ImagesOptions(micro_batches=0, layers=3, filters=8, epochs=-1, seed=-2, batch_size=0, ema=1).check()
    assert str(refusal.value).splitlines() == [
        "--micro-batches is 0: choose 1 or more",
        "--epochs is -1: choose 1 or more",
        "--seed is -2: choose 0 to less than 2^63",
        "--filters is 8: choose 16 or more; cells have as few as a sixteenth of them",
        "--batch-size is 0: choose 1 or more",
        "--ema is 1: choose 0 to less than 1",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"classes": ("1",)}, "--classes is 1: choose two or more, each once"),
        ({"classes": ("1", "2", "1")}, "--classes is 1 2 1: choose two or more, each once"),
        ({"classes": ("1", "cat")}, "--classes has cat, which is no digit: choose of 0 to 9"),
        ({"cutout": 65}, "--cutout is 65: choose 0 to 64, --image-size"),
        ({"crop": 0.5}, "--crop is for --image-folder: digits fill their images"),
        ({"crop": 0.0, "image_folder": Path()}, "--crop is 0.0: choose more than 0 to 1"),
        ({"drop_path": 0.0}, "--drop-path is 0.0: choose more than 0 to 1"),
        ({"label_smoothing": 1.0}, "--label-smoothing is 1.0: choose 0 to less than 1"),
        ({"learning_rate": float("inf")}, "--learning-rate is inf: choose more than 0"),
        ({"weight_decay": float("nan")}, "--weight-decay is nan: choose 0 or more"),
        ({"seed": 2**70}, f"--seed is {2**70}: choose 0 to less than 2^63"),
        ({"per_class": 0}, "--per-class is 0: choose 1 or more"),
        ({"bf16": True, "image_size": 18}, "--bf16 needs images of 19 pixels or more, and --image-size is 18"),
        ({"image_size": 15}, "--image-size is 15: choose 16 or more"),
        ({"plan": "auto", "schedule": "1f1b"}, "--plan auto chooses --schedule itself"),
        ({"paper": True, "remat": "never"}, "leave --remat out, or --paper"),
        ({"paper": True, "plan": "auto"}, "leave --plan out, or --paper"),
        ({"from_": Path("here"), "out": Path("here")}, "--from and --out are here both: choose another folder"),
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
