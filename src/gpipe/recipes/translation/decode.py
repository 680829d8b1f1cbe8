"""Translates by a trained network: greedily, or following several translations at once.

    source  ein Haus END
    t = 0   BEGIN            -> a      the likeliest next word, or of a beam the likeliest few
    t = 1   BEGIN a          -> house
    t = 2   BEGIN a house    -> END    this sentence is done

A `Network` gives logits [N, T, vocabulary] for sources [N, S] and beginnings of translations [N, T]: a pipe in
evaluation mode, to which the same sentences are given again with one word more each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpipe.recipes.data.token_batches import BEGIN, END, padded

Network = Callable[[Tensor, Tensor], Tensor]
ALPHA = 0.6
"""How much longer translations are favoured, of Wu et al. (2016), equation 14."""


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
        alive = [
            number for number in alive if rows[number][-1] != END and len(rows[number]) <= limit_of(sources[number])
        ]
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
        """Whether nothing better can be found, or no longer beginning is allowed."""
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
