"""The Transformers of the GPipe paper as sequences of layers.

The language model of its Table 1, whose embedding and head have a matrix of vocabulary x model dimension each:

    embedding | block ... | head

T(L, H, A), the translation model of its section 5:

    source embedding | encoder layer ... | bridge | decoder layer ... | head
         target, mask >---------- mask --> target
                    mask >----------------------------> memory, mask

What flows from layer to layer is the source, and from the bridge on the target. The bridge stashes what the encoder
made of the source, the `memory`, for every decoder layer; the first layer stashes the target for the bridge, and the
`mask`, (N, S), which is true where the source may be attended to.
"""

import math
from functools import partial
from typing import Any

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
        """Looks tokens up, at unit variance, and adds sines, then cosines (Vaswani et al., 2017, section 3.5)."""
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
        logits: Tensor = F.linear(self.norm(x), self.weight, self.bias)
        if self.training and self.clip_logits is not None:
            logits = logits.clamp(-self.clip_logits, self.clip_logits)
        return logits


class Kept:
    """What an attention keeps of words: keys, values (N, heads, T, head_dim); where (N, T) words are, None if all."""

    keys: Any = None
    values: Any = None
    where: Any = None

    def add(self, keys: Tensor, values: Tensor, where: Tensor | None) -> tuple[Any, Any, Any]:
        """Takes in what is made of more words, or of none; gives what there is of all."""
        if self.keys is None:
            self.keys, self.values, self.where = keys, values, where
        elif keys.shape[2]:
            self.keys, self.values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
            self.where = None if where is None else torch.cat([self.where, where], dim=1)
        return self.keys, self.values, self.where


class CausalAttention(nn.Module):
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

    def forward(self, x: Tensor, where: Tensor | None = None, kept: Kept | None = None) -> Tensor:
        """Lets each position attend to itself and to those before it; one alone to all `kept` words."""
        rows, length, model_dim = x.shape
        packed = self.query_key_value(x).view(rows, length, 3, self.heads, model_dim // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        query = query * (F.softplus(self.query_scale) / math.log(2))  # a factor of 1 to start with
        if kept is not None:
            key, value, where = kept.add(key, value, where)
        causal = key.shape[2] == length
        mask = None if causal or where is None else where[:, None, None]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, model_dim))
        return out


