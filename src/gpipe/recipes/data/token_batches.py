"""Mini-batches of sentence pairs by how many tokens they have, and the padded tensors that a network is fed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpipe.recipes.data.vocabulary import BEGIN, END, PAD

SHOWN = 10
ORDER = 3  # sets these draws apart from those of other modules

Lengths = Sequence[tuple[int, int]]
"""Of each pair, the tokens of its source and of its target as `Vocabulary.encode` gives them, without specials."""


def token_batches(lengths: Lengths, tokens: int, steps: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Returns the row numbers [N] of each of exactly `steps` mini-batches, rows of similar length together.

    Rows x (longest source + longest target), each with its `END`, is at most `tokens`: so much `collate` makes of it,
    padding included. No row comes twice. If the rows fill more than `steps` mini-batches, some drawn by lot are
    dropped; if fewer, the largest ones are halved. All is a function of the arguments alone. Given
    `steps_per_epoch(lengths, tokens)` steps, every row comes once, as a test needs.

    >>> lengths = [(1, 1), (9, 9), (1, 2), (8, 9)]
    >>> sorted(batch.sort().values.tolist() for batch in token_batches(lengths, tokens=40, steps=2, seed=0, epoch=1))
    [[0, 2], [1, 3]]

    Raises:
        ValueError: `steps` is under 1 or above the number of rows, or rows are longer than `tokens`.
    """
    _check(lengths, tokens)
    if not 1 <= steps <= len(lengths):
        raise ValueError(f"steps is {steps}; choose from 1 to {len(lengths)}, the number of rows")
    random = np.random.default_rng((seed, epoch, ORDER))
    order = random.permutation(len(lengths)).tolist()
    packed = _pack(lengths, tokens, sorted(order, key=lambda row: _by_length(lengths[row])))
    chosen = [packed[place] for place in random.permutation(len(packed))[:steps]]
    while len(chosen) < steps:
        largest = max(range(len(chosen)), key=lambda place: len(chosen[place]))
        rows = chosen[largest]
        chosen[largest : largest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return [torch.tensor(rows) for rows in chosen]


def steps_per_epoch(lengths: Lengths, tokens: int) -> int:
    """Returns how many mini-batches of at most `tokens` the rows fill: those `token_batches` makes of itself.

    >>> steps_per_epoch([(1, 1), (9, 9), (1, 2), (8, 9)], tokens=40)
    2

    Raises:
        ValueError: Rows are longer than `tokens`.
    """
    _check(lengths, tokens)
    return len(_pack(lengths, tokens, sorted(range(len(lengths)), key=lambda row: _by_length(lengths[row]))))


def short_enough(lengths: Lengths, longest: int) -> list[int]:
    """Returns the numbers of the pairs neither side of which is above `longest` tokens: those to train on.

    How many were cut off is `len(lengths)` minus how many are returned. Tests are to keep all.

    >>> short_enough([(3, 4), (3, 5), (9, 1), (4, 4)], longest=4)
    [0, 3]
    """
    return [number for number, sides in enumerate(lengths) if max(sides) <= longest]


def collate(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns source [N, S], target in [N, T] and target out [N, T] in int64, padded with `PAD` at the right.

    The source ends in `END`, the target in begins with `BEGIN`, the target out is what should follow and ends in
    `END`.

    >>> for tensor in collate([[5, 6], [7]], [[8], [9, 10]]):
    ...     print(tensor.tolist())
    [[5, 6, 2], [7, 2, 0]]
    [[1, 8, 0], [1, 9, 10]]
    [[8, 2, 0], [9, 10, 2]]

    Raises:
        ValueError: No rows, or not one target for each source.
    """
    if len(sources) != len(targets) or not sources:
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets; give one target a source, at least one")
    return (
        padded([[*source, END] for source in sources]),
        padded([[BEGIN, *target] for target in targets]),
        padded([[*target, END] for target in targets]),
    )


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns rows [N, T] of the longest one's length, with `PAD` at the right.

    >>> padded([[5], [6, 7]]).tolist()
    [[5, 0], [6, 7]]
    """
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def _by_length(sides: tuple[int, int]) -> tuple[int, int]:
    """Sorts by target and, within one length of it, by source: up, then down, so that neighbours are ever alike."""
    source, target = sides
    return target, source if target % 2 else -source


def _pack(lengths: Lengths, tokens: int, order: Sequence[int]) -> list[list[int]]:
    """Fills mini-batches with rows in this order, each as far as `tokens` goes."""
    batches: list[list[int]] = []
    source = target = 0
    for row in order:
        wider = max(source, lengths[row][0] + 1), max(target, lengths[row][1] + 1)
        if not batches or (len(batches[-1]) + 1) * sum(wider) > tokens:
            batches.append([])
            wider = lengths[row][0] + 1, lengths[row][1] + 1
        batches[-1].append(row)
        source, target = wider
    return batches


def _check(lengths: Lengths, tokens: int) -> None:
    wrong = [f"row {row} has {sum(sides) + 2}" for row, sides in enumerate(lengths) if sum(sides) + 2 > tokens]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(
            f"rows above {tokens} tokens, source, target and an END each: {', '.join(wrong[:SHOWN])}{more}; "
            "choose more tokens, or in training leave them out by short_enough"
        )
