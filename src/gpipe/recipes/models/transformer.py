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


def vocabulary(vocab: int, model_dim: int) -> nn.Parameter:
    """Makes a vector of expected length 1 for each word, (vocab, model_dim)."""
    return nn.Parameter(nn.init.normal_(torch.empty(vocab, model_dim), std=model_dim**-0.5))


def init_xavier(linear: nn.Linear, gain: float = 1.0) -> None:
    """Draws the weights of a layer after Glorot and Bengio, uniformly, and sets its bias to 0."""
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)


class Embedding(nn.Module):
    """Token ids (N, T) -> vectors (N, T, model_dim) with the position added; T may change with each call."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks tokens up, at unit variance, and adds their position.

        Positions are sines and cosines of wavelengths 2 pi to 20000 pi, the sines first: Vaswani et al., "Attention
        Is All You Need" (2017), section 3.5.
        """
        dim = self.weight.shape[1]
        x: Tensor = F.embedding(tokens, self.weight) * math.sqrt(dim)
        timescales = torch.logspace(0, 4, dim // 2, device=x.device)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / timescales
        return x + torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)


class Head(nn.Module):
    """The softmax layer: (N, T, model_dim) -> logits (N, T, vocab).

    Its input grows with every residual added, so it is normalized first; `affine` gives the norm parameters.
    `clip_logits` keeps logits within -clip_logits ... clip_logits in training mode.
    """

    def __init__(self, weight: nn.Parameter, clip_logits: float | None = None, *, affine: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))
        self.norm = nn.LayerNorm(weight.shape[1], elementwise_affine=affine)
        self.clip_logits = clip_logits

    def forward(self, x: Tensor) -> Tensor:
        """Scores every word of the vocabulary at every position."""
        logits: Tensor = F.linear(self.norm(x), self.weight, self.bias)
        if self.training and self.clip_logits is not None:
            logits = logits.clamp(-self.clip_logits, self.clip_logits)
        return logits


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


class ResidualLayer(nn.Module):
    """Attention and a feed-forward layer in a stack of `depth`, (N, T, model_dim) -> (N, T, model_dim).

    Each reads the normalized x, and what it makes is added to x; a `memory_attention` comes between the two. Weights
    of the feed-forward layer start smaller the deeper the stack is: each matrix by 1 / sqrt(depth), so their product
    by 1 / depth, as section 5 of the GPipe paper scales them to train deep models. A depth of 1 leaves them.
    """

    def __init__(
        self,
        attention: nn.Module,
        memory_attention: nn.Module | None = None,
        *,
        model_dim: int,
        ffn_dim: int,
        depth: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_dim)
        self.attention = attention
        if memory_attention is not None:
            self.memory_norm = nn.LayerNorm(model_dim)
            self.memory_attention = memory_attention
        self.ffn_norm = nn.LayerNorm(model_dim)
        widen, narrow = nn.Linear(model_dim, ffn_dim), nn.Linear(ffn_dim, model_dim)
        for linear in (widen, narrow):
            init_xavier(linear, gain=depth**-0.5)
        self.ffn = nn.Sequential(widen, nn.ReLU(), narrow)
        self.dropout = nn.Dropout(dropout)

    def fed_forward(self, x: Tensor) -> Tensor:
        """Adds what the feed-forward layer makes of x."""
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Block(ResidualLayer):
    """A layer of the language model."""

    def forward(self, x: Tensor) -> Tensor:
        """Adds what attention finds, then what the feed-forward layer makes of it."""
        return self.fed_forward(x + self.dropout(self.attention(self.attention_norm(x))))


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
    blocks = [
        Block(
            Attention(model_dim, heads, dropout), model_dim=model_dim, ffn_dim=ffn_dim, depth=depth, dropout=dropout
        )
        for _ in range(layers)
    ]
    weight = embedding.weight if tied else vocabulary(vocab, model_dim)
    return [embedding, *blocks, Head(weight, clip_logits, affine=False)]
