"""Splits texts into tokens, groups pairs of sentences into mini-batches by size, and pads mini-batches to tensors."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpipe.recipes.data import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZERS = ("tokenizers", "Vocabularies require the library tokenizers", "translation")
PAD, BEGIN, END = 0, 1, 2
SPECIAL = 3  # Number of special tokens.
# In bytes: 16 letters of most scripts. Without it, whole sentences become tokens in languages without spaces.
LONGEST_TOKEN = 48
WORDS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+"  # A token does not cross the end of a match.
ORDER = 3  # Key of random numbers, different from the keys in other modules.

Lengths = Sequence[tuple[int, int]]  # Numbers of source and target tokens of each pair, without special tokens.


class Vocabulary:
    """Maps texts to token ids and back: 0 is `PAD`, 1 `BEGIN`, 2 `END`, followed by 256 bytes and longer tokens.

    Tokens are sequences of UTF-8 bytes, so every text can be encoded, and decoding returns the same text. No text is
    encoded as a special token, not even `"<pad>"`.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Learns a vocabulary by byte-pair encoding, with at most `size` ids (at least 259).

        The result is deterministic.

        The vocabulary is smaller if the texts have too few repetitions.
        """
        require(*TOKENIZERS)
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size - SPECIAL,
            min_frequency=2,
            max_token_length=LONGEST_TOKEN,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, file: str | PathLike[str]) -> "Vocabulary":
        """Reads a vocabulary that `save` wrote. Raises a ValueError if the file contains something else."""
        require(*TOKENIZERS)
        from tokenizers import Tokenizer

        text = Path(file).read_text("utf-8")
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # The library raises no more specific exception.
            raise ValueError(f"{file}: is not a vocabulary: {error}. Restore the file of the run.") from error

    def save(self, file: str | PathLike[str]) -> None:
        """Writes the vocabulary in the JSON format of the library tokenizers.

        Ids in the file are smaller by `SPECIAL`.
        """
        Path(file).write_text(self._tokenizer.to_str(pretty=True), "utf-8")

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size() + SPECIAL

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without `BEGIN` and `END`. Uses all cores."""
        return [[token + SPECIAL for token in encoded.ids] for encoded in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids up to the first `END`. Invalid UTF-8 becomes the replacement character."""
        until_end = ids[: ids.index(END)] if END in ids else ids
        return self._tokenizer.decode([token - SPECIAL for token in until_end if token >= SPECIAL])


def token_batches(lengths: Lengths, tokens: int, steps: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Groups rows with similar lengths into exactly `steps` mini-batches.

    With `steps_per_epoch(lengths, tokens)` steps, every row is used once. If the rows fill more mini-batches, random
    mini-batches are dropped. If the rows fill fewer, the largest mini-batches are halved.

    Args:
        lengths: Numbers of source and target tokens of each row.
        tokens: Maximum number of tokens in a mini-batch, including one `END` per sentence and padding. Each row must
            fit.
        steps: Number of mini-batches.
        seed: Random seed.
        epoch: Number of the epoch.

    Returns:
        The row numbers [N] of each mini-batch.
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
    """Returns the number of mini-batches that contain all rows, with at most `tokens` tokens each."""
    return len(_pack(lengths, tokens, range(len(lengths))))


def _pack(lengths: Lengths, tokens: int, rows: Iterable[int]) -> list[list[int]]:
    """Packs rows, sorted by length, into mini-batches with at most `tokens` tokens.

    Rows with equal lengths keep their order.
    """

    def by_length(row: int) -> tuple[int, int]:
        """Returns a sort key: target length, then source length in alternating order, so neighbors are similar."""
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
    """Stacks rows into a tensor [N, T], with `PAD` after shorter rows."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
