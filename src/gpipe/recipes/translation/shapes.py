"""How sentences become what a network reads: an encoder and a decoder, or a decoder alone.

encoder-decoder   source  ein Haus END .      target in  BEGIN a house   targets  a house END
decoder           ein Haus END BEGIN a house                            targets  . . . a house END
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.recipes.data.token_batches import collate, padded
from gpipe.recipes.data.vocabulary import BEGIN, END, PAD
from gpipe.recipes.models import transformer, transformer_lm
from gpipe.recipes.options.translation import TranslationOptions
from gpipe.recipes.recipe import Batch
from gpipe.recipes.translation.corpus import Sentence
from gpipe.recipes.translation.decode import Network


class Shape(Protocol):
    """What the two kinds of networks differ in."""

    def layers(self, options: TranslationOptions, vocabulary: int) -> list[nn.Module]:
        """Builds the network for so many subwords."""

    def batch(self, sentences: Sequence[Sentence]) -> Batch:
        """What it reads, and what it should say; PAD where anything may be said."""

    def network(self, forward: "Forward") -> Network:
        """What decoding asks, by a forward of the network."""


class Forward(Protocol):
    """Logits [N, T, vocabulary] for what the network reads."""

    def __call__(self, inputs: object) -> Tensor:
        """Gives logits."""


class EncoderDecoder:
    """T(L, H, A) of the paper's section 5."""

    def layers(self, options: TranslationOptions, vocabulary: int) -> list[nn.Module]:
        """Builds the network for so many subwords."""
        o = options
        return transformer(
            o.layers,
            o.ffn_dim,
            o.heads,
            model_dim=o.model_dim,
            head_dim=o.head_dim,
            vocab=vocabulary,
            matrices=o.matrices,
            dropout=o.dropout,
            scaled_init=o.scaled_init,
            clip_logits=o.clip_logits or None,
            pad=PAD,
        )

    def batch(self, sentences: Sequence[Sentence]) -> Batch:
        """Sources and targets, padded apart."""
        source, target_in, target_out = collate([one.source for one in sentences], [one.english for one in sentences])
        return Batch((source, target_in), target_out)

    def network(self, forward: Forward) -> Network:
        """Asks as it is."""
        return lambda words, begun: forward((words, begun))


class Decoder:
    """The language model of the paper's Table 1."""

    def layers(self, options: TranslationOptions, vocabulary: int) -> list[nn.Module]:
        """Builds the network for so many subwords."""
        o = options
        return transformer_lm(
            2 * o.layers,
            o.model_dim,
            o.ffn_dim,
            o.heads,
            vocab=vocabulary,
            tied=o.matrices < 3,
            dropout=o.dropout,
            scaled_init=o.scaled_init,
            clip_logits=o.clip_logits or None,
        )

    def batch(self, sentences: Sequence[Sentence]) -> Batch:
        """Each sentence and its translation in one row; what is not English is not learnt."""
        rows = [[*one.source, END, BEGIN, *one.english] for one in sentences]
        targets = [[*[PAD] * (len(one.source) + 1), *one.english, END] for one in sentences]
        return Batch(padded(rows), padded(targets))

    def network(self, forward: Forward) -> Network:
        """Puts sources and beginnings in one row each, and picks what was said at the ends of rows."""

        def ask(words: Tensor, begun: Tensor) -> Tensor:
            lengths = (words != PAD).sum(dim=1)
            places = lengths[:, None] + torch.arange(begun.shape[1])
            rows = F.pad(words, (0, begun.shape[1]), value=PAD).scatter(1, places, begun)
            return forward(rows)[torch.arange(len(rows)), places[:, -1]][:, None]

        return ask


SHAPES: dict[str, Shape] = {"encoder-decoder": EncoderDecoder(), "decoder": Decoder()}
