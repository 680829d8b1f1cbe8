"""Splits, samples, tokenizes and batches the sentences of the translation recipe."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from gpipe.recipes.data.pairs import Pair, Split, draw, hash_of, read_catalogues, read_tsv, split_by_english
from gpipe.recipes.data.token_batches import Vocabulary, steps_per_epoch, token_batches
from gpipe.recipes.options.training import TranslationOptions


class Sentence(NamedTuple):
    """A pair of sentences with its token ids, without special tokens."""

    pair: Pair
    source: list[int]
    english: list[int]

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.source), len(self.english)


class Corpus:
    """All sentences that the options select, split into training, validation and test.

    Args:
        options: The options of the recipe.
        vocabulary: The vocabulary of another run. Default: learned from the training pairs of the first epoch.

    Attributes:
        split: All pairs.
        vocabulary: The vocabulary.
        train: The training sentences with at most `--longest` tokens.
        steps_per_epoch: Number of mini-batches per epoch.

    Raises:
        ValueError: If a language does not exist, or if there are too few pairs.
    """

    def __init__(self, options: TranslationOptions, vocabulary: Vocabulary | None = None) -> None:
        self._options = o = options
        self.split = _read(options)
        if vocabulary is None:
            drawn = [self.split.train[number] for number in self._draw(self.split.train, epoch=0)]
            vocabulary = Vocabulary.learn([text for pair in drawn for text in pair[1:]], o.vocabulary)
        self.vocabulary = vocabulary
        self.train = [sentence for sentence in self._encode(self.split.train) if max(sentence.lengths) <= o.longest]
        if not self.train:
            raise ValueError(f"--longest: no training pair has at most {o.longest} tokens. Increase --longest.")
        self.steps_per_epoch = steps_per_epoch([sentence.lengths for sentence in self.train], o.tokens)

    def _draw(self, pairs: Sequence[Pair], epoch: int) -> list[int]:
        return draw(pairs, self._options.temperature, len(pairs), seed=self._options.seed, epoch=epoch)

    @cached_property
    def data(self) -> str:
        """A fingerprint of the training pairs."""
        return hashlib.sha256(repr(list(map(tuple, self.split.train))).encode()).hexdigest()

    @cached_property
    def validation(self) -> list[Sentence]:
        return self._encode(self.split.validation)

    @cached_property
    def test(self) -> list[Sentence]:
        """The test sentences.

        With --sentences, all languages use translations of the same English texts if possible.
        """
        most, counts = self._options.sentences, Counter[str]()
        selected = []
        for pair in sorted(self.split.test, key=lambda pair: hash_of(pair.english)):
            counts[pair.language] += 1
            if most is None or counts[pair.language] <= most:
                selected.append(pair)
        return self._encode(selected)

    def _encode(self, pairs: Sequence[Pair]) -> list[Sentence]:
        sources = self.vocabulary.encode_all([pair.source for pair in pairs])
        english = self.vocabulary.encode_all([pair.english for pair in pairs])
        return list(map(Sentence, pairs, sources, english))

    def mini_batches(self, epoch: int) -> list[list[Sentence]]:
        """Returns the sentences of each mini-batch of an epoch.

        The mini-batches depend only on the options and the epoch.
        """
        drawn = [self.train[number] for number in self._draw([sentence.pair for sentence in self.train], epoch)]
        return _batches(drawn, self._options.tokens, self.steps_per_epoch, self._options.seed, epoch)


def batch_by_length(sentences: Sequence[Sentence], tokens: int) -> list[list[Sentence]]:
    """Groups all sentences by length into batches with at most `tokens` tokens, including padding."""
    lengths = [sentence.lengths for sentence in sentences]
    tokens = max(tokens, *(sum(sides) + 2 for sides in lengths))
    return _batches(sentences, tokens, steps_per_epoch(lengths, tokens), seed=0, epoch=0)


def _batches(sentences: Sequence[Sentence], tokens: int, steps: int, seed: int, epoch: int) -> list[list[Sentence]]:
    batches = token_batches([sentence.lengths for sentence in sentences], tokens, steps, seed=seed, epoch=epoch)
    return [[sentences[row] for row in batch.tolist()] for batch in batches]


def _read(options: TranslationOptions) -> Split:
    pairs = read_catalogues() if options.tsv is None else read_tsv(options.tsv)
    known = {pair.language for pair in pairs}
    if unknown := [language for language in options.languages if language not in known]:
        raise ValueError(
            f"--languages: {', '.join(unknown)} does not occur in the data. Choose from {', '.join(sorted(known))}."
        )
    chosen = set(options.languages) or known
    split = split_by_english([pair for pair in pairs if pair.language in chosen])
    if empty := [name for name, part in split._asdict().items() if not part]:
        raise ValueError(
            f"--tsv, --languages: {sum(map(len, split))} pairs, split by text, leave {', '.join(empty)} empty. "
            "Add pairs or languages."
        )
    return split
