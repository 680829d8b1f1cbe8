import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data import (
    BEGIN,
    END,
    PAD,
    Vocabulary,
    collate,
    draw,
    read_catalogues,
    short_enough,
    steps_per_epoch,
    token_batches,
)

LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40)
TOKENS = st.integers(62, 400)
SEEDS = st.integers(0, 2**40)
Lengths = list[tuple[int, int]]


@given(LENGTHS, TOKENS, st.data(), SEEDS, st.integers(0, 1000))
def test_exactly_as_many_batches_as_asked_for_and_each_within_tokens(
    lengths: Lengths, tokens: int, data: st.DataObject, seed: int, epoch: int
) -> None:
    steps = data.draw(st.integers(1, len(lengths)))
    made = token_batches(lengths, tokens, steps, seed=seed, epoch=epoch)
    assert len(made) == steps
    for batch in made:
        rows = [[3] * lengths[row][0] for row in batch], [[3] * lengths[row][1] for row in batch]
        source, target, _ = collate(*rows)
        assert 0 < source.numel() + target.numel() <= tokens
    visited = torch.cat(made).tolist()
    assert len(set(visited)) == len(visited)
    assert steps < steps_per_epoch(lengths, tokens) or sorted(visited) == list(range(len(lengths)))


@given(LENGTHS, TOKENS, SEEDS)
def test_steps_of_an_epoch_hold_every_row_once(lengths: Lengths, tokens: int, seed: int) -> None:
    steps = steps_per_epoch(lengths, tokens)
    visited = torch.cat(token_batches(lengths, tokens, steps, seed=seed, epoch=0)).tolist()
    assert sorted(visited) == list(range(len(lengths)))


def test_real_pairs_are_padded_little() -> None:
    pairs = read_catalogues()[::7]
    vocabulary = Vocabulary.learn((pair.english for pair in pairs), size=1000)
    sources = vocabulary.encode_all([pair.source for pair in pairs])
    targets = vocabulary.encode_all([pair.english for pair in pairs])
    drawn = draw(pairs, 5, len(pairs), seed=0, epoch=1)
    lengths = [(len(sources[number]), len(targets[number])) for number in drawn]
    made = token_batches(lengths, 4096, steps_per_epoch(lengths, 4096), seed=0, epoch=1)
    laid_out = filled = 0
    for batch in made:
        numbers = [drawn[row] for row in batch]
        source, target, _ = collate([sources[n] for n in numbers], [targets[n] for n in numbers])
        laid_out += source.numel() + target.numel()
        filled += int((source != PAD).sum() + (target != PAD).sum())
    assert filled == sum(map(sum, lengths)) + 2 * len(lengths)
    assert 1 - filled / laid_out < 0.25


def test_batches_depend_on_seed_and_epoch_alone_and_come_in_no_order_of_length() -> None:
    lengths = [(number % 20, number % 7) for number in range(300)]

    def made(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in token_batches(lengths, 200, 20, seed=seed, epoch=epoch)]

    assert made(1, 2) == made(1, 2)
    assert made(1, 2) != made(1, 3)
    assert made(1, 2) != made(2, 2)
    longest = [max(sum(lengths[row]) for row in batch) for batch in made(1, 2)]
    assert longest != sorted(longest)


@given(LENGTHS, st.integers(0, 30))
def test_short_enough_pairs_have_two_short_sides(lengths: Lengths, longest: int) -> None:
    kept = short_enough(lengths, longest)
    assert kept == [row for row, (source, target) in enumerate(lengths) if source <= longest and target <= longest]


IDS = st.lists(st.integers(3, 99), max_size=6)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5))
def test_what_is_laid_out_can_be_read_back(rows: list[tuple[list[int], list[int]]]) -> None:
    sources, targets = [source for source, _ in rows], [target for _, target in rows]
    source, target_in, target_out = collate(sources, targets)
    assert {tensor.dtype for tensor in (source, target_in, target_out)} == {torch.int64}
    assert source.shape == (len(rows), max(map(len, sources)) + 1)
    assert target_in.shape == target_out.shape == (len(rows), max(map(len, targets)) + 1)
    for row, (left, right) in enumerate(rows):
        assert _without_padding(source[row]) == [*left, END]
        assert _without_padding(target_in[row]) == [BEGIN, *right]
        assert _without_padding(target_out[row]) == [*right, END]


def _without_padding(row: torch.Tensor) -> list[int]:
    filled = int((row != PAD).sum())
    assert bool((row[filled:] == PAD).all())
    return row[:filled].tolist()


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match=r"rows above 9 tokens.*: row 1 has 10, row 2 has 12; choose more tokens"):
        token_batches([(1, 1), (4, 4), (5, 5)], 9, 1, seed=0, epoch=0)
    with pytest.raises(ValueError, match="and 2 more"):
        steps_per_epoch([(9, 9)] * 12, 9)
    for steps in (0, 3):
        with pytest.raises(ValueError, match=f"steps is {steps}; choose from 1 to 2, the number of rows"):
            token_batches([(1, 1)] * 2, 9, steps, seed=0, epoch=0)
    for sources in ([], [[1], [2]]):
        with pytest.raises(ValueError, match="give one target a source, at least one"):
            collate(sources, [[3]] if sources else [])
