"""One Transformer that translates many languages to English, as section 5 of the GPipe paper trains it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data import imported
from gpipe.recipes.data.pairs import Pair
from gpipe.recipes.data.token_batches import END, PAD, Vocabulary, padded
from gpipe.recipes.models.transformer import transformer, transformer_lm
from gpipe.recipes.options.files import CONFIG, read_config
from gpipe.recipes.options.training import TranslationOptions
from gpipe.recipes.recipe import Batch, Evaluation, Recipe, Share, inverse_root
from gpipe.recipes.translation.corpus import Corpus, Sentence, in_order
from gpipe.recipes.translation.evaluation import SACREBLEU, evaluation_of, together
from gpipe.recipes.translation.translator import LAYOUTS

VOCABULARY = "vocabulary.json"


class TranslationRecipe(Recipe[TranslationOptions]):
    """A Transformer on the catalogues of Django, or on a table of sentences."""

    name: ClassVar[str] = "translation"

    def __init__(self, options: TranslationOptions) -> None:
        super().__init__(options)
        o = options
        self.title = f"Transformer T({o.layers}, {o.ffn_dim}, {o.heads}), {o.model_dim} wide"
        if o.model == "decoder":
            self.title = f"Transformer-{2 * o.layers}, {o.model_dim} wide"
        self.reduction = count_words  # a micro-batch counts as many times as it has words
        self.largest_norm = o.clip_norm
        self._layout = LAYOUTS[o.model]

    @cached_property
    def corpus(self) -> Corpus:
        """The sentences; a vocabulary that the run has, or the one it starts from, is kept."""
        return Corpus(self.options, self._kept_vocabulary)

    @property
    def vocabulary(self) -> Vocabulary:
        """The subwords; they are learnt from the sentences unless the run has some."""
        return self._kept_vocabulary or self.corpus.vocabulary

    @cached_property
    def _kept_vocabulary(self) -> Vocabulary | None:
        o = self.options
        if o.from_ is not None and not o.resume and (o.from_ / CONFIG).is_file():
            kept = read_config(o.from_ / CONFIG).get("vocabulary", o.vocabulary)
            if kept != o.vocabulary:
                raise ValueError(
                    f"--vocabulary is {o.vocabulary}, and {o.from_} has one of {kept}, which is kept: leave it out"
                )
        for run in (o.out if o.resume else None, o.from_):
            if run is not None and (run / VOCABULARY).is_file():
                return Vocabulary.load(run / VOCABULARY)
        return None

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]  # found out when asked for
        return self.corpus.steps_per_epoch

    def layers(self) -> list[nn.Module]:
        o = self.options
        common: dict[str, Any] = {"vocab": len(self.vocabulary), "dropout": o.dropout, "scaled_init": o.scaled_init}
        common["clip_logits"] = o.clip_logits or None
        if o.model == "decoder":
            return transformer_lm(2 * o.layers, o.model_dim, o.ffn_dim, o.heads, tied=o.matrices < 3, **common)
        sizes: dict[str, Any] = {"model_dim": o.model_dim, "head_dim": o.head_dim, "matrices": o.matrices}
        return transformer(o.layers, o.ffn_dim, o.heads, pad=PAD, **sizes, **common)

    def sample(self, replicas: int) -> Batch:
        """The mini-batch of median length of the first epoch."""
        by_length = sorted(self.corpus.mini_batches(1), key=lambda some: max(sum(one.lengths) for one in some))
        typical = by_length[len(by_length) // 2]
        return self._layout.batch(typical[: max(1, len(typical) // replicas)])

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        for sentences in self.corpus.mini_batches(epoch)[first:]:
            own = share.of(torch.arange(len(sentences))).tolist()
            batch = self._layout.batch([sentences[row] for row in own or [0]])
            if not own:  # there are too few for this replica: one of them, of which no word counts
                batch = batch._replace(targets=torch.full_like(batch.targets, PAD))
            yield batch

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(output, targets, "mean", self.options.label_smoothing)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Adam with the constants of Vaswani et al. (2017, section 5.3)."""
        return torch.optim.Adam(parameters, lr=self.options.learning_rate, betas=(0.9, 0.98), eps=1e-9)

    def learning_rate_at(self, step: int, steps: int) -> float:
        return self.options.learning_rate * inverse_root(step, self.options.warm_up)

    @property
    def data(self) -> str:  # type: ignore[override]  # likewise
        return self.corpus.data

    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """The mean negative log-likelihood of a word of the sentences held out for that, in nats."""
        value, words = together(self.nlls(pipe, self.corpus.validation).values())
        return {"nll": value / words}

    @torch.no_grad()
    def nlls(self, pipe: gpipe.GPipe, sentences: Sequence[Sentence]) -> dict[str, tuple[float, int]]:
        """The negative log-likelihood of each language's sentences, and how many words it is of."""
        found: dict[str, list[tuple[float, int]]] = {}
        for some in in_order(sentences, self.options.tokens):
            batch = self._layout.batch(some)
            logits = pipe(batch.inputs, gather=True)
            rows = zip(logits, batch.targets.to(logits.device), strict=True)
            values = torch.stack([_cross_entropy(own, targets, "sum") for own, targets in rows]).tolist()
            for sentence, value in zip(some, values, strict=True):
                found.setdefault(sentence.pair.language, []).append((value, len(sentence.english) + 1))
        return {language: together(some) for language, some in found.items()}

    def model(self, layers: Sequence[nn.Module]) -> tuple[nn.Module, Any]:
        """What translates by these layers; its sample are two pairs of nothing."""
        return self._layout(layers), self._layout.batch([Sentence(Pair("", "", ""), [], [])] * 2).inputs

    def translate(self, pipe: gpipe.GPipe, sources: Sequence[Sequence[int]], width: int) -> list[list[int]]:
        if not sources:
            return []
        found = pipe.generate(padded([[*source, END] for source in sources]), width=width)
        return [row[: row.index(END)] for row in found.tolist()]

    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        imported(*SACREBLEU)  # to see whether it is there, before hours of translating
        nlls = self.nlls(pipe, self.corpus.test)
        return evaluation_of(self.corpus, nlls, partial(self.translate, pipe), self.options.tokens, self.options.beam)

    def write(self, run: Path) -> None:
        self.vocabulary.save(run / VOCABULARY)


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str, smoothing: float = 0.0) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    return F.cross_entropy(*flat, ignore_index=PAD, reduction=reduction, label_smoothing=smoothing)


def count_words(targets: Tensor) -> Tensor:
    """How many words are to be said."""
    return (targets != PAD).sum()
