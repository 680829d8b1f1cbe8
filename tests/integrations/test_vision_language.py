"""Batches of vision-language models, whose images are not one per row, give the results of the reference loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import gpipe
from gpipe.integrations.vision_language import split_images
from tests.families.law import quiet
from tests.support.plain_loop import one_thread

IMAGE, START, END = 60, 61, 62
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
QWEN = {"depth": 2, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
MROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
WIDE = {**QWEN, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
SMALL = {**CLIP, "patch_size": 4}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 63}

FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {  # class, configuration, tokens of an image (0: any)
    "qwen2_vl": ("Qwen2VL", {"text_config": MROPE, "vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 32}}, 0),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"text_config": MROPE, "vision_config": {**WIDE, "window_size": 16, "fullatt_block_indexes": [1]}},
        0,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {**MROPE, "head_dim": 8},
            "vision_config": {**WIDE, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        },
        0,
    ),
    "llava": (
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**CLIP, "model_type": "clip_vision_model"},
        },
        4,
    ),
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**TEXT, "head_dim": 8},
            "vision_config": {**CLIP, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
        4,
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
            "downsample_ratio": 0.5,
        },
        4,
    ),
    "paligemma": (
        "PaliGemma",
        {
            "text_config": {**TEXT, "model_type": "gemma", "head_dim": 8},
            "vision_config": {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
            "projection_dim": 32,
            "hidden_size": 32,
        },
        4,
    ),
    "idefics3": ("Idefics3", {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": SMALL}, 4),
    "smolvlm": ("SmolVLM", {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": SMALL}, 4),
    "llava_next": (
        "LlavaNext",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**CLIP, "model_type": "clip_vision_model"},
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
        1,
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral", "head_dim": 8},
            "vision_config": {**CLIP, "model_type": "pixtral", "patch_size": 4, "head_dim": 8},
        },
        1,
    ),
}
SIZES: dict[str, dict[tuple[int, int], int]] = {  # tokens of an image, by its size
    "llava_next": {(16, 32): 4 + 2 * 5, (32, 16): 4 + 4 * 3, (32, 32): 4 + 4 * 5},  # each line ends with a token
    "mistral3": {(8, 16): 2, (16, 8): 2, (16, 16): 4},
}


def model_of(family: str) -> Any:
    name, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    tokens = {"image_token_id": IMAGE} if FAMILIES[family][2] else TOKENS
    tied = {"tie_word_embeddings": False}
    config = {**config, "text_config": {**config["text_config"], **tied}}
    settings = getattr(transformers, f"{name}Config")(**config, **tokens, **tied)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(settings)
    model.config.use_cache = model.config.text_config.use_cache = False
    return model.train()


def batch_of(family: str, images: list[int]) -> dict[str, Tensor]:
    """A batch with these numbers of images in its rows."""
    draw, each = torch.Generator().manual_seed(1), FAMILIES[family][2]
    rows, grids, sizes = list[list[int]](), list[list[int]](), list[tuple[int, int]]()
    for count in images:
        row: list[int] = []
        for _ in range(count):
            grids.append([1, *(2 * int(torch.randint(1, 3, (), generator=draw)) for _ in range(2))])
            sizes.append([*SIZES.get(family, {(16, 16): each})][len(sizes) % len(SIZES.get(family, "1"))])
            tokens = SIZES[family][sizes[-1]] if family in SIZES else each
            row += [START, *[IMAGE] * (tokens or grids[-1][1] * grids[-1][2] // 4), END]
        rows.append(row + torch.randint(1, 50, (4 + count,), generator=draw).tolist())
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.where((ids != 0) & (ids < IMAGE), -100),
    }
    if family in ("idefics3", "smolvlm"):  # images of a row, padded with zeros to the row with most images
        pixels = torch.randn(len(images), max(images), 3, 16, 16, generator=draw)
        real = torch.arange(max(images)) < torch.tensor(images)[:, None]
        masks = real[..., None, None].expand(*real.shape, 16, 16).long()
        return batch | {"pixel_values": pixels * masks[:, :, None], "pixel_attention_mask": masks}
    if each:
        patches = (5,) if family == "llava_next" else ()
        batch["pixel_values"] = torch.randn(sum(images), *patches, 3, 16, 16, generator=draw)
        if family in SIZES:
            return batch | {"image_sizes": torch.tensor(sizes)}
        types = {"token_type_ids": (ids == IMAGE).long() if family == "gemma3" else (ids >= IMAGE).long()}
        return batch | types if family in ("gemma3", "paligemma") else batch
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(1).sum()), 96, generator=draw)
    return batch | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}


def reference(model: Any, parts: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs the micro-batches one after the other in plain PyTorch."""
    labels, loss = sum((part["labels"][:, 1:] != -100).sum() for part in parts), torch.zeros(())
    for part in parts:
        made = model(**part, num_items_in_batch=labels).loss
        made.backward()
        loss = loss + made.detach()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return loss, gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_images_follow_their_rows_bitwise(family: str) -> None:
    model = model_of(family)
    images = [1, 2, 2, 1, 1, 2] if family in SIZES else [1, 2, 1, 3, 1, 1]
    batch = batch_of(family, images)
    parts: Any = split_images(model, batch, 3, images=torch.tensor(images) if family in SIZES else None)
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part["pixel_values"] for part in parts]), batch["pixel_values"])
    with quiet(), one_thread():
        loss, gradients = reference(model, parts)
        whole = batch | {
            name: torch.cat([part[name] for part in parts], 1) for name in ("position_ids",) if name in parts[0]
        }
        assert torch.allclose(model(**whole).loss, loss, rtol=1e-5)  # each row has its own images
        for partitions in (2, 3):
            with gpipe.GPipe(model, partitions, 3, sample=parts[:1], devices="cpu") as pipe:
                assert torch.equal(pipe.step(parts), loss)
                found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
                assert found.keys() == gradients.keys()
                assert all(torch.equal(found[name], gradients[name]) for name in found)
                model.zero_grad()


