"""Builds the Transformers of the GPipe paper as lists of layers.

The language model of Table 1 of the paper:

    embedding | block ... | head

The translation model T(L, H, A) of section 5 of the paper:

    source embedding | encoder layer ... | bridge | decoder layer ... | head
         target, mask >---------- mask --> target
                    mask >----------------------------> memory, mask

The encoder layers pass the source on. The layers after the bridge pass the target on. All other tensors are skip
connections:

- `target`: the target tokens, from the first layer to the bridge.
- `mask` (N, S): true where the source may be attended to, from the first layer to the encoder and decoder layers.
- `memory`: the output of the encoder, from the bridge to the decoder layers.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def vocabulary(vocab: int, model_dim: int) -> nn.Parameter:
    """Builds an embedding matrix (vocab, model_dim) whose rows have an expected squared norm of 1."""
    return nn.Parameter(nn.init.normal_(torch.empty(vocab, model_dim), std=model_dim**-0.5))


def init_xavier(linear: nn.Linear, gain: float = 1.0) -> None:
    """Initializes weights from the uniform distribution of Glorot and Bengio, and the bias with 0."""
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)


class Embedding(nn.Module):
    """Embeds tokens and their positions: token ids (N, T) -> (N, T, model_dim). T may change with each call."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings, scaled to unit variance, plus sinusoidal positions (Vaswani et al., 2017, 3.5)."""
        dim = self.weight.shape[1]
        x: Tensor = F.embedding(tokens, self.weight) * math.sqrt(dim)
        timescales = torch.logspace(0, 4, dim // 2, device=x.device)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / timescales
        return x + torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)


class Head(nn.Module):
    """The softmax layer: (N, T, model_dim) -> logits (N, T, vocab).

    Normalizes its input first, because residual layers do not normalize their outputs.

    Args:
        weight: The matrix (vocab, model_dim).
        clip_logits: In training, logits are clamped to plus or minus this value. Default: no clamping.
        affine: Whether the normalization has parameters.
    """

    def __init__(self, weight: nn.Parameter, clip_logits: float | None = None, *, affine: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))
        self.norm = nn.LayerNorm(weight.shape[1], elementwise_affine=affine)
        self.clip_logits = clip_logits

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = F.linear(self.norm(x), self.weight, self.bias)
        if self.training and self.clip_logits is not None:
            logits = logits.clamp(-self.clip_logits, self.clip_logits)
        return logits


class KeyValueCache:
    """Caches the keys and values of one attention layer for generation.

    Attributes:
        keys: Keys (N, heads, T, head_dim) of all tokens so far.
        values: Values (N, heads, T, head_dim) of all tokens so far.
        mask: A mask (N, T) that is true for tokens and false for padding. None without padding.
    """

    keys: Any = None
    values: Any = None
    mask: Any = None

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Any, Any, Any]:
        """Appends keys and values, which may be empty. Returns the keys, values and mask of all tokens."""
        if self.keys is None:
            self.keys, self.values, self.mask = keys, values, mask
        elif keys.shape[2]:
            self.keys, self.values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            self.mask = None if mask is None else torch.cat([self.mask, mask], dim=1)
        return self.keys, self.values, self.mask


