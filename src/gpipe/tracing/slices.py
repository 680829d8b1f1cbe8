"""Splits the inputs of a causal language model into slices along the sequence dimension.

Each slice is a separate forward pass. As in generation, each slice receives a KV cache, which holds the number of
preceding tokens and their keys and values. The label of a slice's last token is in the next slice, so labels are
shifted before they are split, and passed to the model as `shift_labels`.

`prove_slices` runs the sample whole and in slices, and raises an error if the outputs differ.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.batch.microbatch import IGNORED, rows_of_parts
from gpipe.features.slices import SliceKeys
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.own_loss import OwnLoss, loss_in
from gpipe.tracing.runs import arguments, lacks_memory, takes, unchanged, without_cache
from gpipe.tracing.trace import take_apart

CACHE, MASK = "past_key_values", "attention_mask"
BY_TOKENS = ("input_ids", "inputs_embeds", "labels", "position_ids", "shift_labels", "token_type_ids")
"""Inputs whose second dimension is split, because it holds the tokens. A slice receives the mask up to its end."""
NO_CACHE = (
    "slices={slices}: {model} does not accept past_key_values, which a slice needs to attend to earlier slices. "
    "Remove gpipe.Sliced; it supports causal language models of transformers. [slices-need-cache]"
)
NO_VALUES = (
    "slices={slices}: {model} is on the meta device, but gpipe must run the sample to verify that slices reproduce "
    "the full sequence. Initialize the model first, or remove gpipe.Sliced. [slices-need-weights]"
)
OWN_LOSS = (
    "slices={slices} requires the model's own loss, because a custom loss_fn does not see labels across slice "
    "boundaries. Pass a dict with input_ids and labels as sample= and to step(batch), or remove gpipe.Sliced. "
    "[slices-need-model-loss]"
)
WINDOW = (
    "slices={slices}: {model} attends to a window of {window} tokens, but the sample has only {tokens} tokens, so "
    "gpipe could not verify slices beyond the window. Pass a longer sample, or remove gpipe.Sliced. "
    "[slices-attention-window]"
)
PACKED = (
    "slices={slices}: position_ids restart within a row, as in packed sequences, but no attention_mask separates the "
    "sequences, so a slice would attend to other sequences. Remove gpipe.Sliced. [slices-packed-rows]"
)
WHOLE_LENGTH = (
    "slices={slices}: the rotary positions of {model} ({kind}) depend on the length of the whole sequence, but a "
    "slice sees only a part of it. Remove gpipe.Sliced. [slices-rotary-length]"
)
ROUTER = (
    "slices={slices}: with output_router_logits, the loss has a router term that is not a mean over labels. Remove "
    "gpipe.Sliced or output_router_logits. [slices-router-loss]"
)
FAILS = (
    "slices={slices}: {model} fails when run in slices, with {error}. Remove gpipe.Sliced; it supports models that "
    "mix tokens only by causal attention with a KV cache. [slices-differ]"
)
NOT_A_MEAN = "slices={slices}: {model} has no loss that is a mean over labels. Remove gpipe.Sliced. [slices-differ]"
DIFFERS = (
    "slices={slices}: the results of {model} differ by {distance:.3g} when run in slices. Remove gpipe.Sliced: the "
    "model mixes tokens other than by causal attention, or its loss is not a mean over labels. [slices-differ]"
)
FROM_PADDING = (
    "slices={slices}: the loss of {model} differs by {distance:.3g} when run in slices, because labels are predicted "
    "from padding. Set the labels of padding, and of the first token after it, to -100. [slices-padding-labels]"
)


def cache_of(model: nn.Module, tokens: int, keys: SliceKeys) -> Any:
    """Returns the cache of a slice: `tokens` preceding tokens, whose keys and values are in `keys`."""
    from transformers import cache_utils  # a model that accepts a cache has imported it already

    untyped: Any = cache_utils
    config: Any = model.config
    layers = [untyped.DynamicLayer() for _ in range(config.get_text_config(decoder=True).num_hidden_layers)]
    for block, layer in enumerate(layers):
        vars(layer).update(update=partial(keys.add, block), get_seq_length=lambda: tokens)
    cache = untyped.Cache(layers=layers)
    vars(cache)["tokens_before"] = tokens
    return cache


def tokens_before(value: object) -> int | None:
    """Returns the number of tokens before a slice if the value is the cache of a slice, else None."""
    return getattr(value, "__dict__", {}).get("tokens_before")


def cut(model: nn.Module, value: Tree, slices: int) -> list[dict[str, Any]]:
    """Splits a micro-batch into slices. If the tokens do not divide evenly, the first slices are one token longer.

    Raises:
        ValueError: If gpipe cannot split the micro-batch.
    """
    if not isinstance(value, Mapping) or not isinstance(labels := value.get("labels"), Tensor):
        raise ValueError(OWN_LOSS.format(slices=slices))
    tokens = labels.shape[1] if labels.dim() == 2 else 0
    if tokens < slices:
        raise ValueError(
            f"slices={slices}: a micro-batch has only {tokens} tokens. Use fewer slices, or longer rows. "
            f"[slices-too-few-tokens]"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            f"slices={slices}: under gradient checkpointing, {type(model).__name__} ignores the cache that a slice "
            f"needs to attend to earlier slices. Call model.gradient_checkpointing_disable(), and pass remat= "
            f"instead. [slices-gradient-checkpointing]"
        )
    if value.get("output_router_logits"):
        raise ValueError(ROUTER.format(slices=slices))
    positions = value.get("position_ids")
    if isinstance(positions, Tensor) and value.get(MASK) is None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(PACKED.format(slices=slices))
    following = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    inputs = {"shift_labels": following, **{name: item for name, item in value.items() if item is not None}}
    for name, item in inputs.items():
        is_whole = not item.dim() if isinstance(item, Tensor) else name != CACHE and not tensors_in(item)
        shape, dtype = tuple(getattr(item, "shape", ())), getattr(item, "dtype", None)
        is_mask = name == MASK and shape == labels.shape and not torch.is_floating_point(item)
        if not (is_whole or is_mask or (name in BY_TOKENS and shape[1:2] == (tokens,))):
            known = ", ".join(BY_TOKENS)
            raise ValueError(
                f"slices={slices}: gpipe cannot split {name} of shape {shape} and dtype {dtype} along {tokens} "
                f"tokens, only {known} and an integer or boolean attention_mask [rows, tokens]. Remove it, or remove "
                f"gpipe.Sliced. [slices-unknown-dimension]"
            )

    def inputs_of_slice(first: int, end: int) -> dict[str, Any]:
        parts = {
            name: item[:, 0 if name == MASK else first : end].contiguous()  # losses call `view` on labels
            if isinstance(item, Tensor) and item.dim()
            else item
            for name, item in inputs.items()
        }
        return {**parts, "use_cache": False, CACHE: cache_of(model, first, SliceKeys())}

    ends = accumulate(rows_of_parts(tokens, slices), initial=0)
    return [inputs_of_slice(first, end) for first, end in pairwise(ends)]


def check_takes_cache(model: nn.Module, slices: int, *, lacks_values: bool) -> None:
    """Raises an error if a model has no values, or does not accept a cache like decoders of transformers."""
    config = getattr(model, "config", None)
    is_decoder = hasattr(config, "get_text_config") and not getattr(config, "is_encoder_decoder", False)
    fields = {"slices": slices, "model": type(model).__name__}
    if lacks_values or not (is_decoder and takes(model.forward, CACHE)):
        raise ValueError((NO_VALUES if lacks_values else NO_CACHE).format(**fields))
    text_config: Any = config.get_text_config(decoder=True)  # type: ignore[union-attr]
    if getattr(text_config, "output_router_logits", False):
        raise ValueError(ROUTER.format(**fields))
    for kind in ("longrope", "dynamic"):
        if kind in str(getattr(text_config, "rope_parameters", None)):  # by kind of layer in some models
            raise ValueError(WHOLE_LENGTH.format(kind=kind, **fields))


def prove_slices(model: nn.Module, value: Tree, slices: int, loss_of_model: OwnLoss) -> None:
    """Verifies, in evaluation mode, that slices reproduce a model's outputs and loss up to rounding differences.

    Raises:
        ValueError: If the results differ, or if the model raises an error when it runs in slices.
    """
    parts, config, fields = cut(model, value, slices), model.config, {"slices": slices, "model": type(model).__name__}
    tokens = sum(part["labels"].shape[1] for part in parts)
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)  # type: ignore[union-attr, operator]  # of transformers
    if isinstance(window, int) and window >= tokens:
        raise ValueError(WINDOW.format(window=window, tokens=tokens, **fields))
    with unchanged(model), torch.no_grad():
        model.train(False)
        whole = arguments(model, without_cache(model, value)).call(model)
        try:
            outputs = _run_in_slices(model, parts)
        except Exception as error:
            if lacks_memory(error):
                raise
            raise ValueError(
                FAILS.format(error=f"{type(error).__name__}: {error}".removesuffix("."), **fields)
            ) from error
    losses = [loss for output in (whole, *outputs) if (loss := loss_in(output)) is not None]
    if len(losses) <= slices or loss_of_model.average.by == "rows":
        raise ValueError(NOT_A_MEAN.format(**fields))
    counts = [loss_of_model.count(part) for part in parts]
    shares = loss_of_model.shares(counts, sum(counts))
    weighted = [loss * share for loss, share in zip(losses[1:], shares, strict=True) if share]
    following, mask = torch.cat([part["shift_labels"] for part in parts], 1), parts[-1].get(MASK)
    real = torch.ones_like(following, dtype=torch.bool) if mask is None else mask.bool()
    columns = zip(*map(tensors_of, (whole, *outputs)), strict=True)
    pairs = [
        (expected[real], torch.cat(sliced, 1)[real])
        for expected, *sliced in columns
        if expected.shape[:2] == real.shape
    ]
    for expected, result in [*pairs, (losses[0], torch.stack(weighted).sum())]:
        distance = float((expected - result).abs().max())
        if not distance <= rounding(expected.dtype) * float(expected.abs().max()):
            from_padding = not expected.dim() and bool((following[~real] != IGNORED).any())
            raise ValueError((FROM_PADDING if from_padding else DIFFERS).format(distance=distance, **fields))


def rounding(dtype: torch.dtype) -> float:
    """Returns the relative rounding difference to accept. Models of float64 may compute partly in float32."""
    eps: float = torch.finfo(dtype).eps
    return max(1e-7, min(math.sqrt(eps), 256 * eps))


def _run_in_slices(model: nn.Module, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    outputs, earlier = [], list[SliceKeys]()
    for part in parts:
        keys = SliceKeys(list(earlier))
        cache = cache_of(model, tokens_before(part[CACHE]) or 0, keys)
        outputs.append(arguments(model, {**part, CACHE: cache}).call(model))
        if not keys.made:
            raise ValueError("The model does not put keys and values into its cache.")
        keys.keep()
        earlier.append(keys)
    return outputs


def tensors_of(output: Any) -> list[Tensor]:
    """Returns the tensors in an output, except tensors in a cache."""
    return [leaf for leaf in take_apart(output)[0] if isinstance(leaf, Tensor)]