@pytest.mark.parametrize("family", SIZES)
def test_forwards_that_loop_over_images_need_as_many_in_each_micro_batch(family: str) -> None:
    model, images = model_of(family), torch.tensor([1, 2, 1, 3])
    parts: Any = split_images(model, batch_of(family, images.tolist()), 2, images=images)
    pipe = gpipe.GPipe(model, 2, 2, sample=parts[:1], devices="cpu")
    with quiet(), pipe, pytest.raises(ValueError, match=r"\[branch-on-value\]"):
        pipe.step(parts)


def alone(changes: dict[str, Any]) -> dict[str, Any]:
    return batch_of("llava", [1, 2]) | changes


REJECTED: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "no rules": (lambda: alone({}), {"family": "unknown"}, "family 'unknown'.*Pass rules="),
    "too few images": (
        lambda: alone({"pixel_values": torch.ones(2, 3, 16, 16)}),
        {},
        r"\[4, 8\] image tokens.*images=",
    ),
    "sizes differ": (lambda: alone({"image_sizes": torch.ones(3, 2)}), {}, "Pass images="),
    "other images": (lambda: alone({}), {"images": torch.tensor([1, 1])}, r"pixel_values.*has 2 images"),
    "positions without 3 dimensions": (
        lambda: alone({"position_ids": torch.ones(3, 3)}),
        {"rules": {"position_ids": "rows_in_dim_1"}},
        r"'position_ids'.*has shape \(3, 3\)",
    ),
    "negative images": (
        lambda: alone({}),
        {"images": torch.tensor([4, -1])},
        r"images=\[4, -1\] is not a number.*at least 0",
    ),
    "images of fewer rows": (lambda: alone({}), {"images": torch.tensor([3])}, r"images=\[3\] .*of the 2 rows"),
    "images that are no integers": (
        lambda: alone({}),
        {"images": torch.tensor([1.0, 2.0])},
        r"images=\[1\.0, 2\.0\]",
    ),
    "images in two dimensions": (lambda: alone({}), {"images": torch.tensor([[1], [2]])}, r"images=\[\[1\], \[2\]\]"),
    "no tokens": (
        lambda: {"pixel_values": torch.ones(2, 3, 16, 16)},
        {},
        r"no 'input_ids' of shape \[rows, tokens\]",
    ),
    "tokens of one row": (
        lambda: alone({"input_ids": torch.ones(4)}),
        {},
        r"no 'input_ids' of shape \[rows, tokens\]",
    ),
    "an unknown unit": (
        lambda: alone({}),
        {"rules": {"pixel_values": "image"}},
        r"\['pixel_values'\]='image' .*'patches'",
    ),
    "a rule for no tensor": (
        lambda: alone({}),
        {"rules": {"pixel_value": "images", "image_sizes": "images"}},
        r"rules\['pixel_value'\] .* one of .*'labels', 'pixel_values'",
    ),
    "patches without a grid": (
        lambda: alone({}),
        {"rules": {"pixel_values": "patches"}},
        "no 'image_grid_thw' of shape",
    ),
    "no micro-batches": (lambda: alone({}), {"micro_batches": 0}, "micro_batches=0 is invalid"),
    "all at once": (
        lambda: alone({"input_ids": torch.ones(4)}),
        {"micro_batches": "2", "rules": {"pixel_values": "image"}},
        "(?s)micro_batches='2'.*'image'.*'input_ids'",
    ),
    "a tensor of something else": (lambda: alone({"boxes": torch.ones(5, 2)}), {}, r"'boxes'.*has 2 rows"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_batches_that_do_not_match_are_rejected(name: str) -> None:
    make, how, said = REJECTED[name]
    model = model_of("llava")
    model.config.model_type = how.pop("family", "llava")
    with pytest.raises(ValueError, match=said):
        split_images(model, make(), **{"micro_batches": 2} | how)


def test_the_numbers_of_images_can_be_a_list() -> None:
    parts: Any = split_images(model_of("llava"), alone({}), 2, images=[2, 1])
    assert [len(part["pixel_values"]) for part in parts] == [2, 1]


def test_a_user_names_the_rule() -> None:
    model = model_of("llava")
    model.config.model_type = "new"
    batch = batch_of("llava", [0, 2, 1]) | {"crops": torch.arange(3), "note": "kept"}
    parts: Any = split_images(model, batch, 3, rules={"pixel_values": "images", "crops": "images"})
    assert "pixel_values" not in parts[0]
    assert [part["crops"].tolist() for part in parts[1:]] == [[0, 1], [2]]
    assert [part["note"] for part in parts] == ["kept"] * 3
