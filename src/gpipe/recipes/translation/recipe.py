"""One Transformer that translates many languages to English, as section 5 of the GPipe paper trains it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import fsum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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
from gpipe.recipes.training import watched
from gpipe.recipes.translation.corpus import Corpus, Sentence, in_order
from gpipe.recipes.translation.translator import LAYOUTS

VOCABULARY = "vocabulary.json"
Decode = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Translates sources by a beam of a width, or greedily by one of 1."""
EXAMPLES = 40
SACREBLEU = ("sacrebleu", "translations are scored by sacrebleu", "translation")


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


# How well sentences are translated: chrF and BLEU of each language, beside what needs no network.


@dataclass(frozen=True)
class Scores:
    """What the translations of a language, or of all, come to.

    `train` and `test` count pairs; `nll` is of the right translation, in nats a subword; chrF and BLEU, 0 to 100, are
    of greedy translations, of beam search, of sources as they are, and of the most frequent English in training.
    """

    train: int
    test: int
    nll: float
    chrf: float
    bleu: float
    beam_chrf: float | None
    beam_bleu: float | None
    copy_chrf: float
    frequent_chrf: float


class Translated(NamedTuple):
    """A sentence of the test beside what was made of it."""

    language: str
    source: str
    english: str
    greedy: str
    beam: str | None


def evaluation_of(
    corpus: Corpus, nlls: Mapping[str, tuple[float, int]], decode: Decode, tokens: int, width: int
) -> Evaluation:
    """Translates all of a test, so many `tokens` at once, greedily and by a beam of a `width` above 1, and compares.

    `nlls` are negative log-likelihoods by language, and of how many subwords.
    """
    likeliest = _translate(corpus, decode, 1, tokens, "greedily")
    searched: Sequence[str | None] = [None] * len(likeliest)
    if width > 1:
        searched = _translate(corpus, decode, width, tokens // width, f"by a beam of {width}")
    outcomes = zip(corpus.test, likeliest, searched, strict=True)
    translated = [Translated(*one.pair, likely, found) for one, likely, found in outcomes]
    frequent = Counter(pair.english for pair in corpus.split.train).most_common(1)[0][0]
    trained = Counter(pair.language for pair in corpus.split.train)
    apart = {name: [one for one in translated if one.language == name] for name in sorted(nlls)}
    languages = {name: _scores(own, trained[name], nlls[name], frequent) for name, own in apart.items()}
    overall = _scores(translated, trained.total(), together(nlls.values()), frequent)
    numbers = {name: value for name, value in asdict(overall).items() if isinstance(value, float)}
    details = {
        "beam": width,
        "train": overall.train,
        "test": overall.test,
        "languages": {language: asdict(scores) for language, scores in languages.items()},
        "examples": [one._asdict() for one in translated[:: max(1, len(translated) // EXAMPLES)]],
    }
    return Evaluation(numbers, details, "\n".join(table(languages, overall, width)))


def _translate(corpus: Corpus, decode: Decode, width: int, tokens: int, what: str) -> list[str]:
    found: dict[int, str] = {}
    for some in watched(in_order(corpus.test, tokens), what):
        for sentence, words in zip(some, decode([one.source for one in some], width), strict=True):
            found[id(sentence)] = corpus.vocabulary.decode(words)
    return [found[id(sentence)] for sentence in corpus.test]


def _scores(translated: Sequence[Translated], train: int, nll: tuple[float, int], frequent: str) -> Scores:
    _, sources, right, likeliest, searched = zip(*translated, strict=True)
    greedy = chrf(likeliest, right), bleu(likeliest, right)
    by_beam: tuple[float | None, float | None] = None, None
    if None not in searched:
        by_beam = chrf(searched, right), bleu(searched, right)
    without = chrf(sources, right), chrf([frequent] * len(right), right)
    return Scores(train, len(translated), nll[0] / nll[1], *greedy, *by_beam, *without)


def together(nlls: Iterable[tuple[float, int]]) -> tuple[float, int]:
    """Negative log-likelihoods, and of how many words they are, as one."""
    values, words = zip(*nlls, strict=True)
    return fsum(values), sum(words)


def chrf(translations: Sequence[str], right: Sequence[str]) -> float:
    """The chrF of sacrebleu, with its defaults."""
    return float(imported(*SACREBLEU).corpus_chrf(list(translations), [list(right)]).score)


def bleu(translations: Sequence[str], right: Sequence[str]) -> float:
    """The BLEU of sacrebleu, with its defaults but for short texts, whose missing n-grams are left out."""
    scorer = imported(*SACREBLEU).BLEU(effective_order=True)
    return float(scorer.corpus_score(list(translations), [list(right)]).score)


def table(scores: Mapping[str, Scores], overall: Scores, width: int) -> list[str]:
    """A line for each language, the one with most pairs to train on first, and one for all."""
    first = max(8, *map(len, scores))
    lines = [
        f"{'language':{first}}  train  test    nll   chrF  BLEU   chrF  BLEU   copy  frequent",
        f"{'':{first}}                         greedy       beam {width}      chrF      chrF",
    ]
    ordered = sorted(scores.items(), key=lambda item: (-item[1].train, item[0]))
    for name, one in [*ordered, ("together", overall)]:
        beam = (one.beam_chrf, one.beam_bleu)
        searched = "".join(f"{'-' if score is None else f'{score:.1f}':>6}" for score in beam)
        numbers = f"{one.train:7}{one.test:6}{one.nll:7.3f} {one.chrf:6.1f}{one.bleu:6.1f}"
        lines.append(f"{name:{first}}{numbers} {searched} {one.copy_chrf:6.1f}{one.frequent_chrf:10.1f}")
    return lines