class CausalAttention(nn.Module):
    """Causal self-attention: (N, T, model_dim) -> (N, T, model_dim).

    Each dimension of the queries has a learned, positive scale that all heads share. The initial scale is the usual
    1 / sqrt(head dimension).
    """

    def __init__(self, model_dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(model_dim, 3 * model_dim)
        self.out = nn.Linear(model_dim, model_dim)
        self.query_scale = nn.Parameter(torch.zeros(model_dim // heads))
        init_xavier(self.query_key_value, gain=2**0.5)  # This is the initialization of three square matrices.
        init_xavier(self.out)

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Attends to the same and earlier positions. With a cache, a single position attends to all cached tokens."""
        rows, length, model_dim = x.shape
        packed = self.query_key_value(x).view(rows, length, 3, self.heads, model_dim // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        query = query * (F.softplus(self.query_scale) / math.log(2))  # The initial factor is 1.
        if cache is not None:
            key, value, mask = cache.add(key, value, mask)
        causal = key.shape[2] == length
        mask = None if causal or mask is None else mask[:, None, None]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, model_dim))
        return out


class ResidualLayer(nn.Module):
    """The base class of pre-norm Transformer layers: (N, T, model_dim) -> (N, T, model_dim).

    A layer has one or two attentions and a feed-forward network, each with a residual connection. The initial weights
    of the feed-forward network are scaled by 1 / sqrt(depth), as section 5 of the GPipe paper does for deep models.

    Args:
        model_dim: Size of inputs and outputs.
        ffn_dim: Hidden size of the feed-forward network.
        depth: Number of layers in the stack. With 1, initial weights are not scaled.
        dropout: Dropout probability of the tensors that are added to the residual.
        *attentions: One or two attention modules.
    """

    def __init__(self, model_dim: int, ffn_dim: int, depth: int, dropout: float, *attentions: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_dim)
        self.attention = attentions[0]
        if len(attentions) > 1:
            self.memory_norm = nn.LayerNorm(model_dim)
            self.memory_attention = attentions[1]
        self.ffn_norm = nn.LayerNorm(model_dim)
        widen, narrow = nn.Linear(model_dim, ffn_dim), nn.Linear(ffn_dim, model_dim)
        for linear in (widen, narrow):
            init_xavier(linear, gain=depth**-0.5)
        self.ffn = nn.Sequential(widen, nn.ReLU(), narrow)
        self.dropout = nn.Dropout(dropout)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Adds the output of the feed-forward network to x."""
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Block(ResidualLayer):
    """A layer of the language model: (N, T, model_dim) -> (N, T, model_dim)."""

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        return self.feed_forward(x + self.dropout(self.attention(self.attention_norm(x), mask, cache)))


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
    """Builds a language model as a list of `layers` + 2 layers: token ids (N, T) -> logits (N, T, vocab).

    The default sizes are from Table 1 of the GPipe paper. The normalization before the softmax layer has no
    parameters, because Table 1 does not count any.

    Args:
        layers: Number of Transformer layers.
        model_dim: Size of the embeddings and layer outputs. Must be even and divisible by `heads`.
        ffn_dim: Hidden size of the feed-forward networks.
        heads: Number of attention heads.
        vocab: Number of tokens in the vocabulary.
        tied: Whether the softmax layer uses the same Parameter as the embedding.
        dropout: Dropout probability of attention weights and of tensors that are added to the residual.
        scaled_init: Whether to scale initial weights of the feed-forward networks by 1 / sqrt(`layers`), as section 5
            of the paper does for deep models.
        clip_logits: In training, logits are clamped to plus or minus this value, as in section 5. Default: no
            clamping.

    Returns:
        `layers` + 2 layers: the embedding, the Transformer layers, and the softmax layer. The layers compute logits
        (N, T, vocab) from token ids (N, T).

    Raises:
        ValueError: If `layers` is less than 1, `model_dim` is odd or not divisible by `heads`, or `clip_logits` is
            not positive.

    >>> with torch.device("meta"):
    ...     network = transformer_lm(layers=3)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (5, 282179008)
    """
    if layers < 1 or model_dim % heads or model_dim % 2:
        raise ValueError(
            f"layers={layers}, model_dim={model_dim}, heads={heads} are not a Transformer. Pass at least one layer, "
            "and an even model_dim that is divisible by heads."
        )
    if clip_logits is not None and not clip_logits > 0:
        raise ValueError(f"clip_logits={clip_logits} is out of range. Pass a number greater than 0, or None.")
    embedding = Embedding(vocabulary(vocab, model_dim))
    depth = layers if scaled_init else 1
    attentions = (CausalAttention(model_dim, heads, dropout) for _ in range(layers))
    blocks = [Block(model_dim, ffn_dim, depth, dropout, attention) for attention in attentions]
    weight = embedding.weight if tied else vocabulary(vocab, model_dim)
    return [embedding, *blocks, Head(weight, clip_logits, affine=False)]


class Attention(nn.Module):
    """Attention of x (N, T, model_dim) to itself or to a context (N, S, model_dim). Returns (N, T, model_dim).

    `heads` times `head_dim` need not equal `model_dim`.
    """

    def __init__(self, model_dim: int, heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        channels = heads * head_dim
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(model_dim, channels)
        self.key = nn.Linear(model_dim, channels)
        self.value = nn.Linear(model_dim, channels)
        self.out = nn.Linear(channels, model_dim)
        for linear in (self.query, self.key, self.value, self.out):
            init_xavier(linear)

    def forward(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attends to the positions where the mask (N, S) is true.

        Without a mask, attends to the same and earlier positions.
        """
        context = x if context is None else context
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (N, heads, length, head_dim)
            for projected in (self.query(x), self.key(context), self.value(context))
        )
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            key, value, mask = cache.add(key, value, mask)
        mask = None if mask is None else mask[:, None, None]
        causal = mask is None and key.shape == query.shape
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SourceEmbedding(nn.Module):
    """Embeds the source: token ids (source (N, S), target (N, T)) -> (N, S, model_dim)."""

    stash = ("target", "mask")

    def __init__(self, weight: nn.Parameter, pad: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(weight)
        self.dropout = nn.Dropout(dropout)
        self.pad = pad

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the embedded source, and stashes the target and the mask of tokens that are not padding.

        If all tokens are padding, the mask includes the first, because a softmax over no position would be NaN.
        """
        source, target = inputs
        tokens = source != self.pad
        first = torch.arange(source.shape[1], device=source.device) == 0
        mask = tokens | (first & ~tokens.any(dim=1, keepdim=True))
        return self.dropout(self.embedding(source)), {"target": target, "mask": mask}


class EncoderLayer(ResidualLayer):
    """A layer of the encoder: (N, S, model_dim) -> (N, S, model_dim)."""

    pop = ("mask",)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.feed_forward(x + self.dropout(self.attention(self.attention_norm(x), mask)))


class Bridge(nn.Module):
    """Connects encoder and decoder: (N, S, model_dim) -> embedded target (N, T, model_dim)."""

    pop = ("target",)
    stash = ("memory",)

    def __init__(self, weight: nn.Parameter, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(weight.shape[1])
        self.embedding = Embedding(weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor | None, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the embedded target, and stashes the normalized output of the encoder (empty if x is None)."""
        embedded = self.dropout(self.embedding(target))
        return embedded, {"memory": self.norm(embedded[:, :0] if x is None else x)}


class DecoderLayer(ResidualLayer):
    """A layer of the decoder, with attention to target and memory: (N, T, model_dim) -> (N, T, model_dim)."""

    pop = ("memory", "mask")

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, *caches: KeyValueCache) -> Tensor:
        """Runs the layer. In generation, pass the cache of the self-attention and of the attention to the memory."""
        self_cache, memory_cache = caches or (None, None)
        x = x + self.dropout(self.attention(self.attention_norm(x), None, None, self_cache))
        attended = self.memory_attention(self.memory_norm(x), mask, memory, memory_cache)
        return self.feed_forward(x + self.dropout(attended))


def transformer(
    layers: int,
    ffn_dim: int = 8192,
    heads: int = 16,
    *,
    model_dim: int = 1024,
    head_dim: int = 64,
    vocab: int = 64000,
    matrices: int = 3,
    dropout: float = 0.1,
    scaled_init: bool = True,
    clip_logits: float | None = None,
    pad: int = 0,
) -> list[nn.Module]:
    """Builds the translation model T(L, H, A) as a list of 2 L + 3 layers.

    The input is a tuple of token ids, (source (N, S), target (N, T)), and the output are logits (N, T, vocab). The
    logits at a position predict the next token of the target. Use the target as labels, shifted by one token.

    Pad shorter sentences with `pad` at the end. Padding does not change the logits at other tokens. The loss must
    ignore labels that are padding. A source that consists only of padding is treated as a sentence of one token.

    Args:
        layers: L, the number of encoder layers, and of decoder layers.
        ffn_dim: H, the hidden size of the feed-forward networks.
        heads: A, the number of attention heads.
        model_dim: Size of the embeddings and layer outputs. Must be even.
        head_dim: Size of an attention head. `heads` times `head_dim` need not equal `model_dim`.
        vocab: Number of tokens in the vocabulary of source and target.
        matrices: Number of different matrices for source embedding, target embedding and softmax layer:

            - 3 (default): three separate matrices.
            - 2: the softmax layer uses the same Parameter as the target embedding.
            - 1: all use the same Parameter.
        dropout: Dropout probability of embeddings, attention weights and tensors that are added to the residual.
        scaled_init: Whether to scale initial weights of the feed-forward networks by 1 / sqrt(`layers`), as the paper
            does for deep models.
        clip_logits: In training, logits are clamped to plus or minus this value. Default: no clamping.
        pad: The token id of padding.

    Returns:
        2 L + 3 layers: the source embedding, L encoder layers, the target embedding, L decoder layers, and the
        softmax layer. The layers compute logits (N, T, vocab) from the tuple of source (N, S) and target (N, T). Some
        layers stash and pop tensors. To run the layers without a pipe, use `gpipe.Sequential(*layers)`.

    Raises:
        ValueError: If arguments are invalid. The message lists all problems.

    >>> with torch.device("meta"):
    ...     network = transformer(layers=24)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (51, 1304955392)
    """
    counts = {"layers": layers, "ffn_dim": ffn_dim, "heads": heads, "head_dim": head_dim}
    problems = [f"{name}={number} is out of range. Pass at least 1." for name, number in counts.items() if number < 1]
    if model_dim < 2 or model_dim % 2:
        problems.append(f"model_dim={model_dim} is out of range. Pass a positive even number.")
    if matrices not in (1, 2, 3):
        problems.append(f"matrices={matrices} is out of range. Pass 1, 2 or 3.")
    if clip_logits is not None and not clip_logits > 0:
        problems.append(f"clip_logits={clip_logits} is out of range. Pass a number greater than 0, or None.")
    if not 0 <= pad < vocab:
        problems.append(f"pad={pad} is not a token id. Pass 0 to {vocab - 1}.")
    if problems:
        raise ValueError("\n".join(problems))
    depth = layers if scaled_init else 1
    attention = partial(Attention, model_dim, heads, head_dim, dropout)
    sizes = model_dim, ffn_dim, depth, dropout
    source = vocabulary(vocab, model_dim)
    target = source if matrices == 1 else vocabulary(vocab, model_dim)
    softmax = vocabulary(vocab, model_dim) if matrices == 3 else target
    return [
        SourceEmbedding(source, pad, dropout),
        *(EncoderLayer(*sizes, attention()) for _ in range(layers)),
        Bridge(target, dropout),
        *(DecoderLayer(*sizes, attention(), attention()) for _ in range(layers)),
        Head(softmax, clip_logits, affine=True),
    ]
