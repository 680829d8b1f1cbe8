"""How well sentences are translated: chrF and BLEU of each language, beside what needs no network."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum

from gpipe.recipes.display import watched
from gpipe.recipes.recipe import Evaluation
from gpipe.recipes.translation.corpus import Corpus, Sentence, in_order
from gpipe.recipes.translation.decode import Network, beam, greedy

Decode = Callable[[Sequence[Sequence[int]]], list[list[int]]]


@dataclass(frozen=True)
class Scores:
    """What the translations of a language, or of all, come to.

    Attributes:
        train: Pairs that were trained on.
        test: Pairs that were translated.
        nll: Negative log-likelihood of the right translation, nats a subword.
        chrf: Of greedy translations, 0 to 100 (Popović, 2015).
        bleu: Of the same, 0 to 100.
        beam_chrf: Of translations by beam search; None if there was none.
        beam_bleu: Of the same.
        copy_chrf: Of the sentences themselves, left as they are.
        frequent_chrf: Of the English sentence that is most frequent in training, for each.
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


@dataclass(frozen=True)
class Translated:
    """A sentence of the test beside what was made of it."""

    sentence: Sentence
    greedy: str
    beam: str | None
    frequent: str


def evaluation_of(
    test: Sequence[Sentence],
    nlls: Mapping[str, tuple[float, int]],
    network: Network,
    corpus: Corpus,
    *,
    tokens: int,
    width: int,
) -> Evaluation:
    """Translates all of a test, and compares.

    Args:
        test: The sentences.
        nlls: Negative log-likelihoods by language, and of how many subwords.
        network: The pipelined forward.
        corpus: Whose subwords and sentences of training.
        tokens: How many subwords are translated at once, at most.
        width: Of the beam; 1: there is none.
    """
    frequent = Counter(pair.english for pair in corpus.split.train).most_common(1)[0][0]
    likeliest = translate(test, lambda sources: greedy(network, sources), corpus, tokens, "greedily")
    searched = (
        translate(
            test, lambda sources: beam(network, sources, width), corpus, tokens // width, f"by a beam of {width}"
        )
        if width > 1
        else [None] * len(test)
    )
    translated = [Translated(*one, frequent) for one in zip(test, likeliest, searched, strict=True)]
    languages = {
        language: scores_of(
            [one for one in translated if one.sentence.pair.language == language],
            corpus.counts[language],
            nlls[language],
        )
        for language in sorted({one.sentence.pair.language for one in translated})
    }
    whole = (fsum(value for value, _ in nlls.values()), sum(words for _, words in nlls.values()))
    overall = scores_of(translated, sum(corpus.counts.values()), whole)
    numbers = {name: value for name, value in asdict(overall).items() if isinstance(value, float)}
    details = {
        "beam": width,
        "train": overall.train,
        "test": overall.test,
        "languages": {language: asdict(scores) for language, scores in languages.items()},
        "examples": [_example(one) for one in translated[:: max(1, len(translated) // 40)]],
    }
    return Evaluation(numbers, details, "\n".join(table(languages, overall, width)))


def translate(test: Sequence[Sentence], decode: Decode, corpus: Corpus, tokens: int, what: str) -> list[str]:
    """Translates sentences, those of similar length at once."""
    found: dict[int, str] = {}
    for some in watched(in_order(test, tokens), what):
        for sentence, words in zip(some, decode([one.source for one in some]), strict=True):
            found[id(sentence)] = corpus.vocabulary.decode(words)
    return [found[id(sentence)] for sentence in test]


def scores_of(translated: Sequence[Translated], train: int, nll: tuple[float, int]) -> Scores:
    """What translations come to together."""
    right = [one.sentence.pair.english for one in translated]
    searched = [one.beam for one in translated if one.beam is not None]
    return Scores(
        train,
        len(translated),
        nll[0] / max(1, nll[1]),
        chrf([one.greedy for one in translated], right),
        bleu([one.greedy for one in translated], right),
        chrf(searched, right) if searched else None,
        bleu(searched, right) if searched else None,
        chrf([one.sentence.pair.source for one in translated], right),
        chrf([one.frequent for one in translated], right),
    )


def check_installed() -> None:
    """Looks for sacrebleu, before hours of translating.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import sacrebleu  # noqa: F401 (to see whether it is there)
    except ImportError as error:
        raise ImportError("translations are scored by sacrebleu: pip install 'gpipe[translation]'") from error


def chrf(translations: Sequence[str], right: Sequence[str]) -> float:
    """The chrF of sacrebleu, with its defaults.

    >>> round(chrf(["a house"], ["a house"]), 3)
    100.0
    """
    import sacrebleu

    return float(sacrebleu.corpus_chrf(list(translations), [list(right)]).score)


def bleu(translations: Sequence[str], right: Sequence[str]) -> float:
    """The BLEU of sacrebleu, with its defaults but for short texts, whose missing n-grams are left out.

    >>> round(bleu(["a house"], ["a house"]), 3)
    100.0
    """
    import sacrebleu

    return float(sacrebleu.BLEU(effective_order=True).corpus_score(list(translations), [list(right)]).score)


def _example(one: Translated) -> dict[str, str | None]:
    pair = one.sentence.pair
    return {
        "language": pair.language,
        "source": pair.source,
        "english": pair.english,
        "greedy": one.greedy,
        "beam": one.beam,
    }


def table(scores: Mapping[str, Scores], overall: Scores, width: int) -> list[str]:
    r"""A line for each language, the one with most pairs to train on first, and one for all.

    >>> one = Scores(9, 2, 1.5, 50.0, 30.0, 51.0, 31.0, 8.0, 4.0)
    >>> print(*table({"de": one}, one, width=4), sep="\n")
    language  train  test    nll   chrF  BLEU   chrF  BLEU   copy  frequent
                                     greedy       beam 4      chrF      chrF
    de            9     2  1.500   50.0  30.0   51.0  31.0    8.0       4.0
    together      9     2  1.500   50.0  30.0   51.0  31.0    8.0       4.0
    """
    first = max(8, *map(len, scores))
    head = f"{'language':{first}}  train  test    nll   chrF  BLEU   chrF  BLEU   copy  frequent"
    under = f"{'':{first}}                         greedy       beam {width}      chrF      chrF"
    ordered = sorted(scores.items(), key=lambda item: (-item[1].train, item[0]))
    return [head, under, *(_line(name.ljust(first), one) for name, one in [*ordered, ("together", overall)])]


def _line(language: str, one: Scores) -> str:
    searched = f"{one.beam_chrf:6.1f}{one.beam_bleu:6.1f}" if one.beam_chrf is not None else f"{'-':>6}{'-':>6}"
    numbers = f"{one.train:7}{one.test:6}{one.nll:7.3f} {one.chrf:6.1f}{one.bleu:6.1f}"
    return f"{language}{numbers} {searched} {one.copy_chrf:6.1f}{one.frequent_chrf:10.1f}"
