import pytest
import torch

from gpipe.recipes.data.images import load_digits


def test_the_split_is_fixed_stratified_and_complete_and_images_are_scaled_and_normalised() -> None:
    train, held_out = load_digits(size=8)
    assert (len(train), len(held_out)) == (1442, 355)
    images, classes = train.tensors
    counts = held_out.tensors[1].bincount()
    assert torch.equal(counts, (counts + classes.bincount()) // 5)
    assert abs(images.mean()) < 1e-5
    assert abs(images.std() - 1) < 1e-3
    large, _ = load_digits(size=64)[0].tensors
    assert (large.shape, large.dtype) == ((1442, 3, 64, 64), torch.float32)
    assert torch.equal(large[:, 0], large[:, 2])


def test_classes_are_kept_and_numbered_in_the_order_given() -> None:
    for whole, kept in zip(load_digits(8), load_digits(8, classes=(7, 2)), strict=True):
        (every, digits), (images, classes) = whole.tensors, kept.tensors
        for number, digit in enumerate((7, 2)):
            assert torch.equal(images[classes == number], every[digits == digit])
        assert set(classes.tolist()) == {0, 1}


def test_a_few_of_each_class_are_chosen_by_the_seed_and_nothing_else() -> None:
    def few(count: int, seed: int) -> torch.Tensor:
        train, held_out = load_digits(8, per_class=count, seed=seed)
        assert train.tensors[1].bincount().tolist() == [count] * 10
        assert len(held_out) == 355
        return train.tensors[0]

    images, classes = load_digits(8, per_class=3, seed=1)[0].tensors
    alone = load_digits(8, classes=[4], per_class=3, seed=1)[0]
    assert torch.equal(alone.tensors[0], images[classes == 4])
    assert not torch.equal(images, few(3, 2))
    assert {image.numpy().tobytes() for image in images} <= {image.numpy().tobytes() for image in few(6, 1)}
    with pytest.raises(ValueError, match="--per-class: 141 is out of range"):
        load_digits(8, per_class=141)
