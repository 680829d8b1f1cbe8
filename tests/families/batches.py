"""What the families are trained on: drawn by a seed, with rows of different lengths."""

from typing import Any

import torch
from torch import Tensor

from tests.families.family import Family, Task, config_of, inputs_of
from tests.families.tiny import FIRST_WORD, PADDING, VOCABULARY

IGNORED = -100  # the label of what has no part in a loss
SAMPLES, FRAMES, VIDEO_FRAMES = 400, 60, 4

TEXT_TASKS = frozenset({Task.CAUSAL, Task.MASKED, Task.SEQ2SEQ, Task.SEQUENCE, Task.TOKENS, Task.ANSWERS})
SOUND_TASKS = frozenset({Task.SPEECH_SEQ2SEQ, Task.CTC, Task.AUDIO})


def batch(family: Family, rows: int = 8, length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """Inputs and labels: words or sounds with padding, pictures or videos."""
    generator = torch.Generator().manual_seed(seed)
    config = config_of(family)
    takes = inputs_of(family, config)
    words = words_of(rows, length, generator)
    if family.task in TEXT_TASKS:
        given = words | text_labels(family.task, words, generator)
    elif family.task in SOUND_TASKS:
        given = sounds(config, takes, rows, generator) | sound_labels(family.task, words, generator)
    else:
        given = pictures(family.task, config, rows, generator)
    return {name: value for name, value in given.items() if name in takes}


def words_of(rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Words, and which of them are real: rows lack from none to three at their end."""
    ids = torch.randint(FIRST_WORD, VOCABULARY, (rows, length), generator=generator)
    real = torch.arange(length) < length - torch.arange(rows)[:, None] % 4
    return {"input_ids": ids.where(real, PADDING), "attention_mask": real.long()}


def text_labels(task: Task, words: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    ids, real = words["input_ids"], words["attention_mask"].bool()
    match task:
        case Task.SEQUENCE:
            return {"labels": torch.randint(2, (len(ids),), generator=generator)}
        case Task.TOKENS:
            return {"labels": torch.randint(2, ids.shape, generator=generator).where(real, IGNORED)}
        case Task.ANSWERS:
            starts = torch.randint(4, (len(ids),), generator=generator)
            return {"start_positions": starts, "end_positions": starts + 2}
        case _:
            return {"labels": ids.where(real, IGNORED)}


def sounds(config: Any, takes: frozenset[str], rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Waves, or features of them, as the model takes."""
    if "input_values" in takes and not hasattr(config, "num_mel_bins"):
        wave = torch.randn(rows, SAMPLES, generator=generator)
        return {"input_values": wave}
    bins = config.num_mel_bins
    return {"input_features": torch.randn(rows, bins, FRAMES, generator=generator)}


def sound_labels(task: Task, words: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    if task is Task.AUDIO:
        return {"labels": torch.randint(2, (len(words["input_ids"]),), generator=generator)}
    return {"labels": words["input_ids"].where(words["attention_mask"].bool(), IGNORED)}


def pictures(task: Task, config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    frames = (VIDEO_FRAMES,) if task is Task.VIDEO else ()
    pixels = torch.randn(rows, *frames, channels, height, width, generator=generator)
    places = (height, width) if task is Task.SEGMENTATION else ()
    return {"pixel_values": pixels, "labels": torch.randint(2, (rows, *places), generator=generator)}
