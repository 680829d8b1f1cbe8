"""Sequences packed behind one another in one row, with offsets that say where each begins, and a model of them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import gpipe
from tests.support.plain_loop import accumulated, one_thread, weights_of
from tests.support.processes.digests import Digests, digests

WORDS, WIDTH = 20, 8
LENGTHS = ((3, 5), (4, 2, 6, 3), (9,))
"""Of the sequences in each micro-batch."""

Batch = dict[str, Any]


class Block(nn.Module):
    """Attention within each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        sequence = torch.searchsorted(offsets, places, right=True)
        mask = (sequence[:, None] == sequence) & (places[:, None] >= places)
        query, key, value = self.into(x).chunk(3, -1)
        made: Tensor = x + self.out(scaled_dot_product_attention(query, key, value, attn_mask=mask))
        return made


class Packed(nn.Module):
    """Looks for the next word, and has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(
        self, input_ids: Tensor, cu_seq_lens_q: Tensor, max_length_q: int, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        assert int(cu_seq_lens_q[-1]) == input_ids.shape[1]
        assert max_length_q == int(cu_seq_lens_q.diff().max())
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seq_lens_q)
        output = self.head(x)
        if labels is None:
            return {"logits": output}
        return {"loss": cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": output}


def packed_model() -> Packed:
    with weights_of(3):
        return Packed()


def packed(lengths: Sequence[int], seed: int) -> Batch:
    """As transformers' DataCollatorWithFlattening makes it: the first word of each sequence counts nowhere."""
    words = torch.randint(WORDS, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    labels = words.index_fill(1, offsets[:-1], -100)
    return {"input_ids": words, "labels": labels, "cu_seq_lens_q": offsets, "max_length_q": max(lengths)}


def packs(step: int = 0) -> list[Batch]:
    return [packed(lengths, 10 * step + m) for m, lengths in enumerate(LENGTHS)]


@one_thread()
def trained_plainly(steps: int) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The losses of the plain loop, whose micro-batches weigh by their labels, and the gradients."""
    model, losses = packed_model(), []
    for step in range(steps):
        parts = packs(step)
        counts = [float((part["labels"][:, 1:] != -100).sum()) for part in parts]
        shares = [count / sum(counts) for count in counts]
        losses.append(accumulated((model(**copy.deepcopy(part))["loss"] for part in parts), shares))
    return losses, {name: one.grad for name, one in model.named_parameters()}


def trained(partitions: int, steps: int, **how: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    model, sample = packed_model(), gpipe.MicroBatches(packs())
    with gpipe.GPipe(model, partitions, len(LENGTHS), sample=sample, costs="params", **how) as pipe:
        losses = [pipe.step(gpipe.MicroBatches(packs(step))) for step in range(steps)]
        return losses, {name: one.grad for name, one in pipe.named_parameters()}


def train_rank(rank: int, world: int, schedule: str) -> tuple[list[float], Digests]:
    """The losses, and the gradients that a rank has."""
    losses, gradients = trained(world, 2, driver="process", schedule=schedule)
    return [loss.item() for loss in losses], digests(gradients)