class ResidualLayer(nn.Module):
    """One attention or two and a feed-forward layer in a stack of `depth`, (N, T, model_dim) -> (N, T, model_dim).

    Each reads the normalized x, and what it makes is added to x. Weights of the feed-forward layer start smaller the
    deeper the stack is, each matrix by 1 / sqrt(depth), as section 5 of the GPipe paper scales them to train deep
    models. A depth of 1 leaves them.
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

    def fed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Block(ResidualLayer):
    """A layer of the language model."""

    def forward(self, x: Tensor, where: Tensor | None = None, kept: Kept | None = None) -> Tensor:
        return self.fed_forward(x + self.dropout(self.attention(self.attention_norm(x), where, kept)))


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
        why = "a Transformer needs at least one layer and an even model_dim that is a multiple of heads"
        raise ValueError(f"{why}: got layers={layers}, model_dim={model_dim}, heads={heads}")
    if clip_logits is not None and not clip_logits > 0:
        raise ValueError(f"clip_logits={clip_logits} leaves no logits to choose from: give more than 0, or None")
    embedding = Embedding(vocabulary(vocab, model_dim))
    depth = layers if scaled_init else 1
    attentions = (CausalAttention(model_dim, heads, dropout) for _ in range(layers))
    blocks = [Block(model_dim, ffn_dim, depth, dropout, attention) for attention in attentions]
    weight = embedding.weight if tied else vocabulary(vocab, model_dim)
    return [embedding, *blocks, Head(weight, clip_logits, affine=False)]


class Attention(nn.Module):
    """Attention of x, (N, T, model_dim), to itself or a context, (N, S, model_dim): gives (N, T, model_dim).

    The channels are heads * head_dim, whatever model_dim is.
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
        self, x: Tensor, mask: Tensor | None, context: Tensor | None = None, kept: Kept | None = None
    ) -> Tensor:
        """Lets each position attend where the mask (N, S) is true; None is for positions up to its own."""
        context = x if context is None else context
        query, key, value = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (N, heads, length, head_dim)
            for made in (self.query(x), self.key(context), self.value(context))
        )
        dropout = self.dropout if self.training else 0.0
        if kept is not None:
            key, value, mask = kept.add(key, value, mask)
        where = None if mask is None else mask[:, None, None]
        causal = where is None and key.shape == query.shape
        mixed = F.scaled_dot_product_attention(query, key, value, where, dropout_p=dropout, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SourceEmbedding(nn.Module):
    """Token ids (source (N, S), target (N, T)) -> the source as vectors (N, S, model_dim)."""

    stash = ("target", "mask")

    def __init__(self, weight: nn.Parameter, pad: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(weight)
        self.dropout = nn.Dropout(dropout)
        self.pad = pad

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeds the source, and stashes the target and where the source may be read: words, or else the first."""
        source, target = inputs
        words = source != self.pad
        first = torch.arange(source.shape[1], device=source.device) == 0  # a softmax over nothing would be NaN
        mask = words | (first & ~words.any(dim=1, keepdim=True))
        return self.dropout(self.embedding(source)), {"target": target, "mask": mask}


class EncoderLayer(ResidualLayer):
    """Attention of the source to itself and a feed-forward layer, (N, S, model_dim) -> (N, S, model_dim)."""

    pop = ("mask",)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fed_forward(x + self.dropout(self.attention(self.attention_norm(x), mask)))


class Bridge(nn.Module):
    """From the encoder to the decoder: (N, S, model_dim) -> the target as vectors (N, T, model_dim)."""

    pop = ("target",)
    stash = ("memory",)

    def __init__(self, weight: nn.Parameter, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(weight.shape[1])
        self.embedding = Embedding(weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor | None, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeds the target, and stashes the normalized output of the encoder, if any."""
        made = self.dropout(self.embedding(target))
        return made, {"memory": self.norm(made[:, :0] if x is None else x)}


class DecoderLayer(ResidualLayer):
    """Attention of the target to itself, then to the memory (N, S, model_dim), and a feed-forward layer."""

    pop = ("memory", "mask")

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor, own: Kept | None = None, other: Kept | None = None
    ) -> Tensor:
        """Adds what each part makes of the normalized x, (N, T, model_dim); either attention may keep words."""
        x = x + self.dropout(self.attention(self.attention_norm(x), None, None, own))
        return self.fed_forward(x + self.dropout(self.memory_attention(self.memory_norm(x), mask, memory, other)))


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
    """Builds T(L, H, A), token ids (source (N, S), target (N, T)) -> logits (N, T, vocab): 2 * `layers` + 3 layers.

    L encoder layers and L decoder layers, each with a feed-forward layer of width H and A heads of `head_dim`.
    The logits at a position score the target's next word, of which they know nothing: target and labels are one
    sentence, shifted by one. Sentences of a batch are made of one length by `pad` at the end, which changes nothing
    at the words; the loss must leave out the labels that are padding. A source of padding alone is read as one word.

    Args:
        layers: Of the encoder, and of the decoder: the paper's L.
        ffn_dim: The paper's H.
        heads: The paper's A.
        model_dim: The width of what flows between layers; even.
        head_dim: Channels of a head; all heads together need not have `model_dim`.
        vocab: Words of source and target, which have one vocabulary.
        matrices: 3 for a source embedding, a target embedding and a softmax layer of their own; 2 has the softmax
            layer use the target embedding's Parameter, the very object, and 1 the source embedding too.
        dropout: Falls on embeddings, on attention and on what is added to the residual.
        scaled_init: Has the weights of the feed-forward layers start smaller by 1 / sqrt(`layers`), as the paper
            does to train deep models; else they start as Glorot and Bengio have them.
        clip_logits: Keeps logits within -clip_logits ... clip_logits in training mode; None leaves them.
        pad: The token that is no word.

    >>> with torch.device("meta"):
    ...     network = transformer(layers=24)
    >>> len(network), sum(p.numel() for layer in network for p in layer.parameters())
    (51, 1304955392)

    Raises:
        ValueError: Sizes that cannot be; the message lists all mistakes.
    """
    counts = {"layers": layers, "ffn_dim": ffn_dim, "heads": heads, "head_dim": head_dim}
    mistakes = [f"{name}={number}: give at least 1" for name, number in counts.items() if number < 1]
    if model_dim < 2 or model_dim % 2:
        mistakes.append(f"model_dim={model_dim}: give an even number, for positions are sines and cosines")
    if matrices not in (1, 2, 3):
        mistakes.append(f"matrices={matrices}: give 3 for none shared, 2 for target and softmax as one, 1 for all")
    if clip_logits is not None and not clip_logits > 0:
        mistakes.append(f"clip_logits={clip_logits}: give more than 0, or None")
    if not 0 <= pad < vocab:
        mistakes.append(f"pad={pad}: give one of the {vocab} tokens, 0 ... {vocab - 1}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
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
