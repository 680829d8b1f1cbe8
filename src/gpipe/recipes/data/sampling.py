"""Which rows an epoch sees, and in which order; all is a function of the arguments, so a run resumes at any epoch.

Of pairs of sentences, rules that `draw` keeps:

1. Every epoch has equally many pairs of a language, so that its sizes are known before training.
2. The pairs of a language come in rounds: each pair once in a new order, then all again. An epoch goes on where the
   one before it stopped, perhaps within a round.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gpipe.recipes.data.pairs import Pair

ROUND, EPOCH, SUBSET = 1, 2, 6  # set the draws of each kind apart from the others, and from those of other modules
T = TypeVar("T")


def language_probabilities(counts: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Returns how probable a language is by how many pairs it has: p ~ count^(1 / temperature).

    Temperature 1 leaves the shares as they are, a higher one evens them out, infinity makes them equal.

    >>> language_probabilities({"de": 900, "fy": 100}, temperature=2)
    {'de': 0.75, 'fy': 0.25}
    """
    most = max(counts.values())
    weights = {language: math.pow(count / most, 1 / temperature) for language, count in counts.items()}
    total = math.fsum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def draw(pairs: Sequence[Pair], temperature: float, count: int, *, seed: int, epoch: int) -> list[int]:
    """Returns the numbers of the `count` pairs that an epoch sees.

    Of each language come `count` times its probability, rounded so that the sum is `count`; one whose share is less
    than half a pair may go without. Drawing `len(pairs)` at temperature 1 gives each pair once. Within an epoch, and
    from epoch to epoch of the same arguments, no pair comes again before all of its language came.

    >>> pairs = [Pair("de", "ja", "yes"), Pair("de", "nein", "no"), Pair("fy", "ja", "yes")]
    >>> sorted(draw(pairs, temperature=1, count=3, seed=0, epoch=1))
    [0, 1, 2]
    >>> sorted(draw(pairs, temperature=float("inf"), count=4, seed=0, epoch=1))
    [0, 1, 2, 2]
    """
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
    """Returns the row numbers of each mini-batch of an epoch: every row at most once.

    The rows left over after the last whole mini-batch sit this epoch out, others in the next, so that every step has
    the same shape.

    >>> [batch.tolist() for batch in batches(rows=7, batch_size=3, seed=0, epoch=1)]
    [[1, 3, 6], [0, 4, 2]]
    """
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(rows))
    return list(order[: rows - rows % batch_size].split(batch_size))


def some_of_each(classes: Mapping[int, Sequence[T]], count: int, seed: int) -> dict[int, list[T]]:
    """Keeps `count` of each numbered class, in their order; fewer are always a part of more.

    Raises:
        ValueError: There are not so many.
    """
    if count > (most := min(map(len, classes.values()))):
        raise ValueError(f"--per-class is {count}: choose 1 to {most}")
    chosen = {}
    for number, own in classes.items():
        order = np.random.default_rng((seed, number, SUBSET)).permutation(len(own))
        chosen[number] = [own[place] for place in sorted(order[:count])]
    return chosen
