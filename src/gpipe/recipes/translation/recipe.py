"""Trains one Transformer to translate from many languages to English, as in section 5 of the GPipe paper."""

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
from gpipe.recipes.data import require
from gpipe.recipes.data.pairs import Pair
from gpipe.recipes.data.token_batches import END, PAD, Vocabulary, padded
from gpipe.recipes.models.transformer import transformer, transformer_lm
from gpipe.recipes.options.files import CONFIG, read_config
from gpipe.recipes.options.training import TranslationOptions
from gpipe.recipes.recipe import Batch, Evaluation, Recipe, Share, inverse_root
from gpipe.recipes.training import with_progress
from gpipe.recipes.translation.corpus import Corpus, Sentence, batch_by_length
from gpipe.recipes.translation.translator import LAYOUTS

VOCABULARY = "vocabulary.json"
Decode = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Translates source sentences (token ids) by a beam search of the given width. Width 1 is greedy decoding."""
EXAMPLES = 40  # Approximate number of translations in evaluation.json.
SACREBLEU = ("sacrebleu", "Scoring translations requires sacrebleu", "translation")


class TranslationRecipe(Recipe[TranslationOptions]):
    """Trains a Transformer on Django's translations or on a table of sentences."""

    name: ClassVar[str] = "translation"

    def __init__(self, options: TranslationOptions) -> None:
        super().__init__(options)
        o = options
        self.title = f"Transformer T({o.layers}, {o.ffn_dim}, {o.heads}), {o.model_dim} wide"
        if o.model == "decoder":
            self.title = f"Transformer-{2 * o.layers}, {o.model_dim} wide"
        self.reduction = count_tokens  # The loss is a mean over tokens.
        self.max_norm = o.clip_norm
        self._layout = LAYOUTS[o.model]

    @cached_property
    def corpus(self) -> Corpus:
        """The sentences of the options, with the vocabulary of this run or of the run that `--from` names."""
        return Corpus(self.options, self._saved_vocabulary)

    @property
    def vocabulary(self) -> Vocabulary:
        """The saved vocabulary. If no vocabulary was saved, learns one from the sentences."""
        return self._saved_vocabulary or self.corpus.vocabulary

    @cached_property
    def _saved_vocabulary(self) -> Vocabulary | None:
        o = self.options
        if o.from_ is not None and not o.resume and (o.from_ / CONFIG).is_file():
            saved = read_config(o.from_ / CONFIG).get("vocabulary", o.vocabulary)
            if saved != o.vocabulary:
                raise ValueError(
                    f"--vocabulary: {o.vocabulary} differs from {saved} in the run of --from, whose vocabulary is "
                    "used. Remove --vocabulary."
                )
        for run in (o.out if o.resume else None, o.from_):
            if run is not None and (run / VOCABULARY).is_file():
                return Vocabulary.load(run / VOCABULARY)
        return None

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]  # Reading the corpus takes seconds, so it is lazy.
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
        """Returns the mini-batch of median length in the first epoch."""
        batches = self.corpus.mini_batches(1)
        by_length = sorted(batches, key=lambda batch: max(sum(sentence.lengths) for sentence in batch))
        typical = by_length[len(by_length) // 2]
        return self._layout.batch(typical[: max(1, len(typical) // replicas)])

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        for sentences in self.corpus.mini_batches(epoch)[first:]:
            lengths = [sum(sentence.lengths) + 2 for sentence in sentences]  # with END
            groups = gpipe.pack(lengths, self.options.micro_batches, padded=True)
            parts = [
                self._layout.batch([sentences[row] for row in groups[group]])
                for group in share.of(torch.arange(len(groups))).tolist()
            ]
            if not parts:  # There are too few sentences for this replica. It gets one whose tokens do not count.
                batch = self._layout.batch(sentences[:1])
                parts = [batch._replace(targets=torch.full_like(batch.targets, PAD))]
            inputs, targets = zip(*parts, strict=True)
            yield Batch(gpipe.MicroBatches(inputs), gpipe.MicroBatches(targets))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(output, targets, "mean", self.options.label_smoothing)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Builds Adam with the constants of Vaswani et al. (2017, section 5.3)."""
        return torch.optim.Adam(parameters, lr=self.options.learning_rate, betas=(0.9, 0.98), eps=1e-9)

    def learning_rate_at(self, step: int, steps: int) -> float:
        return self.options.learning_rate * inverse_root(step, self.options.warm_up)

    @property
    def data(self) -> str:  # type: ignore[override]  # This is lazy, too.
        return self.corpus.data

    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """Returns the mean negative log-likelihood per token of the validation sentences, in nats."""
        value, tokens = add_nlls(self.nlls(pipe, self.corpus.validation).values())
        return {"nll": value / tokens}

    @torch.no_grad()
    def nlls(self, pipe: gpipe.GPipe, sentences: Sequence[Sentence]) -> dict[str, tuple[float, int]]:
        """Returns, for each language, the total negative log-likelihood and the number of tokens of its sentences."""
        nlls: dict[str, list[tuple[float, int]]] = {}
        for group in batch_by_length(sentences, self.options.tokens):
            batch = self._layout.batch(group)
            logits = pipe(batch.inputs, gather=True)
            rows = zip(logits, batch.targets.to(logits.device), strict=True)
            values = torch.stack([_cross_entropy(row, targets, "sum") for row, targets in rows]).tolist()
            for sentence, value in zip(group, values, strict=True):
                nlls.setdefault(sentence.pair.language, []).append((value, len(sentence.english) + 1))
        return {language: add_nlls(values) for language, values in nlls.items()}

    def model(self, layers: Sequence[nn.Module]) -> tuple[nn.Module, Any]:
        """Returns a model with a `generate` method, and a sample of two empty sentence pairs for tracing."""
        return self._layout(layers), self._layout.batch([Sentence(Pair("", "", ""), [], [])] * 2).inputs

    def translate(self, pipe: gpipe.GPipe, sources: Sequence[Sequence[int]], width: int) -> list[list[int]]:
        """Translates source sentences (token ids) by a beam search of this width."""
        if not sources:
            return []
        generated = pipe.generate(padded([[*source, END] for source in sources]), width=width)
        return [row[: row.index(END)] for row in generated.tolist()]

    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        require(*SACREBLEU)  # Fails now instead of after hours of translating.
        nlls = self.nlls(pipe, self.corpus.test)
        translate = partial(self.translate, pipe)
        return evaluate_translations(self.corpus, nlls, translate, self.options.tokens, self.options.beam)

    def write(self, run: Path) -> None:
        self.vocabulary.save(run / VOCABULARY)


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str, smoothing: float = 0.0) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    return F.cross_entropy(*flat, ignore_index=PAD, reduction=reduction, label_smoothing=smoothing)


def count_tokens(targets: Tensor) -> Tensor:
    """Returns the number of target tokens that are not padding."""
    return (targets != PAD).sum()


# Scores of translations, per language.


@dataclass(frozen=True)
class Scores:
    """Scores of the translations of one language, or of all languages.

    Attributes:
        train: Number of training pairs.
        test: Number of test pairs.
        nll: Mean negative log-likelihood per token of the reference translations, in nats.
        chrf: chrF (0 to 100) of greedy translations.
        bleu: BLEU (0 to 100) of greedy translations.
        beam_chrf: chrF of translations by beam search. None without beam search.
        beam_bleu: BLEU of translations by beam search. None without beam search.
        copy_chrf: chrF of the untranslated source sentences, as a baseline.
        frequent_chrf: chrF of the most frequent English sentence in the training pairs, as a baseline.
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
    """A test sentence with its reference, greedy and beam search translations."""

    language: str
    source: str
    english: str
    greedy: str
    beam: str | None


def evaluate_translations(
    corpus: Corpus, nlls: Mapping[str, tuple[float, int]], decode: Decode, tokens: int, width: int
) -> Evaluation:
    """Translates the test sentences and scores the translations.

    Args:
        corpus: The sentences.
        nlls: Negative log-likelihood and number of tokens of each language.
        decode: Translates token ids.
        tokens: Maximum number of tokens to translate together.
        width: Width of the beam search. With 1, there are only greedy translations.
    """
    greedy = _translate(corpus, decode, 1, tokens, "greedy decoding")
    by_beam: Sequence[str | None] = [None] * len(greedy)
    if width > 1:
        by_beam = _translate(corpus, decode, width, tokens // width, f"beam search, width {width}")
    outcomes = zip(corpus.test, greedy, by_beam, strict=True)
    translated = [Translated(*sentence.pair, text, beam_text) for sentence, text, beam_text in outcomes]
    frequent = Counter(pair.english for pair in corpus.split.train).most_common(1)[0][0]
    trained = Counter(pair.language for pair in corpus.split.train)
    languages = {}
    for name in sorted(nlls):
        selected = [each for each in translated if each.language == name]
        languages[name] = _scores(selected, trained[name], nlls[name], frequent)
    overall = _scores(translated, trained.total(), add_nlls(nlls.values()), frequent)
    numbers = {name: value for name, value in asdict(overall).items() if isinstance(value, float)}
    details = {
        "beam": width,
        "train": overall.train,
        "test": overall.test,
        "languages": {language: asdict(scores) for language, scores in languages.items()},
        "examples": [example._asdict() for example in translated[:: max(1, len(translated) // EXAMPLES)]],
    }
    return Evaluation(numbers, details, "\n".join(table(languages, overall, width)))


def _translate(corpus: Corpus, decode: Decode, width: int, tokens: int, title: str) -> list[str]:
    texts: dict[int, str] = {}
    for batch in with_progress(batch_by_length(corpus.test, tokens), title):
        for sentence, ids in zip(batch, decode([sentence.source for sentence in batch], width), strict=True):
            texts[id(sentence)] = corpus.vocabulary.decode(ids)
    return [texts[id(sentence)] for sentence in corpus.test]


def _scores(translated: Sequence[Translated], train: int, nll: tuple[float, int], frequent: str) -> Scores:
    _, sources, references, greedy, by_beam = zip(*translated, strict=True)
    beam_scores: tuple[float | None, float | None] = None, None
    if None not in by_beam:
        beam_scores = chrf(by_beam, references), bleu(by_beam, references)
    greedy_scores = chrf(greedy, references), bleu(greedy, references)
    baselines = chrf(sources, references), chrf([frequent] * len(references), references)
    return Scores(train, len(translated), nll[0] / nll[1], *greedy_scores, *beam_scores, *baselines)


def add_nlls(nlls: Iterable[tuple[float, int]]) -> tuple[float, int]:
    """Returns the sum of the negative log-likelihoods, and the sum of the numbers of tokens."""
    values, tokens = zip(*nlls, strict=True)
    return fsum(values), sum(tokens)


def chrf(translations: Sequence[str], references: Sequence[str]) -> float:
    """Returns the chrF score of sacrebleu with its default settings."""
    return float(require(*SACREBLEU).corpus_chrf(list(translations), [list(references)]).score)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Returns the BLEU score of sacrebleu with `effective_order=True`, which ignores n-grams that are too long."""
    scorer = require(*SACREBLEU).BLEU(effective_order=True)
    return float(scorer.corpus_score(list(translations), [list(references)]).score)


def table(scores: Mapping[str, Scores], overall: Scores, width: int) -> list[str]:
    """Returns the lines of a table with all languages, starting with the most frequent language, and their total."""
    first = max(8, *map(len, scores))
    lines = [
        f"{'language':{first}}  train  test    nll   chrF  BLEU   chrF  BLEU   copy  frequent",
        f"{'':{first}}                         greedy       beam {width}      chrF      chrF",
    ]
    ordered = sorted(scores.items(), key=lambda item: (-item[1].train, item[0]))
    for name, row in [*ordered, ("all", overall)]:
        beam = "".join(f"{'-' if score is None else f'{score:.1f}':>6}" for score in (row.beam_chrf, row.beam_bleu))
        numbers = f"{row.train:7}{row.test:6}{row.nll:7.3f} {row.chrf:6.1f}{row.bleu:6.1f}"
        lines.append(f"{name:{first}}{numbers} {beam} {row.copy_chrf:6.1f}{row.frequent_chrf:10.1f}")
    return lines
