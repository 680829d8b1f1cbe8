"""A vocabulary of pieces of words, learnt from texts in any languages, in which every text can be written."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


PAD, BEGIN, END = 0, 1, 2
SPECIAL = 3  # how many ids are no pieces: those of PAD, BEGIN and END
BYTES = 256
LONGEST_PIECE = 48  # bytes, 16 letters of most scripts: or else a language without spaces gets sentences for pieces
WORDS = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+"  # no piece reaches beyond a match


class Vocabulary:
    """Pieces of text by number: 0 is `PAD`, 1 `BEGIN`, 2 `END`, then 256 bytes, then pieces from short to long.

    A text is a row of bytes in UTF-8 and a piece is some of them, so that nothing is unknown and nothing is
    normalised: what is encoded comes back to the letter. No text, not even `"<pad>"`, is encoded as a special id.

    >>> vocabulary = Vocabulary.learn(["to be or not to be"] * 2, size=300)
    >>> vocabulary.decode(vocabulary.encode("to be: être")), len(vocabulary)
    ('to be: être', 268)
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Learns a vocabulary of at most `size` ids by byte-pair encoding; equal texts give an equal one.

        It is smaller where the texts do not repeat enough to fill it. How often a language stands in `texts` is how
        much of the vocabulary it gets.

        Raises:
            ImportError: tokenizers is not installed.
            ValueError: `size` has no room for the three special ids and the 256 bytes.
        """
        if size < SPECIAL + BYTES:
            raise ValueError(
                f"size is {size}; choose at least {SPECIAL + BYTES}: {SPECIAL} special ids, {BYTES} bytes"
            )
        _check_installed()
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
        """Reads a vocabulary that `save` wrote.

        Raises:
            ImportError: tokenizers is not installed.
            ValueError: The file holds something else.
        """
        _check_installed()
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(Path(file).read_text("utf-8")))
        except OSError:
            raise
        except Exception as error:  # tokenizers raises nothing more particular
            raise ValueError(f"{file} is no vocabulary ({error}); give a file that Vocabulary.save wrote") from error

    def save(self, file: str | PathLike[str]) -> None:
        """Writes the vocabulary as JSON of the library tokenizers, where ids are lower by the three special ones."""
        Path(file).write_text(self._tokenizer.to_str(pretty=True), "utf-8")

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size() + SPECIAL

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the pieces of a text, without `BEGIN` and `END`."""
        return [piece + SPECIAL for piece in self._tokenizer.encode(text).ids]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts at once, on all cores."""
        return [[piece + SPECIAL for piece in found.ids] for found in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text that ids stand for, up to the first `END`; `PAD` and `BEGIN` say nothing.

        Bytes that are no UTF-8, which no text encodes to but a model may say, become the replacement character.

        Raises:
            ValueError: An id that is not of this vocabulary.
        """
        said = list(ids)
        said = said[: said.index(END)] if END in said else said
        unknown = [number for number in said if not 0 <= number < len(self)]
        if unknown:
            raise ValueError(f"ids {unknown[:10]} are not in this vocabulary, whose ids are 0 to {len(self) - 1}")
        return self._tokenizer.decode([number - SPECIAL for number in said if number >= SPECIAL])


def _check_installed() -> None:
    try:
        import tokenizers  # noqa: F401 (to see whether it is there)
    except ImportError as error:
        raise ImportError("vocabularies are learnt by tokenizers: pip install 'gpipe[translation]'") from error
