"""Models that are trained in slices of their sequences, and the plain loop over slices, by transformers alone.

The loop of a micro-batch: its slices forward in order, each with a cache whose keys and values are cut off the graph
of the slice before; then backward in reverse, each from its loss and from the keys and values that it left in the
cache, with the gradients that the slices behind left there.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

import gpipe
from tests.support.processes.digests import Digests, digests

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
WIDE: dict[str, Any] = {**SIZES, **WIDTHS, "num_key_value_heads": 2, "max_position_embeddings": 64}
ROUTED: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SEED, IGNORED = 5, -100
Scope = Callable[[int], AbstractContextManager[None]]


def model_of(name: str, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    config: transformers.PretrainedConfig
    match name:
        case "gpt2":
            small: dict[str, Any] = {"vocab_size": 61, "n_head": 4, "n_layer": 4, "n_embd": 32, "n_positions": 64}
            drops: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
            config = transformers.GPT2Config(**small, **drops, tie_word_embeddings=False)
        case "mixtral":
            config = transformers.MixtralConfig(**WIDE, **ROUTED, attention_dropout=dropout)
        case "qwen2":
            config = transformers.Qwen2Config(**WIDE, attention_dropout=dropout)
        case _:
            config = transformers.LlamaConfig(**WIDE, attention_dropout=dropout)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch_of(rows: int = 5, tokens: int = 14, seed: int = 1) -> dict[str, Tensor]:
    """Rows with padding on the left and on the right, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 61, (rows, tokens), generator=generator)
    real = torch.ones(rows, tokens, dtype=torch.long)
    for row in range(rows):
        real[row, : row % 3] = 0
        real[row, tokens - row % 2 * 4 :] = 0
    return {"input_ids": words, "attention_mask": real, "labels": words.where(real.bool(), IGNORED)}


def piped(model: nn.Module, partitions: int, slices: int, micro_batches: int = 2, **how: object) -> gpipe.GPipe:
    settings: dict[str, Any] = {
        "micro_batches": micro_batches,
        "costs": "params",
        "seed": SEED,
        "slices": slices,
        **how,
    }
    return gpipe.GPipe(model, partitions, sample=batch_of(4, 11, seed=9), **settings)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loop_over_slices(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    slices: int,
    micro_batches: int = 2,
    scope: Scope = lambda number: nullcontext(),
) -> Tensor:
    """The loss of a mini-batch; its gradients are added to those of the model."""
    following = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    count = following.ne(IGNORED).sum()
    columns = [one.tensor_split(micro_batches) for one in (batch["input_ids"], batch["attention_mask"], following)]
    whole: Tensor | None = None
    for m, (words, real, labels) in enumerate(zip(*columns, strict=True)):
        ends = [part[-1].item() + 1 for part in torch.arange(words.shape[1]).tensor_split(slices)]
        cache = DynamicCache()
        losses: list[Tensor] = []
        left: list[list[Tensor]] = []  # in the cache by each slice, with its graph
        taken: list[list[Tensor]] = []  # from the cache by the slice behind, leaves
        for s, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            own = labels[:, first:end].contiguous()
            with scope(m * slices + s):
                output = model(
                    input_ids=words[:, first:end].contiguous(),
                    attention_mask=real[:, :end].contiguous(),
                    labels=own,
                    shift_labels=own,
                    num_items_in_batch=count,
                    past_key_values=cache,
                    use_cache=True,
                )
            losses.append(output.loss)
            whole = output.loss.detach() if whole is None else whole + output.loss.detach()
            layers: list[Any] = cache.layers
            left.append([one for layer in layers for one in (layer.keys, layer.values)])
            for layer in layers:
                layer.keys = layer.keys.detach().requires_grad_(layer.keys.requires_grad)
                layer.values = layer.values.detach().requires_grad_(layer.values.requires_grad)
            taken.append([one for layer in layers for one in (layer.keys, layer.values)])
        for loss, keys, leaves in reversed(list(zip(losses, left, taken, strict=True))):
            behind = [(key, leaf.grad) for key, leaf in zip(keys, leaves, strict=True) if leaf.grad is not None]
            torch.autograd.backward([loss, *(key for key, _ in behind)], [None, *(grad for _, grad in behind)])
    assert whole is not None
    return whole


def train_rank(rank: int, world: int, name: str, partitions: int, how: dict[str, Any]) -> tuple[float, Digests]:
    """The loss of a step, and the gradients that a rank has."""
    rows = 5 if world == partitions else 4
    batch = batch_of(rows)
    if world > partitions:  # replicas, each of which is given its own rows
        half = rank // partitions
        batch = {key: value.tensor_split(world // partitions)[half] for key, value in batch.items()}
    with piped(model_of(name), partitions, 3, driver="process", **how) as pipe:
        loss = pipe.step(batch)
        return loss.item(), digests(gradients_of(pipe))
