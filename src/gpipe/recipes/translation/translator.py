"""Wraps the Transformers as models with a `generate` method, which decodes greedily or by beam search.

Inputs and targets of the two models (a dot is padding):

    encoder-decoder   source  ein Haus END .        target input  BEGIN a house    targets  a house END
    decoder           input   ein Haus END BEGIN a house                           targets  . . . a house END

Both translate one token at a time:

    source  ein Haus END
    t = 0   BEGIN            -> a      the most likely token, or the most likely few in a beam search
    t = 1   BEGIN a          -> house
    t = 2   BEGIN a house    -> END    this translation is complete
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.recipes.data.token_batches import BEGIN, END, PAD, padded
from gpipe.recipes.models.transformer import KeyValueCache
from gpipe.recipes.recipe import Batch
from gpipe.recipes.translation.corpus import Sentence

Network = Callable[[Tensor, Tensor], Tensor]
"""Computes logits of the next token from sources [N, S] and partial translations [N, T].

Returns logits [N, 1, vocabulary], or logits [N, T, vocabulary] that include earlier tokens. In each call, every row
extends a row of the previous call by one token. The caller may drop a row, or extend it several times.
"""
ALPHA = 0.6  # Strength of the length penalty in equation 14 of Wu et al. (2016).


def limit_of(source: Sequence[int]) -> int:
    """Returns the maximum number of tokens of a translation, with END."""
    return 2 * len(source) + 10


@torch.no_grad()
def greedy(network: Network, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Translates sources (token ids without END) by greedy decoding."""
    rows: list[list[int]] = [[BEGIN] for _ in sources]
    tokens = padded([[*source, END] for source in sources or [[]]])
    active = list(range(len(sources)))
    while active:
        partial = torch.tensor([rows[i] for i in active])
        best = network(tokens[active], partial)[:, -1].argmax(dim=1).tolist()
        for i, token in zip(active, best, strict=True):
            rows[i].append(token)
        active = [i for i in active if rows[i][-1] != END and len(rows[i]) <= limit_of(sources[i])]
    return [strip(row) for row in rows]


def strip(row: Sequence[int]) -> list[int]:
    """Returns the tokens without BEGIN and END."""
    return [token for token in row[1:] if token != END]


def penalty(tokens: int) -> float:
    """Returns the length penalty that divides the log-probability of a translation. `tokens` includes END."""
    return float(((5 + tokens) / 6) ** ALPHA)


