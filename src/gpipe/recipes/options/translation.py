"""Options of the translation recipe."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from gpipe.recipes.options.training import Bounds, Count, NotNegative, Part, Positive, TrainOptions, at_least


@dataclass(frozen=True)
class TranslationOptions(TrainOptions):
    """Trains one Transformer to translate from many languages to English."""

    UNDECISIVE: ClassVar[frozenset[str]] = TrainOptions.UNDECISIVE | {"epochs", "steps", "beam", "sentences"}
    NETWORK: ClassVar[tuple[str, ...]] = (
        *("model", "layers", "ffn_dim", "heads", "model_dim", "head_dim", "vocabulary", "matrices"),
    )

    out: Path = Path("out/translation")

    #: encoder-decoder: T(L, H, A) of the paper's section 5; decoder: its Table 1's language model, of 2 L layers,
    #: which reads a sentence and goes on in English.
    model: Literal["encoder-decoder", "decoder"] = "encoder-decoder"
    layers: Count = 1  # L: how many layers the encoder has, and how many the decoder.
    ffn_dim: Count = 512  # H: how wide feed-forward layers are inside.
    heads: Count = 4  # A: how many heads attention has.
    model_dim: Count = 128  # How wide the values between layers are; 1024 in the paper.
    head_dim: Count = 32  # How wide a head is; 64 in the paper. A decoder's are --model-dim / --heads.
    #: How many subwords there are at most, of all languages; 64000 in the paper.
    vocabulary: Annotated[int, at_least(300)] = 4000
    #: How many matrices of the vocabulary there are: tables of source and of target words and the softmax layer, of
    #: which 2 share the last two, 1 all. Of a decoder 3 keeps both its own.
    matrices: Literal[1, 2, 3] = 3
    dropout: Part = 0.1  # How much of what attention and feed-forward layers add is dropped.
    #: Weights of feed-forward layers start the smaller the more layers there are, which deep models need.
    scaled_init: bool = True
    clip_logits: NotNegative = 0.0  # In training, logits are kept between this and its opposite; 0: they are not.
    #: A file of lines of language, sentence and English sentence, with tabs between them; by default the catalogues
    #: of Django, 96 languages.
    tsv: Path | None = None
    languages: tuple[str, ...] = ()  # Codes of the languages that are learnt; by default all.
    #: T: languages are drawn in proportion to the 1/T-th power of their numbers of sentences. 1.43 is multilingual
    #: BERT's, which the paper takes; with 5 they are drawn nearly alike.
    temperature: Annotated[float, Bounds("more than 0", lambda value: value > 0)] = 1.43
    #: How many subwords, of both languages and with padding, a mini-batch has at most.
    tokens: Annotated[int, at_least(64)] = 4096
    longest: Count = 100  # Pairs with more subwords than this, on either side, are not trained on.
    learning_rate: Positive = 3e-3  # The largest; Adam's, which falls as the inverse root of steps.
    warm_up: Count = 400  # For how many steps the learning rate rises.
    label_smoothing: Part = 0.1  # How much of each target is spread over the vocabulary.
    clip_norm: NotNegative = 0.0  # Gradients are scaled down to this norm; 0: they are not.
    #: How many translations of a sentence are followed at once in an evaluation, beside the greedy one; 1: none.
    beam: Count = 4
    #: How many sentences of each language an evaluation translates at most; by default all of the test.
    sentences: Count | None = None

    def problems(self) -> Iterator[str]:
        """A line for each option that cannot be, with what to do."""
        yield from super().problems()
        if self.tokens < 2 * self.longest + 4:
            yield f"--tokens is {self.tokens}: choose {2 * self.longest + 4} or more, for a pair of --longest each"
