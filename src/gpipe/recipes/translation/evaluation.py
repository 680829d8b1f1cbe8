"""How well sentences are translated: chrF and BLEU of each language, beside what needs no network."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import NamedTuple

from gpipe.recipes.data import imported
from gpipe.recipes.recipe import Evaluation
from gpipe.recipes.training import watched
from gpipe.recipes.translation.corpus import Corpus, in_order

Decode = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Translates sources by a beam of a width, or greedily by one of 1."""
EXAMPLES = 40
SACREBLEU = ("sacrebleu", "translations are scored by sacrebleu", "translation")


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
    return Scores(
        train,
        len(translated),
        nll[0] / nll[1],
        chrf(likeliest, right),
        bleu(likeliest, right),
        None if None in searched else chrf(searched, right),
        None if None in searched else bleu(searched, right),
        chrf(sources, right),
        chrf([frequent] * len(right), right),
    )


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
