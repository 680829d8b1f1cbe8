"""Splits batches of vision-language models, in which the first dimension of images is not the rows.

A processor concatenates the images of all rows, or the patches of all images. The number of images of a row follows
from its tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

import gpipe
from gpipe.errors import is_count

Unit: TypeAlias = Literal["images", "patches", "rows_in_dim_1"]
GRID: Mapping[str, Unit] = {
    "pixel_values": "patches",
    "image_grid_thw": "images",
    "position_ids": "rows_in_dim_1",
}
IMAGES: Mapping[str, Unit] = {"pixel_values": "images", "image_sizes": "images"}
RULES: Mapping[str, Mapping[str, Unit]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), GRID),
    **dict.fromkeys(("llava", "gemma3", "internvl", "paligemma", "llava_next", "mistral3"), IMAGES),
    "idefics3": {},
    "smolvlm": {},
}
"""The unit of the first dimension of each tensor, by the `model_type` of a family. Other tensors have rows first."""


def split_images(
    model: Any,
    batch: Mapping[str, Any],
    micro_batches: int,
    *,
    images: Tensor | Sequence[int] | None = None,
    rules: Mapping[str, Unit] | None = None,
) -> gpipe.MicroBatches:
    """Splits a batch of a vision-language model of transformers into micro-batches.

    Rows are split like `torch.tensor_split`. For models that compute 3D positions (`get_rope_index`), adds
    `position_ids` if they are missing, because a pipe cannot keep the state that the model stores otherwise.

    Args:
        model: The model. Its `config` has the family and the image token.
        batch: A batch of the processor, with `input_ids` [rows, tokens].
        micro_batches: M, the maximum number of micro-batches.
        images: The number of images in each row [rows]. Default: counted from the image tokens. Each image must have
            the same number of tokens, or the number that `image_grid_thw` determines.
        rules: The unit of the first dimension of a tensor, by the name of the tensor:

            - `"images"`: images.
            - `"patches"`: patches of images, whose numbers are the products of the rows of `image_grid_thw`.
            - `"rows_in_dim_1"`: any, because the second dimension has the rows.

            Names must be in the batch or in `RULES`. Default: the rules of the family in `RULES`.

    Returns:
        The micro-batches, for `pipe.step` and `sample=`.

    Raises:
        ValueError: If the family has no rules, if the tokens and images of the batch do not match, or if an argument
            is invalid.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(config=SimpleNamespace(model_type="llava", image_token_id=9))
    >>> batch = {"input_ids": torch.tensor([[9, 9, 1], [1, 1, 1], [9, 9, 1]]), "pixel_values": torch.rand(2, 3, 8, 8)}
    >>> [part["pixel_values"].shape[0] for part in split_images(model, batch, micro_batches=2)]
    [1, 1]
    """
    family = model.config.model_type
    if rules is None:
        if family not in RULES:
            raise ValueError(
                f"model= is of the family {family!r}, whose batches gpipe cannot split. Pass rules=, or split the "
                f"batch yourself: gpipe.MicroBatches([first, second, ...]). [rows-differ]"
            )
        rules = RULES[family]
    images = None if images is None else torch.as_tensor(images)
    if mistakes := _find_mistakes(batch, micro_batches, images, rules):
        raise ValueError("\n".join(mistakes))
    batch, ids = dict(batch), batch["input_ids"]
    if hasattr(getattr(model, "model", None), "get_rope_index") and batch.get("position_ids") is None:
        names = ("image_grid_thw", "video_grid_thw", "attention_mask", "mm_token_type_ids")
        given = {name: batch[name] for name in names if batch.get(name) is not None}
        batch["position_ids"] = model.model.get_rope_index(ids, **given)[0]
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    units = {name: rules.get(name, "rows") for name in tensors}
    ends = _ends_of_rows(model.config, batch, units, images)
    for name, value in tensors.items():
        dimension = int(units[name] == "rows_in_dim_1")
        unit = "rows" if dimension else units[name]
        if dimension and value.dim() < 3:  # Position IDs [rows, tokens] would be split along the tokens.
            mistakes.append(
                f"batch[{name!r}] has shape {tuple(value.shape)}, but rules[{name!r}]={units[name]!r} needs a shape "
                f"like [3, rows, tokens]. Pass this shape, or leave {name!r} out. [rows-differ]"
            )
        elif value.shape[dimension] != (count := int(ends[unit][-1])):
            mistakes.append(
                f"batch[{name!r}] has shape {tuple(value.shape)}, but the batch has {count} {unit}. Correct "
                f"rules[{name!r}] or images=. [rows-differ]"
            )
    if mistakes:
        raise ValueError("\n".join(mistakes))

    def part(first: int, end: int) -> dict[str, Any]:
        taken = dict(batch)
        for name, value in tensors.items():
            if units[name] == "rows_in_dim_1":
                taken[name] = value[:, first:end]
            else:
                taken[name] = value[ends[units[name]][first] : ends[units[name]][end]]
        return {name: value for name, value in taken.items() if name not in tensors or value.numel()}

    sections = torch.arange(len(ids)).tensor_split(min(micro_batches, len(ids)))
    return gpipe.MicroBatches(part(int(rows[0]), int(rows[-1]) + 1) for rows in sections)


def _find_mistakes(
    batch: Mapping[str, Any], micro_batches: int, images: Tensor | None, rules: Mapping[str, str]
) -> list[str]:
    """Returns a message for each invalid argument."""
    mistakes = []
    if not is_count(micro_batches):
        mistakes.append(f"micro_batches={micro_batches!r} is invalid. Pass the number of micro-batches, at least 1.")
    mistakes += [
        f"rules[{name!r}]={unit!r} is unknown. Use one of {', '.join(map(repr, get_args(Unit)))}."
        for name, unit in rules.items()
        if unit not in get_args(Unit)
    ]
    names = {*batch, *(name for each in RULES.values() for name in each)}
    known = ", ".join(sorted(map(repr, names)))
    mistakes += [
        f"rules[{name!r}] is for a tensor that the batch does not have. Use one of {known}."
        for name in rules
        if name not in names
    ]
    needed = {"input_ids": "[rows, tokens]"}
    if "patches" in (unit for name, unit in rules.items() if batch.get(name) is not None):
        needed["image_grid_thw"] = "[images, 3]"
    mistakes += [
        f"batch has no {name!r} of shape {shape}. Pass the batch as the processor returns it. [rows-differ]"
        for name, shape in needed.items()
        if not isinstance(batch.get(name), Tensor) or batch[name].dim() != 2
    ]
    rows = len(batch.get("input_ids", ()))
    if images is not None and (images.shape != (rows,) or images.is_floating_point() or bool((images < 0).any())):
        mistakes.append(
            f"images={images.tolist()} is not a number of images for each of the {rows} rows. Pass one integer per "
            f"row, at least 0. [rows-differ]"
        )
    return mistakes


def _ends_of_rows(
    config: Any, batch: Mapping[str, Any], units: Mapping[str, str], images: Tensor | None
) -> dict[str, Tensor]:
    """Returns for each unit how many precede each row, and how many there are in total."""
    ends = {"rows": torch.arange(len(batch["input_ids"]) + 1)}
    if {"images", "patches"} & set(units.values()):
        patches = batch["image_grid_thw"].prod(1) if "patches" in units.values() else None
        ends["images"] = _sums(_count_images(config, batch, units, patches) if images is None else images)
        if patches is not None:
            ends["patches"] = _sums(patches)[ends["images"].clamp(max=len(patches))]
    return ends


def _sums(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _count_images(config: Any, batch: Mapping[str, Any], units: Mapping[str, str], patches: Tensor | None) -> Tensor:
    """Returns the number of images of each row, from its number of image tokens."""
    count = next(len(batch[name]) for name, unit in units.items() if unit == "images")
    token = getattr(config, "image_token_id", None)
    tokens = (batch["input_ids"] == (config.image_token_index if token is None else token)).sum(1)
    if patches is not None:
        each = patches // getattr(config.vision_config, "spatial_merge_size", 1) ** 2
    else:
        each = torch.full((count,), int(tokens.sum()) // max(count, 1), device=tokens.device)
    ends, needed = _sums(each), _sums(tokens)
    before = torch.searchsorted(ends, needed, right=True) - 1
    if "image_sizes" in batch or not torch.equal(ends[before], needed) or int(before[-1]) != count:
        raise ValueError(
            f"batch: the rows have {tokens.tolist()} image tokens, from which the images of each row cannot be "
            f"counted ({count} images). Pass images=, the number of images in each row. [rows-differ]"
        )
    return before.diff()
