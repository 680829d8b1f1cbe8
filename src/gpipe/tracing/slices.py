"""Cuts what a causal model is given into slices along its tokens, and proves on the sample that these make the whole.

A slice is a forward of its own, that is told by a cache, as in generation, how many tokens came before it, and
attends to their keys and values. What follows the last token of a slice, the next slice knows: so labels are shifted
before they are cut, and the model's own loss takes them as `shift_labels`.
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
"""The inputs that have tokens in their second dimension, and are cut there; masks go to a slice up to its end."""
NO_CACHE = (
    "slices={slices}: the {model} takes no past_key_values, by which a slice of a sequence attends to those before "
    "it; slices are for causal language models of transformers. Leave gpipe.Sliced out"
)
NO_VALUES = (
    "slices={slices}: the {model} has no values yet (it is on the meta device), and it is tried on the sample if "
    "slices make the whole; build it with values, or leave gpipe.Sliced out"
)
OWN_LOSS = (
    "slices={slices} is for the model's own loss, which is told the labels across the borders of slices: have "
    "step(batch) given a dict of input_ids and labels, and make the pipe with such a sample; for another loss, leave "
    "gpipe.Sliced out"
)
NOT_CUT = (
    "slices={slices}: {name} has the shape {shape}, dtype {dtype}, and it is not known how it is cut along {tokens} "
    "tokens; leave it out, or leave gpipe.Sliced out. Cut are {known}, and attention_mask [rows, tokens] of integers "
    "or booleans, which are 0 or False for padding"
)
TOO_SHORT = "slices={slices}: a micro-batch of {tokens} tokens cannot be cut into so many; give fewer, or longer rows"
WINDOW = (
    "slices={slices}: the {model} attends to a window of {window} tokens, and the sample has {tokens}: it was not "
    "tried whether slices see the same. Give a sample that is longer, or leave gpipe.Sliced out"
)
PACKED = (
    "slices={slices}: position_ids begin anew within a row, as those of packed sequences do, and no attention_mask "
    "says what belongs together; a slice would attend to other sequences. Leave gpipe.Sliced out"
)
WHOLE_LENGTH = (
    "slices={slices}: rotary positions of the {model} ({kind}) depend on the length of the whole sequence, of which "
    "a slice shows a part; leave gpipe.Sliced out"
)
ROUTER = (
    "slices={slices}: with output_router_logits the loss has a part for the router that is no mean over labels; "
    "leave gpipe.Sliced out, or output_router_logits"
)
CHECKPOINTED = (
    "slices={slices}: under gradient checkpointing the {model} leaves out the cache, by which a slice attends to "
    "those before it; call model.gradient_checkpointing_disable(), and give remat= in its place"
)
OTHERWISE = (
    "slices={slices}: in slices the {model} {what}. It mixes tokens by more than attention to earlier ones with a "
    "cache of their keys and values, or its loss is no mean over labels: leave gpipe.Sliced out"
)
FROM_PADDING = (
    "slices={slices}: in slices the {model} {what}. Some labels of the sample are predicted from padding, which "
    "slices see otherwise: have those of padding and of the first token behind it be -100, or leave gpipe.Sliced out"
)


def cache_of(model: nn.Module, tokens: int, keys: SliceKeys) -> Any:
    """The cache that a slice is given: so many tokens came before, whose keys and values `keys` has."""
    from transformers import cache_utils  # which a model that takes one has imported

    kinds: Any = cache_utils  # untyped
    config: Any = model.config
    layers = [kinds.DynamicLayer() for _ in range(config.get_text_config(decoder=True).num_hidden_layers)]
    for block, layer in enumerate(layers):
        vars(layer).update(update=partial(keys.add, block), get_seq_length=lambda: tokens)
    made = kinds.Cache(layers=layers)
    vars(made)["tokens_before"] = tokens
    return made


def tokens_before(value: object) -> int | None:
    """How many tokens came before a slice, of its cache; None of anything else."""
    return getattr(value, "__dict__", {}).get("tokens_before")


def cut(model: nn.Module, value: Tree, slices: int) -> list[dict[str, Any]]:
    """A micro-batch in slices, the first ones a token longer where they are uneven.

    Raises:
        ValueError: It cannot be cut.
    """
    if not isinstance(value, Mapping) or not isinstance(labels := value.get("labels"), Tensor):
        raise ValueError(OWN_LOSS.format(slices=slices))
    tokens = labels.shape[1] if labels.dim() == 2 else 0
    if tokens < slices:
        raise ValueError(TOO_SHORT.format(slices=slices, tokens=tokens))
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(CHECKPOINTED.format(slices=slices, model=type(model).__name__))
    if value.get("output_router_logits"):
        raise ValueError(ROUTER.format(slices=slices))
    positions = value.get("position_ids")
    if isinstance(positions, Tensor) and value.get(MASK) is None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(PACKED.format(slices=slices))
    following = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    given = {"shift_labels": following, **{name: one for name, one in value.items() if one is not None}}
    for name, one in given.items():
        is_whole = not one.dim() if isinstance(one, Tensor) else name != CACHE and not tensors_in(one)
        shape, dtype = tuple(getattr(one, "shape", ())), getattr(one, "dtype", None)
        is_mask = name == MASK and shape == labels.shape and not torch.is_floating_point(one)
        if not (is_whole or is_mask or (name in BY_TOKENS and shape[1:2] == (tokens,))):
            told = {"name": name, "shape": shape, "dtype": dtype, "tokens": tokens, "known": ", ".join(BY_TOKENS)}
            raise ValueError(NOT_CUT.format(slices=slices, **told))

    def of_slice(first: int, end: int) -> dict[str, Any]:
        parts = {
            name: one[:, 0 if name == MASK else first : end].contiguous()  # as losses want to view them
            if isinstance(one, Tensor) and one.dim()
            else one
            for name, one in given.items()
        }
        return {**parts, "use_cache": False, CACHE: cache_of(model, first, SliceKeys())}

    return [of_slice(first, end) for first, end in pairwise(accumulate(rows_of_parts(tokens, slices), initial=0))]


def check_takes_cache(model: nn.Module, slices: int, *, lacks_values: bool) -> None:
    """Refuses a model that takes no cache as decoders of transformers do, or cannot be tried."""
    config = getattr(model, "config", None)
    is_decoder = hasattr(config, "get_text_config") and not getattr(config, "is_encoder_decoder", False)
    told = {"slices": slices, "model": type(model).__name__}
    if lacks_values or not (is_decoder and takes(model.forward, CACHE)):
        raise ValueError((NO_VALUES if lacks_values else NO_CACHE).format(**told))
    known: Any = config.get_text_config(decoder=True)  # type: ignore[union-attr]
    if getattr(known, "output_router_logits", False):
        raise ValueError(ROUTER.format(**told))
    for kind in ("longrope", "dynamic"):
        if kind in str(getattr(known, "rope_parameters", None)):  # by kind of layer in some models
            raise ValueError(WHOLE_LENGTH.format(kind=kind, **told))


def prove_slices(model: nn.Module, value: Tree, slices: int, loss_of_model: OwnLoss) -> None:
    """Compares what a model gives in slices with what it gives for the whole, in evaluation, within rounding.

    Raises:
        ValueError: It is something else, or does not run.
    """
    parts, config, told = cut(model, value, slices), model.config, {"slices": slices, "model": type(model).__name__}
    tokens = sum(part["labels"].shape[1] for part in parts)
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)  # type: ignore[union-attr, operator]  # of transformers
    if isinstance(window, int) and window >= tokens:
        raise ValueError(WINDOW.format(window=window, tokens=tokens, **told))
    with unchanged(model), torch.no_grad():
        model.train(False)
        whole = arguments(model, without_cache(model, value)).call(model)
        try:
            found = _in_slices(model, parts)
        except Exception as error:
            if lacks_memory(error):
                raise
            what = f"fails with {type(error).__name__}: {error}"
            raise ValueError(OTHERWISE.format(what=what, **told)) from error
    losses = [loss for output in (whole, *found) if (loss := loss_in(output)) is not None]
    if len(losses) <= slices or loss_of_model.average.by == "rows":
        raise ValueError(OTHERWISE.format(what="has no loss that is a mean over labels", **told))
    counts = [loss_of_model.count(part) for part in parts]
    shares = loss_of_model.shares(counts, sum(counts))
    said = [loss * share for loss, share in zip(losses[1:], shares, strict=True) if share]
    following, mask = torch.cat([part["shift_labels"] for part in parts], 1), parts[-1].get(MASK)
    real = torch.ones_like(following, dtype=torch.bool) if mask is None else mask.bool()
    columns = zip(*map(tensors_of, (whole, *found)), strict=True)
    pairs = [(own[real], torch.cat(some, 1)[real]) for own, *some in columns if own.shape[:2] == real.shape]
    for own, other in [*pairs, (losses[0], torch.stack(said).sum())]:
        away, near = float((own - other).abs().max()), rounding(own.dtype) * float(own.abs().max())
        if not away <= near:
            from_padding = not own.dim() and bool((following[~real] != IGNORED).any())
            what = f"gives what is {away:.3g} away from the whole"
            raise ValueError((FROM_PADDING if from_padding else OTHERWISE).format(what=what, **told))


def rounding(dtype: torch.dtype) -> float:
    """What two ways to compute the same may be apart by, of the largest number; some compute in float32 within."""
    eps: float = torch.finfo(dtype).eps
    return max(1e-7, min(math.sqrt(eps), 256 * eps))


def _in_slices(model: nn.Module, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    found, done = [], list[SliceKeys]()
    for part in parts:
        keys = SliceKeys(list(done))
        cache = cache_of(model, tokens_before(part[CACHE]) or 0, keys)
        found.append(arguments(model, {**part, CACHE: cache}).call(model))
        if not keys.made:
            raise ValueError("nothing is put into its cache")
        keys.keep()
        done.append(keys)
    return found


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in an output, without those in a cache."""
    return [leaf for leaf in take_apart(output)[0] if isinstance(leaf, Tensor)]
