"""Random training batches for the families, with rows of different lengths."""

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import Tensor

from tests.families.family import Family, Task, inputs_of
from tests.families.tiny import BINS, FIRST_WORD, IMAGE, PADDING, PATCH, POSITIONS, VOCABULARY

IGNORED = -100  # the label of what has no part in a loss
CLASSES = 2
SHAPES: Mapping[Task, Mapping[str, tuple[int, ...]]] = {
    Task.AUDIO: {"input_values": (400,)},
    Task.CTC: {"input_values": (400,)},
    Task.SPEECH_SEQ2SEQ: {"input_features": (BINS, 2 * POSITIONS)},
    Task.IMAGE: {"pixel_values": (3, IMAGE, IMAGE)},
    Task.SEGMENTATION: {"pixel_values": (3, IMAGE, IMAGE)},
    Task.VIDEO: {"pixel_values": (8, 3, IMAGE, IMAGE)},
    Task.IMAGE_TEXT: {"pixel_values": (3, IMAGE, IMAGE)},
}
"""What a task's models take beside words: the shape of one row."""
SOUNDS = frozenset({Task.AUDIO, Task.CTC, Task.SPEECH_SEQ2SEQ})
PICTURES = frozenset({Task.IMAGE, Task.VIDEO, Task.SEGMENTATION})
PICTURE_WORD, PICTURE_WORDS = VOCABULARY - 1, (IMAGE // PATCH) ** 2


def batch(family: Family, rows: int = 8, length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """Inputs and labels: words, sounds, pictures or videos; what has a length has another in each of four rows.

    >>> from tests.families.catalogue import named
    >>> {name: [*value.shape] for name, value in batch(named("bert")).items()}
    {'input_ids': [8, 12], 'attention_mask': [8, 12], 'labels': [8, 12]}
    """
    generator = torch.Generator().manual_seed(seed)
    words, real = words_of(rows, length, generator)
    shapes = family.inputs or SHAPES.get(family.task, {})
    given = {name: torch.randn(rows, *shape, generator=generator) for name, shape in shapes.items()}
    if family.task in SOUNDS:
        given |= heard(given)
    elif family.task is Task.IMAGE_TEXT:
        given |= illustrated(words, real)
    elif family.task not in PICTURES:
        given |= {"input_ids": words, "attention_mask": real.long()}
    given |= targets(family.task, words, real, generator)
    takes = inputs_of(family)
    return {name: value for name, value in given.items() if name in takes}


def real_places(rows: int, length: int, step: int = 1) -> Tensor:
    """Returns a mask of the real steps: up to three steps at the end of each row are padding."""
    return torch.arange(length) < length - torch.arange(rows)[:, None] % 4 * step


def words_of(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns tokens with padding, and their mask."""
    real = real_places(rows, length)
    words = torch.randint(FIRST_WORD, PICTURE_WORD, (rows, length), generator=generator)
    return words.where(real, PADDING), real


def targets(task: Task, words: Tensor, real: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns the targets of the loss of a task."""
    rows, length = words.shape
    match task:
        case Task.SEQUENCE | Task.AUDIO | Task.IMAGE | Task.VIDEO:
            return {"labels": torch.randint(CLASSES, (rows,), generator=generator)}
        case Task.SEGMENTATION:
            return {"labels": torch.randint(CLASSES, (rows, IMAGE, IMAGE), generator=generator)}
        case Task.TOKENS:
            return {"labels": torch.randint(CLASSES, (rows, length), generator=generator).where(real, IGNORED)}
        case Task.ANSWERS:
            starts = torch.randint(length // 2, (rows,), generator=generator)
            return {"start_positions": starts, "end_positions": starts + 2}
        case Task.IMAGE_TEXT:
            shown = torch.full((rows, PICTURE_WORDS), IGNORED)
            return {"labels": torch.cat([shown, words.where(real, IGNORED)], dim=1)}
        case Task.CAUSAL | Task.MASKED | Task.SEQ2SEQ | Task.SPEECH_SEQ2SEQ | Task.CTC:
            return {"labels": words.where(real, IGNORED)}
        case _:
            assert_never(task)


def heard(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a mask of the real time steps of waves, or of features whose longer dimension is time."""
    sounds = given.get("input_features", given.get("input_values"))
    if sounds is None or ("input_values" in given and sounds.dim() > 2):  # a spectrogram taken for a picture
        return {}
    moments = max(sounds.shape[1:])
    return {"attention_mask": real_places(len(sounds), moments, moments // 16).long()}


def illustrated(words: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Returns tokens after placeholder tokens for the parts of a picture."""
    shown = torch.full((len(words), PICTURE_WORDS), PICTURE_WORD)
    return {
        "input_ids": torch.cat([shown, words], dim=1),
        "attention_mask": torch.cat([torch.ones_like(shown), real.long()], dim=1),
    }
