import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.recipes.data import batches, jitter


@given(st.integers(1, 60), st.data(), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_visits_rows_at_most_once_in_whole_batches(
    rows: int, data: st.DataObject, seed: int, epoch: int
) -> None:
    size = data.draw(st.integers(1, rows))
    made = batches(rows, size, seed=seed, epoch=epoch)
    visited = torch.cat(made).tolist()
    assert [len(batch) for batch in made] == [size] * (rows // size)
    assert len(set(visited)) == len(visited)
    assert set(visited) <= set(range(rows))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    first = torch.cat(batches(100, 10, seed=3, epoch=4))
    torch.manual_seed(2)
    assert torch.equal(first, torch.cat(batches(100, 10, seed=3, epoch=4)))
    assert not torch.equal(first, torch.cat(batches(100, 10, seed=3, epoch=5)))
    assert not torch.equal(first, torch.cat(batches(100, 10, seed=4, epoch=4)))


@pytest.mark.parametrize("size", [0, 11])
def test_a_batch_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size is {size}; choose one from 1 to 10"):
        batches(10, size, seed=0, epoch=1)


def test_jitter_depends_on_seed_epoch_and_row_not_on_the_batch() -> None:
    images = torch.randn(6, 3, 16, 16)
    rows = torch.tensor([9, 2, 30, 4, 0, 7])
    whole = jitter(images, rows, seed=1, epoch=2)
    alone = jitter(images[2:3], rows[2:3], seed=1, epoch=2)
    assert torch.equal(whole[2:3], alone)
    assert not torch.equal(whole, jitter(images, rows, seed=1, epoch=3))
    assert not torch.equal(whole, jitter(images, rows, seed=2, epoch=2))


def test_jitter_moves_little() -> None:
    image = torch.zeros(1, 1, 64, 64)
    image[..., 28:36, 28:36] = 1
    for row in range(20):
        moved = jitter(image, torch.tensor([row]), seed=0, epoch=1)
        assert moved[..., 20:44, 20:44].sum() == pytest.approx(64, rel=0.1)
