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


def sinusoids(length: int, dim: int, device: torch.device) -> Tensor:
    """Gives positions 0 ... length-1 as sines and cosines, (length, dim), of wavelengths 2 pi to 20000 pi.

    See Vaswani et al., "Attention Is All You Need" (2017), section 3.5; the sines come first.

    >>> sinusoids(2, 4, torch.device("cpu"))[0]
    tensor([0., 0., 1., 1.])
    """
    timescales = torch.logspace(0, 4, dim // 2, device=device)
    angles = torch.arange(length, device=device)[:, None] / timescales
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _vocabulary(vocab: int, model_dim: int) -> nn.Parameter:
    """Makes a vector of expected length 1 for each word."""
    return nn.Parameter(nn.init.normal_(torch.empty(vocab, model_dim), std=model_dim**-0.5))


class Embedding(nn.Module):
    """Token ids (N, T) -> vectors (N, T, model_dim) with the position added; T may change with each call."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks tokens up, at unit variance, and adds their position."""
        dim = self.weight.shape[1]
        x: Tensor = F.embedding(tokens, self.weight) * math.sqrt(dim)
        return x + sinusoids(tokens.shape[1], dim, x.device).to(x.dtype)


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
        nn.init.xavier_uniform_(self.query_key_value.weight, gain=2**0.5)  # as three square matrices
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.out.bias)

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
    """One layer of the stack, (N, T, model_dim) -> (N, T, model_dim).

    The feed-forward weights start smaller the deeper the stack is: each matrix by 1 / sqrt(layers), so their
    product by 1 / layers, as section 5 of the GPipe paper scales them to train deep models.
    """

    def __init__(self, model_dim: int, ffn_dim: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_dim)
        self.attention = Attention(model_dim, heads, dropout)
        self.ffn_norm = nn.LayerNorm(model_dim)
        widen, narrow = nn.Linear(model_dim, ffn_dim), nn.Linear(ffn_dim, model_dim)
        self.ffn = nn.Sequential(widen, nn.ReLU(), narrow)
        self.dropout = nn.Dropout(dropout)
        for linear in (widen, narrow):
            nn.init.xavier_uniform_(linear.weight, gain=layers**-0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what attention finds, then what the feed-forward layer makes of it."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Head(nn.Module):
    """The softmax layer: (N, T, model_dim) -> logits (N, T, vocab).

    Its input grows with every residual added, so it is normalized first. The norm has no parameters: Table 1
    counts none there.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        """Scores every word of the vocabulary at every position."""
        return F.linear(F.layer_norm(x, x.shape[-1:]), self.weight, self.bias)


def transformer_lm(
    layers: int,
    model_dim: int = 2048,
    ffn_dim: int = 8192,
    heads: int = 32,
    vocab: int = 32000,
    tied: bool = False,
    dropout: float = 0.0,
) -> list[nn.Module]:
    """Builds a language model, token ids (N, T) -> logits (N, T, vocab): a list of `layers` + 2 layers.

    The default sizes are those of Table 1 of the GPipe paper. `tied` uses the embedding's Parameter, the very
    object, as the weight of the head. `dropout` falls on attention and on what is added to the residual.

    >>> with torch.device("meta"):
    ...     network = transformer_lm(layers=3)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (5, 282179008)

    Raises:
        ValueError: No layer, or dimensions that cannot be divided among the heads or into sines and cosines.
    """
    if layers < 1 or model_dim % heads or model_dim % 2:
        raise ValueError(
            "a Transformer needs at least one layer and an even model_dim that is a multiple of heads: "
            f"got layers={layers}, model_dim={model_dim}, heads={heads}"
        )
    embedding = Embedding(_vocabulary(vocab, model_dim))
    blocks = [Block(model_dim, ffn_dim, heads, layers, dropout) for _ in range(layers)]
    head = Head(embedding.weight if tied else _vocabulary(vocab, model_dim))
    return [embedding, *blocks, head]
