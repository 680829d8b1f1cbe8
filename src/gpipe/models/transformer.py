"""Transformer-L, the language model of the GPipe paper's Table 1, as a sequence of layers.

    embedding | block ... | head

The embedding and the head have a matrix of vocabulary x model dimension each; `tied` makes them one
Parameter. A block is causal self-attention and a feed-forward layer, each behind a layer norm and inside a
residual connection.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.sublayers import Embedding, Head, feed_forward, init_xavier, vocabulary


class Attention(nn.Module):
    """Causal self-attention, (N, T, model_dim) -> (N, T, model_dim).

    Each dimension of a head's queries has a learned scale, shared by the heads. It starts at the usual
    1 / sqrt(dimensions) and stays positive.
    """

    def __init__(self, model_dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(model_dim, 3 * model_dim)
        self.out = nn.Linear(model_dim, model_dim)
        self.query_scale = nn.Parameter(torch.zeros(model_dim // heads))
        init_xavier(self.query_key_value, gain=2**0.5)  # as three square matrices
        init_xavier(self.out)

    def forward(self, x: Tensor) -> Tensor:
        """Lets each position attend to itself and to those before it."""
        rows, length, model_dim = x.shape
        packed = self.query_key_value(x).view(rows, length, 3, self.heads, model_dim // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        query = query * (F.softplus(self.query_scale) / math.log(2))  # a factor of 1 to start with
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, model_dim))
        return out


class Block(nn.Module):
    """One layer of a stack of `depth`, (N, T, model_dim) -> (N, T, model_dim)."""

    def __init__(self, model_dim: int, ffn_dim: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_dim)
        self.attention = Attention(model_dim, heads, dropout)
        self.ffn_norm = nn.LayerNorm(model_dim)
        self.ffn = feed_forward(model_dim, ffn_dim, depth)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what attention finds, then what the feed-forward layer makes of it."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


def transformer_lm(
    layers: int,
    model_dim: int = 2048,
    ffn_dim: int = 8192,
    heads: int = 32,
    vocab: int = 32000,
    tied: bool = False,
    dropout: float = 0.0,
    scaled_init: bool = True,
    clip_logits: float | None = None,
) -> list[nn.Module]:
    """Builds a language model, token ids (N, T) -> logits (N, T, vocab): a list of `layers` + 2 layers.

    The default sizes are those of Table 1 of the GPipe paper. `tied` uses the embedding's Parameter, the very
    object, as the weight of the head. `dropout` falls on attention and on what is added to the residual.

    `scaled_init` has the weights of the feed-forward layers start smaller by 1 / sqrt(`layers`), and `clip_logits`
    keeps the logits within -clip_logits ... clip_logits in training mode: so section 5 of the paper trains deep
    models. Its Table 1 counts no parameters in a norm of the head, so that one has none.

    >>> with torch.device("meta"):
    ...     network = transformer_lm(layers=3)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (5, 282179008)

    Raises:
        ValueError: No layer, dimensions that cannot be divided among the heads or into sines and cosines, or a
            `clip_logits` that is not positive.
    """
    if layers < 1 or model_dim % heads or model_dim % 2:
        raise ValueError(
            "a Transformer needs at least one layer and an even model_dim that is a multiple of heads: "
            f"got layers={layers}, model_dim={model_dim}, heads={heads}"
        )
    if clip_logits is not None and not clip_logits > 0:
        raise ValueError(f"clip_logits={clip_logits} leaves no logits to choose from: give more than 0, or None")
    embedding = Embedding(vocabulary(vocab, model_dim))
    depth = layers if scaled_init else 1
    blocks = [Block(model_dim, ffn_dim, heads, depth, dropout) for _ in range(layers)]
    weight = embedding.weight if tied else vocabulary(vocab, model_dim)
    return [embedding, *blocks, Head(weight, clip_logits, affine=False)]