@torch.no_grad()
def beam(network: Network, sources: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Translates sources (token ids without END) by a beam search.

    The score of a translation is its log-probability divided by ((5 + tokens) / 6)^0.6, because otherwise short
    translations would win. The search for a sentence ends when no partial translation can reach a better score.
    """
    searches = [Search(source, width) for source in sources]
    while active := [search for search in searches if not search.is_finished]:
        tokens = padded([[*search.source, END] for search in active for _ in search.partials])
        partials = torch.tensor([row for search in active for row in search.partials])
        log_probs = network(tokens, partials)[:, -1].log_softmax(dim=1)
        split = log_probs.split([len(search.partials) for search in active])
        for search, own_log_probs in zip(active, split, strict=True):
            search.extend(own_log_probs)
    return [strip(max(search.complete)[1] if search.complete else search.partials[0]) for search in searches]


@dataclass
class Search:
    """The beam search for the translation of one sentence.

    Attributes:
        source: Token ids of the source.
        width: Maximum number of partial translations.
        partials: Partial translations of equal length, starting with BEGIN, most likely first.
        scores: Log-probabilities of the partial translations.
        complete: Complete translations without END, with their scores.
    """

    source: Sequence[int]
    width: int
    partials: list[list[int]] = field(default_factory=lambda: [[BEGIN]])
    scores: Tensor = field(default_factory=lambda: torch.zeros(1))
    complete: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether no partial translation can still reach a better score than the complete translations."""
        if not self.partials or len(self.partials[0]) > limit_of(self.source):
            return True
        best_possible = float(self.scores.max()) / penalty(limit_of(self.source))
        return bool(self.complete) and max(self.complete)[0] >= best_possible

    def extend(self, log_probs: Tensor) -> None:
        """Extends the partial translations by likely tokens, from log-probabilities [partials, vocabulary]."""
        scores = self.scores[:, None] + log_probs
        # Up to `width` of the candidates are complete, so 2 * `width` candidates leave enough partial translations.
        values, places = scores.flatten().topk(min(2 * self.width, scores.numel()))
        partials, kept = list[list[int]](), list[float]()
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            number, token = divmod(place, log_probs.shape[1])
            row = self.partials[number]
            if token == END:
                self.complete.append((value / penalty(len(row)), row))
            elif len(partials) < self.width:
                partials.append([*row, token])
                kept.append(value)
        self.partials, self.scores = partials, torch.tensor(kept)


class Cache:
    """The key-value caches of all attention layers, for the rows of one `Network`."""

    def __init__(self, attentions: int) -> None:
        self.layers = [KeyValueCache() for _ in range(attentions)]
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def get_seq_length(self) -> int:
        """Returns the number of tokens in the partial translations. gpipe's generation requires this method."""
        return max((len(row) for _, row in self._rows), default=0)

    def reorder(self, tokens: Tensor, partials: Tensor) -> None:
        """Selects the cached rows that these sources and partial translations extend, in the order of `tokens`."""
        sources = (tuple(token for token in row if token != PAD) for row in tokens.tolist())
        rows = list(zip(sources, map(tuple, partials.tolist()), strict=True))
        before = [self._rows[source, row[:-1]] for source, row in rows] if self._rows else []
        if before != [*self._rows.values()]:
            for cache in self.layers:
                for name, value in vars(cache).items():
                    if value is not None:
                        setattr(cache, name, value[torch.tensor(before, device=value.device)])
        self._rows = {row: i for i, row in enumerate(rows)}


class EncoderDecoder(nn.Module):
    """The translation model T(L, H, A) with a `generate` method. Source and target are separate inputs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @staticmethod
    def batch(sentences: Sequence[Sentence]) -> Batch:
        """Returns the inputs and targets of sentences. Targets that are PAD do not count in the loss."""
        source = padded([[*sentence.source, END] for sentence in sentences])
        target = padded([[BEGIN, *sentence.english] for sentence in sentences])
        return Batch((source, target), padded([[*sentence.english, END] for sentence in sentences]))

    def forward(self, inputs: Any, cache: Cache | None = None) -> Any:
        """Returns the logits at each target token, or only at the last token if a cache has all earlier tokens."""
        (source, target), half, x = inputs, len(self.layers) // 2, None
        mask = source[:, :0] != PAD
        if cache is None or target.shape[1] == 1:
            x, stashed = self.layers[0](inputs)
            mask = stashed["mask"]
            for encoder in self.layers[1:half]:
                x = encoder(x, mask)
        x, stashed = self.layers[half](x, target)
        x = x if cache is None else x[:, -1:]
        for i, decoder in enumerate(self.layers[half + 1 : -1]):
            x = decoder(x, stashed["memory"], mask, *([] if cache is None else cache.layers[2 * i : 2 * i + 2]))
        return self.layers[-1](x)

    def next_logits(self, tokens: Tensor, partials: Tensor, cache: Cache) -> Any:
        """Returns the logits [N, 1, vocabulary] of the next token.

        The cache contains all tokens except the last token.
        """
        return self((tokens, partials), cache)

    def generate(self, inputs: Tensor, width: int) -> Tensor:
        """Translates sources [N, S] by a beam search, or greedily if `width` is 1.

        Returns:
            Translations [N, T]. Sources and translations end with END, followed by padding.
        """
        cache = Cache(2 * len(self.layers))

        def network(tokens: Tensor, partials: Tensor) -> Any:
            cache.reorder(tokens, partials)
            return self.next_logits(tokens, partials, cache).float().cpu()

        sources = [row[: row.index(END)] for row in inputs.tolist()]
        translations = greedy(network, sources) if width == 1 else beam(network, sources, width)
        return padded([[*tokens, END] for tokens in translations])


class Decoder(EncoderDecoder):
    """The language model with a `generate` method. Source and target are one sequence."""

    @staticmethod
    def batch(sentences: Sequence[Sentence]) -> Batch:
        """Returns the inputs and targets of sentences.

        Targets at source tokens are PAD and do not count in the loss.
        """
        rows = [[*sentence.source, END, BEGIN, *sentence.english] for sentence in sentences]
        targets = [[*[PAD] * (len(sentence.source) + 1), *sentence.english, END] for sentence in sentences]
        return Batch(padded(rows), padded(targets))

    def forward(self, inputs: Any, cache: Cache | None = None, last: Tensor | None = None) -> Any:
        """Returns the logits at each token, or only at positions `last` [N, 1, 1] if earlier tokens are cached."""
        x, mask = self.layers[0](inputs), inputs != PAD
        if last is not None:
            x, mask = x.take_along_dim(last, 1), last[..., 0] >= 0
        for i, block in enumerate(self.layers[1:-1]):
            x = block(x, *([] if cache is None else (mask, cache.layers[i])))
        return self.layers[-1](x)

    def next_logits(self, tokens: Tensor, partials: Tensor, cache: Cache) -> Any:
        positions = (tokens != PAD).sum(dim=1)[:, None] + torch.arange(partials.shape[1])
        rows = F.pad(tokens, (0, partials.shape[1]), value=PAD).scatter(1, positions, partials)
        last = positions[:, -1:, None]
        return self(rows, cache).take_along_dim(last, 1) if partials.shape[1] == 1 else self(rows, cache, last)


LAYOUTS: dict[str, type[EncoderDecoder]] = {"encoder-decoder": EncoderDecoder, "decoder": Decoder}
