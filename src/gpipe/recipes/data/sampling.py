"""Which pairs an epoch sees: rare languages above their share, no pair twice before its language is through.

Rules that `draw` keeps:

1. Every epoch has equally many pairs of a language, so that its sizes are known before training.
2. The pairs of a language come in rounds: each pair once in a new order, then all again. An epoch goes on where the
   one before it stopped, perhaps within a round.
3. All is a function of the arguments, not of what was drawn before: a run resumes at any epoch.

In which order an epoch visits the rows of a data set.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gpipe.recipes.data.pairs import Pair

ROUND, EPOCH = 1, 2  # set apart the draws of rounds from those of epochs, and both from those of other modules


def language_probabilities(counts: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Returns how probable a language is by how many pairs it has: p ~ count^(1 / temperature).

    Temperature 1 leaves the shares as they are, a higher one evens them out, infinity makes them equal.

    >>> language_probabilities({"de": 900, "fy": 100}, temperature=2)
    {'de': 0.75, 'fy': 0.25}
    >>> language_probabilities({"de": 900, "fy": 100}, temperature=float("inf"))
    {'de': 0.5, 'fy': 0.5}

    Raises:
        ValueError: `temperature` is not positive, there is no language, or one has no pairs.
    """
    empty = [language for language, count in counts.items() if count < 1]
    mistakes = [
        *([f"temperature is {temperature}; choose one above 0, such as 1 or 5"] if not temperature > 0 else []),
        *(["there are no languages; give at least one pair"] if not counts else []),
        *([f"languages without pairs, to be left out: {', '.join(empty)}"] if empty else []),
    ]
    if mistakes:
        raise ValueError("; ".join(mistakes))
    most = max(counts.values())
    weights = {language: math.pow(count / most, 1 / temperature) for language, count in counts.items()}
    total = math.fsum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def draw(pairs: Sequence[Pair], temperature: float, count: int, *, seed: int, epoch: int) -> list[int]:
    """Returns the numbers of the `count` pairs that an epoch sees: a function of the arguments alone.

    Of each language come `count` times its probability, rounded so that the sum is `count`; one whose share is less
    than half a pair may go without. Drawing `len(pairs)` at temperature 1 gives each pair once. Within an epoch, and
    from epoch to epoch of the same arguments, no pair comes again before all of its language came.

    >>> pairs = [Pair("de", "ja", "yes"), Pair("de", "nein", "no"), Pair("fy", "ja", "yes")]
    >>> sorted(draw(pairs, temperature=1, count=3, seed=0, epoch=1))
    [0, 1, 2]
    >>> sorted(draw(pairs, temperature=float("inf"), count=4, seed=0, epoch=1))
    [0, 1, 2, 2]

    Raises:
        ValueError: `count` is negative, or what `language_probabilities` refuses.
    """
    if count < 0:
        raise ValueError(f"count is {count}; choose how many pairs an epoch sees, 0 or more")
    numbers: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers.setdefault(pair.language, []).append(number)
    probabilities = language_probabilities({name: len(numbers[name]) for name in sorted(numbers)}, temperature)
    drawn: list[int] = []
    for index, (language, quota) in enumerate(_quotas(probabilities, count).items()):
        drawn += _next_of_rounds(numbers[language], start=epoch * quota, quota=quota, key=(seed, index))
    order = np.random.default_rng((seed, epoch, EPOCH)).permutation(len(drawn))
    return [drawn[place] for place in order]


def _quotas(probabilities: Mapping[str, float], count: int) -> dict[str, int]:
    """Rounds `count` x probability down, and gives what is left over to the largest remainders."""
    shares = {language: round(count * share, 6) for language, share in probabilities.items()}
    quotas = {language: math.floor(share) for language, share in shares.items()}
    by_remainder = sorted(shares, key=lambda language: quotas[language] - shares[language])
    for language in by_remainder[: count - sum(quotas.values())]:
        quotas[language] += 1
    return quotas


def _next_of_rounds(numbers: Sequence[int], start: int, quota: int, key: tuple[int, int]) -> Iterator[int]:
    """Yields `quota` numbers from the endless row of rounds through `numbers`, from place `start` on."""
    size, end = len(numbers), start + quota
    for turn in range(start // size, -(-end // size)):
        order = np.random.default_rng((*key, turn, ROUND)).permutation(size)
        yield from (numbers[place] for place in order[max(start - turn * size, 0) : end - turn * size])


def batches(rows: int, batch_size: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Returns the row numbers of each mini-batch of an epoch: a function of the arguments and of nothing else.

    Every row appears at most once. The rows left over after the last whole mini-batch sit this epoch out, others
    in the next, so that every step has the same shape.

    >>> [batch.tolist() for batch in batches(rows=7, batch_size=3, seed=0, epoch=1)]
    [[1, 3, 6], [0, 4, 2]]

    Raises:
        ValueError: No whole mini-batch fits into `rows`.
    """
    if not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size is {batch_size}; choose one from 1 to {rows}, the number of rows")
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(rows))
    whole = rows - rows % batch_size
    return list(torch.tensor_split(order[:whole], whole // batch_size))
