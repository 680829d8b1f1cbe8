"""The networks as models that are asked for one word after another, and keep what they made of those before.

How sentences become what a network reads, an encoder and a decoder or a decoder alone:

encoder-decoder   source  ein Haus END .      target in  BEGIN a house   targets  a house END
decoder           ein Haus END BEGIN a house                            targets  . . . a house END

How they translate, greedily or following several translations at once:

    source  ein Haus END
    t = 0   BEGIN            -> a      the likeliest next word, or of a beam the likeliest few
    t = 1   BEGIN a          -> house
    t = 2   BEGIN a house    -> END    this sentence is done

A `Network` gives logits [N, 1, vocabulary], or of each word, for sources [N, S] and beginnings of translations
[N, T]: those of before with a word more each time, but that some may be gone, or there twice with other words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.recipes.data.token_batches import BEGIN, END, PAD, padded
from gpipe.recipes.models.transformer import Kept
from gpipe.recipes.recipe import Batch
from gpipe.recipes.translation.corpus import Sentence

Network = Callable[[Tensor, Tensor], Tensor]
ALPHA = 0.6  # how much longer translations are favoured, of Wu et al. (2016), equation 14


def limit_of(source: Sequence[int]) -> int:
    """How many words a translation may have, END included."""
    return 2 * len(source) + 10


@torch.no_grad()
def greedy(network: Network, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Takes the likeliest word each time, for each of the sources, which end without END."""
    rows: list[list[int]] = [[BEGIN] for _ in sources]
    words = padded([[*source, END] for source in sources or [[]]])
    alive = list(range(len(sources)))
    while alive:
        begun = torch.tensor([rows[number] for number in alive])
        best = network(words[alive], begun)[:, -1].argmax(dim=1).tolist()
        for number, word in zip(alive, best, strict=True):
            rows[number].append(word)
        alive = [at for at in alive if rows[at][-1] != END and len(rows[at]) <= limit_of(sources[at])]
    return [cut(row) for row in rows]


def cut(row: Sequence[int]) -> list[int]:
    """The words between BEGIN and END."""
    return [word for word in row[1:] if word != END]


def penalty(words: int) -> float:
    """What the log-probability of a translation of so many words, END included, is divided by."""
    return float(((5 + words) / 6) ** ALPHA)


