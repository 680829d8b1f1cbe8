"""The sentences of a translation recipe: split, drawn by language, as subwords and in mini-batches."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from gpipe.recipes.data.pairs import Pair, Split, draw, place_of, read_catalogues, read_tsv, split_by_english
from gpipe.recipes.data.token_batches import Vocabulary, steps_per_epoch, token_batches
from gpipe.recipes.options.training import TranslationOptions


class Sentence(NamedTuple):
    """A pair of sentences as subwords, without the special ones."""

    pair: Pair
    source: list[int]
    english: list[int]

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.source), len(self.english)


class Corpus:
    """All pairs that the options name, split; `train` are those to train on of `longest` subwords at most.

    The vocabulary is that of another run, or learnt from the pairs to train on, drawn as in training. A ValueError
    says that there is no such language, or that there are too few pairs.
    """

    def __init__(self, options: TranslationOptions, vocabulary: Vocabulary | None = None) -> None:
        self._options = o = options
        self.split = _read(options)
        if vocabulary is None:
            drawn = [self.split.train[number] for number in self._draw(self.split.train, epoch=0)]
            vocabulary = Vocabulary.learn([text for pair in drawn for text in pair[1:]], o.vocabulary)
        self.vocabulary = vocabulary
        self.train = [one for one in self._encoded(self.split.train) if max(one.lengths) <= o.longest]
        if not self.train:
            raise ValueError(f"no pair is of --longest {o.longest} subwords at most: choose more")
        self.steps_per_epoch = steps_per_epoch([one.lengths for one in self.train], o.tokens)

    def _draw(self, pairs: Sequence[Pair], epoch: int) -> list[int]:
        return draw(pairs, self._options.temperature, len(pairs), seed=self._options.seed, epoch=epoch)

    @cached_property
    def data(self) -> str:
        return hashlib.sha256(repr(list(map(tuple, self.split.train))).encode()).hexdigest()

    @cached_property
    def validation(self) -> list[Sentence]:
        return self._encoded(self.split.validation)

    @cached_property
    def test(self) -> list[Sentence]:
        """The sentences to judge by; of each language the same English texts, where there are more than wanted."""
        most, seen = self._options.sentences, Counter[str]()
        chosen = []
        for pair in sorted(self.split.test, key=lambda pair: place_of(pair.english)):
            seen[pair.language] += 1
            if most is None or seen[pair.language] <= most:
                chosen.append(pair)
        return self._encoded(chosen)

    def _encoded(self, pairs: Sequence[Pair]) -> list[Sentence]:
        sources = self.vocabulary.encode_all([pair.source for pair in pairs])
        english = self.vocabulary.encode_all([pair.english for pair in pairs])
        return [Sentence(*one) for one in zip(pairs, sources, english, strict=True)]

    def mini_batches(self, epoch: int) -> list[list[Sentence]]:
        """The sentences of each mini-batch of an epoch: a function of the options and the epoch."""
        drawn = [self.train[number] for number in self._draw([one.pair for one in self.train], epoch)]
        return _batches(drawn, self._options.tokens, self.steps_per_epoch, self._options.seed, epoch)


def in_order(sentences: Sequence[Sentence], tokens: int) -> list[list[Sentence]]:
    """All sentences, each once, those of similar length together, of so many subwords at most with padding."""
    lengths = [one.lengths for one in sentences]
    tokens = max(tokens, *(sum(sides) + 2 for sides in lengths))
    return _batches(sentences, tokens, steps_per_epoch(lengths, tokens), seed=0, epoch=0)


def _batches(sentences: Sequence[Sentence], tokens: int, steps: int, seed: int, epoch: int) -> list[list[Sentence]]:
    batches = token_batches([one.lengths for one in sentences], tokens, steps, seed=seed, epoch=epoch)
    return [[sentences[row] for row in batch.tolist()] for batch in batches]


def _read(options: TranslationOptions) -> Split:
    pairs = read_catalogues() if options.tsv is None else read_tsv(options.tsv)
    there = {pair.language for pair in pairs}
    if absent := [language for language in options.languages if language not in there]:
        raise ValueError(f"--languages has {', '.join(absent)}: there are {', '.join(sorted(there))}")
    chosen = set(options.languages) or there
    split = split_by_english([pair for pair in pairs if pair.language in chosen])
    sizes = {"train on": len(split.train), "look at meanwhile": len(split.validation), "judge by": len(split.test)}
    if absent := [purpose for purpose, size in sizes.items() if not size]:
        why = f"of {sum(sizes.values())} pairs none falls to those to {', nor to those to '.join(absent)}"
        raise ValueError(f"{why}, which are a part of the English sentences each: give more pairs, or more languages")
    return split
