"""What becomes of images: a function of seed, epoch and row, and of nothing else."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe.recipes.data.augment import Augmentation, augment, central_box, cutout, flip, jitter, random_box

WAYS: dict[str, Callable[..., Tensor]] = {
    "flip": flip,
    "cutout": partial(cutout, size=5),
    "jitter": jitter,
    "all": lambda images, rows, seed, epoch: augment(images, rows, Augmentation(cutout=5, seed=seed), epoch),
}
SIDES, SHARES = st.integers(1, 3000), st.floats(0.01, 1)
SEEDS, EPOCHS, ROWS = st.integers(0, 2**40), st.integers(0, 1000), st.integers(0, 2**30)


def noise(count: int) -> Tensor:
    return torch.rand(count, 3, 12, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@given(SIDES, SIDES, ROWS, SHARES, SEEDS, EPOCHS)
def test_a_random_box_is_inside_the_image_and_of_its_area_and_shape_where_there_is_room(
    width: int, height: int, row: int, share: float, seed: int, epoch: int
) -> None:
    left, top, right, bottom = random_box(width, height, row, least_area=share, seed=seed, epoch=epoch)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    wide, high = right - left, bottom - top
    if share <= 0.5 and 3 / 4 <= width / height <= 4 / 3:
        assert (wide + 1) * (high + 1) >= share * width * height
    assert 3 / 4 * (high - 1) <= wide + 1
    assert wide - 1 <= 4 / 3 * (high + 1)


def test_random_boxes_are_of_all_sizes_and_places_and_the_central_one_is_in_the_middle() -> None:
    boxes = [random_box(100, 100, row, least_area=0.1, seed=0, epoch=0) for row in range(300)]
    areas = [(right - left) * (bottom - top) / 100**2 for left, top, right, bottom in boxes]
    assert min(areas) < 0.15
    assert max(areas) > 0.85
    assert min(len({box[side] for box in boxes}) for side in (0, 1)) > 30
    assert central_box(80, 16) == (5, 1, 75, 15)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(data=st.data(), seed=SEEDS, epoch=EPOCHS)
def test_what_becomes_of_a_row_does_not_depend_on_the_batch(
    way: Callable[..., Tensor], data: st.DataObject, seed: int, epoch: int
) -> None:
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 10**4), min_size=1, max_size=6, unique=True)))
    images = noise(len(rows))
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))[: data.draw(st.integers(1, len(rows)))]
    whole = way(images, rows, seed=seed, epoch=epoch)
    assert torch.equal(way(images[order], rows[order], seed=seed, epoch=epoch), whole[order])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_seed_and_epoch_draws_anew_and_torchs_generator_is_left_alone(way: Callable[..., Tensor]) -> None:
    images, rows, before = noise(20), torch.arange(20), torch.get_rng_state()
    first = way(images, rows, seed=1, epoch=2)
    assert torch.equal(first, way(images, rows, seed=1, epoch=2))
    assert not torch.equal(first, way(images, rows, seed=1, epoch=3))
    assert not torch.equal(first, way(images, rows, seed=2, epoch=2))
    assert torch.equal(before, torch.get_rng_state())


def test_half_of_the_images_are_mirrored_whatever_else_is_drawn() -> None:
    images, rows = noise(400), torch.arange(400)
    flipped = flip(images, rows, seed=0, epoch=0)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert bool((mirrored ^ (flipped == images).flatten(1).all(1)).all())
    assert 160 < int(mirrored.sum()) < 240
    without, both = (augment(images, rows, Augmentation(flip=flips, cutout=5), 1) for flips in (False, True))
    assert torch.equal(without == 0, both == 0)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 30), ROWS, SEEDS, EPOCHS)
def test_a_cutout_is_one_square_as_far_as_it_is_inside(
    height: int, width: int, size: int, row: int, seed: int, epoch: int
) -> None:
    cut = cutout(torch.ones(1, 3, height, width), torch.tensor([row]), size, seed=seed, epoch=epoch) == 0
    assert bool((cut == cut[:, :1]).all())
    down, across = cut[0, 0].any(1), cut[0, 0].any(0)
    assert torch.equal(cut[0, 0], down[:, None] & across)
    for covered, side in ((down, height), (across, width)):
        count = int(covered.sum())
        assert min(side, (size + 1) // 2) <= count <= size or count == side
        assert int((covered[1:] != covered[:-1]).sum()) <= (1 if count < size else 2)


def test_a_cutout_hangs_over_every_edge_now_and_then_and_leaves_all_else_as_it_was() -> None:
    images = noise(300)
    out = cutout(images, torch.arange(300), 4, seed=0, epoch=0)
    cut = (out == 0).all(dim=1)
    assert torch.equal(out, images.masked_fill(cut[:, None], 0))
    for corner in (cut[:, 0, 0], cut[:, 0, -1], cut[:, -1, 0], cut[:, -1, -1]):
        assert bool(corner.any())
    assert {int(each) for each in cut.sum((1, 2))} >= {4, 16}


def test_jitter_moves_little() -> None:
    image = torch.zeros(1, 1, 64, 64)
    image[..., 28:36, 28:36] = 1
    for row in range(20):
        moved = jitter(image, torch.tensor([row]), seed=0, epoch=1)
        assert moved[..., 20:44, 20:44].sum() == pytest.approx(64, rel=0.1)