@torch.no_grad()
def beam(network: Network, sources: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Follows the `width` likeliest beginnings of each translation, and takes the best that ended.

    Translations are compared by their log-probability over ((5 + words) / 6)^0.6, so that short ones do not win for
    being short. A search ends when no beginning can still be better.
    """
    searches = [Search(source, width) for source in sources]
    while alive := [search for search in searches if not search.is_over]:
        words = padded([[*search.source, END] for search in alive for _ in search.beginnings])
        begun = torch.tensor([row for search in alive for row in search.beginnings])
        logs = network(words, begun)[:, -1].log_softmax(dim=1)
        own = logs.split([len(search.beginnings) for search in alive])
        for search, scores in zip(alive, own, strict=True):
            search.go_on(scores)
    return [cut(max(search.ended)[1] if search.ended else search.beginnings[0]) for search in searches]


@dataclass
class Search:
    """The beam search for the translation of one sentence.

    `beginnings` are those that are followed, from BEGIN on, likeliest first, all of one length, with their `scores`;
    `ended` are translations that ended, behind theirs.
    """

    source: Sequence[int]
    width: int
    beginnings: list[list[int]] = field(default_factory=lambda: [[BEGIN]])
    scores: Tensor = field(default_factory=lambda: torch.zeros(1))
    ended: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        if not self.beginnings or len(self.beginnings[0]) > limit_of(self.source):
            return True
        best_possible = float(self.scores.max()) / penalty(limit_of(self.source))
        return bool(self.ended) and max(self.ended)[0] >= best_possible

    def go_on(self, logs: Tensor) -> None:
        """Takes the likeliest words after the beginnings, from log-probabilities [beginnings, vocabulary]."""
        scores = self.scores[:, None] + logs
        wanted = min(2 * self.width, scores.numel())  # so many that enough go on though some end
        values, places = scores.flatten().topk(wanted)
        beginnings, kept = list[list[int]](), list[float]()
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            number, word = divmod(place, logs.shape[1])
            row = self.beginnings[number]
            if word == END:
                self.ended.append((value / penalty(len(row)), row))
            elif len(beginnings) < self.width:
                beginnings.append([*row, word])
                kept.append(value)
        self.beginnings, self.scores = beginnings, torch.tensor(kept)


class Cache:
    """What attentions keep of sources and of beginnings of translations."""

    def __init__(self, attentions: int) -> None:
        self.layers = [Kept() for _ in range(attentions)]
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def get_seq_length(self) -> int:
        return max((len(begun) for _, begun in self._rows), default=0)

    def follow(self, words: Tensor, begun: Tensor) -> None:
        """Has the rows of these, which are those of before with a word more; some may be gone, or there twice."""
        sources = (tuple(word for word in row if word != PAD) for row in words.tolist())
        rows = list(zip(sources, map(tuple, begun.tolist()), strict=True))
        before = [self._rows[one, so_far[:-1]] for one, so_far in rows] if self._rows else []
        if before != [*self._rows.values()]:
            for kept in self.layers:
                for name, value in vars(kept).items():
                    if value is not None:
                        setattr(kept, name, value[torch.tensor(before, device=value.device)])
        self._rows = {row: at for at, row in enumerate(rows)}


class EncoderDecoder(nn.Module):
    """T(L, H, A) of the paper's section 5: a sentence and its translation are two rows."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @staticmethod
    def batch(sentences: Sequence[Sentence]) -> Batch:
        """What it reads, and what it should say; PAD where anything may be said."""
        source = padded([[*one.source, END] for one in sentences])
        begun = padded([[BEGIN, *one.english] for one in sentences])
        return Batch((source, begun), padded([[*one.english, END] for one in sentences]))

    def forward(self, inputs: Any, cache: Cache | None = None) -> Any:
        """The logits after each word of the target; with a cache, which has the words before, after the last."""
        (source, begun), half, x = inputs, len(self.layers) // 2, None
        mask = source[:, :0] != PAD
        if cache is None or begun.shape[1] == 1:
            x, stashed = self.layers[0](inputs)
            mask = stashed["mask"]
            for encoder in self.layers[1:half]:
                x = encoder(x, mask)
        x, stashed = self.layers[half](x, begun)
        x = x if cache is None else x[:, -1:]
        for at, decoder in enumerate(self.layers[half + 1 : -1]):
            x = decoder(x, stashed["memory"], mask, *([] if cache is None else cache.layers[2 * at : 2 * at + 2]))
        return self.layers[-1](x)

    def ask(self, words: Tensor, begun: Tensor, cache: Cache) -> Any:
        return self((words, begun), cache)

    def generate(self, inputs: Tensor, width: int) -> Tensor:
        """Translates sources [N, S] by a beam of a width, of 1 greedily; gives [N, T], both with END behind words."""
        cache = Cache(2 * len(self.layers))

        def network(words: Tensor, begun: Tensor) -> Any:
            cache.follow(words, begun)
            return self.ask(words, begun, cache).float().cpu()

        sources = [row[: row.index(END)] for row in inputs.tolist()]
        found = greedy(network, sources) if width == 1 else beam(network, sources, width)
        return padded([[*words, END] for words in found])


class Decoder(EncoderDecoder):
    """The language model of the paper's Table 1: a sentence and its translation are one row."""

    @staticmethod
    def batch(sentences: Sequence[Sentence]) -> Batch:
        """What it reads, and what it should say: what is not English is not learnt."""
        rows = [[*one.source, END, BEGIN, *one.english] for one in sentences]
        targets = [[*[PAD] * (len(one.source) + 1), *one.english, END] for one in sentences]
        return Batch(padded(rows), padded(targets))

    def forward(self, inputs: Any, cache: Cache | None = None, last: Tensor | None = None) -> Any:
        """The logits after each word; or after the `last`, of places [N, 1, 1], by a cache of those before."""
        x, where = self.layers[0](inputs), inputs != PAD
        if last is not None:
            x, where = x.take_along_dim(last, 1), last[..., 0] >= 0
        for at, block in enumerate(self.layers[1:-1]):
            x = block(x, *([] if cache is None else (where, cache.layers[at])))
        return self.layers[-1](x)

    def ask(self, words: Tensor, begun: Tensor, cache: Cache) -> Any:
        places = (words != PAD).sum(dim=1)[:, None] + torch.arange(begun.shape[1])
        rows = F.pad(words, (0, begun.shape[1]), value=PAD).scatter(1, places, begun)
        last = places[:, -1:, None]
        return self(rows, cache).take_along_dim(last, 1) if begun.shape[1] == 1 else self(rows, cache, last)


LAYOUTS: dict[str, type[EncoderDecoder]] = {"encoder-decoder": EncoderDecoder, "decoder": Decoder}
