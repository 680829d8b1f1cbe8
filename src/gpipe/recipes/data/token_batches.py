"""A vocabulary of pieces of words, mini-batches of pairs by their tokens, and the padded tensors of a network."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpipe.recipes.data import imported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZERS = ("tokenizers", "vocabularies are learnt by tokenizers", "translation")
PAD, BEGIN, END = 0, 1, 2
SPECIAL = 3  # how many ids are no pieces: those of PAD, BEGIN and END
LONGEST_PIECE = 48  # bytes, 16 letters of most scripts: or else a language without spaces gets sentences for pieces
WORDS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+"  # no piece reaches beyond a match
ORDER = 3  # sets these draws apart from those of other modules

Lengths = Sequence[tuple[int, int]]  # of each pair, the tokens of its source and of its target, without specials


class Vocabulary:
    """Pieces of text by number: 0 is `PAD`, 1 `BEGIN`, 2 `END`, then 256 bytes, then pieces from short to long.

    A text is a row of bytes in UTF-8 and a piece is some of them, so that nothing is unknown and nothing is
    normalised: what is encoded comes back to the letter. No text, not even `"<pad>"`, is encoded as a special id.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Learns a vocabulary of at most `size` ids, 259 or more, by byte-pair encoding; equal texts give equal ones.

        It is smaller where the texts do not repeat enough to fill it.
        """
        imported(*TOKENIZERS)
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size - SPECIAL,
            min_frequency=2,
            max_token_length=LONGEST_PIECE,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, file: str | PathLike[str]) -> "Vocabulary":
        """Reads a vocabulary that `save` wrote; a ValueError names a file that holds something else."""
        imported(*TOKENIZERS)
        from tokenizers import Tokenizer

        text = Path(file).read_text("utf-8")
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # tokenizers raises nothing more particular
            raise ValueError(f"{file} is no vocabulary ({error}); give a file that Vocabulary.save wrote") from error

    def save(self, file: str | PathLike[str]) -> None:
        """Writes the vocabulary as JSON of the library tokenizers, where ids are lower by the three special ones."""
        Path(file).write_text(self._tokenizer.to_str(pretty=True), "utf-8")

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size() + SPECIAL

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of the pieces of each text, without `BEGIN` and `END`; computed on all cores."""
        return [[piece + SPECIAL for piece in found.ids] for found in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first `END`; bytes that are no UTF-8 become the replacement character."""
        said = ids[: ids.index(END)] if END in ids else ids
        return self._tokenizer.decode([number - SPECIAL for number in said if number >= SPECIAL])


def token_batches(lengths: Lengths, tokens: int, steps: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Returns the row numbers [N] of each of exactly `steps` mini-batches, rows of similar length together.

    Rows x (longest source + longest target), each with its `END`, is at most `tokens`, which no row alone may exceed.
    No row comes twice. If the rows fill more than `steps` mini-batches, some drawn by lot are dropped; if fewer, the
    largest ones are halved; given `steps_per_epoch(lengths, tokens)` steps, every row comes once.
    """
    random = np.random.default_rng((seed, epoch, ORDER))
    packed = _pack(lengths, tokens, random.permutation(len(lengths)).tolist())
    chosen = [packed[place] for place in random.permutation(len(packed))[:steps]]
    while len(chosen) < steps:
        largest = max(range(len(chosen)), key=lambda place: len(chosen[place]))
        rows = chosen[largest]
        chosen[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return [torch.tensor(rows) for rows in chosen]


def steps_per_epoch(lengths: Lengths, tokens: int) -> int:
    """Returns how many mini-batches of at most `tokens` the rows fill: those `token_batches` makes of itself."""
    return len(_pack(lengths, tokens, range(len(lengths))))


def _pack(lengths: Lengths, tokens: int, rows: Iterable[int]) -> list[list[int]]:
    """Fills mini-batches with rows by their lengths, each as far as `tokens` goes; equal ones keep their order."""

    def by_length(row: int) -> tuple[int, int]:
        """By target and, within one length of it, by source: up, then down, so that neighbours are ever alike."""
        source, target = lengths[row]
        return target, source if target % 2 else -source

    batches: list[list[int]] = []
    source = target = 0
    for row in sorted(rows, key=by_length):
        wider = max(source, lengths[row][0] + 1), max(target, lengths[row][1] + 1)
        if not batches or (len(batches[-1]) + 1) * sum(wider) > tokens:
            batches.append([])
            wider = lengths[row][0] + 1, lengths[row][1] + 1
        batches[-1].append(row)
        source, target = wider
    return batches


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns rows [N, T] of the longest one's length, with `PAD` at the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
