import sys

import pytest
import torch

from gpipe.recipes.data import load_digits


def test_the_split_is_fixed_stratified_and_complete() -> None:
    digits = load_digits(size=8)
    assert (len(digits.train), len(digits.held_out)) == (1442, 355)
    for digit in range(10):
        held_out = int((digits.held_out.classes == digit).sum())
        total = held_out + int((digits.train.classes == digit).sum())
        assert held_out == total // 5


def test_images_are_scaled_and_normalised() -> None:
    digits = load_digits(size=64)
    assert digits.train.images.shape == (1442, 3, 64, 64)
    assert digits.train.images.dtype == torch.float32
    small = load_digits(size=8).train.images
    assert abs(small.mean()) < 1e-5
    assert abs(small.std() - 1) < 1e-3
    assert torch.equal(digits.train.images[:, 0], digits.train.images[:, 2])


def test_two_reads_are_equal() -> None:
    first, second = load_digits(16), load_digits(16)
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.held_out.classes, second.held_out.classes)


def test_the_file_is_read_as_scikit_learn_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_digits(8)
    monkeypatch.setattr("gpipe.recipes.data.digits.find_spec", lambda name: None)
    theirs = load_digits(8)
    assert torch.equal(own.train.images, theirs.train.images)
    assert torch.equal(own.held_out.classes, theirs.held_out.classes)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.recipes.data.digits.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'gpipe\[digits\]'"):
        load_digits()


def test_classes_are_kept_and_numbered_in_the_order_given() -> None:
    every, some = load_digits(8), load_digits(8, classes=(7, 2))
    for all_of_it, kept in ((every.train, some.train), (every.held_out, some.held_out)):
        for number, digit in enumerate((7, 2)):
            assert torch.equal(kept.images[kept.classes == number], all_of_it.images[all_of_it.classes == digit])
        assert set(kept.classes.tolist()) == {0, 1}


def test_a_few_of_each_class_are_chosen_by_the_seed_and_nothing_else() -> None:
    few = load_digits(8, per_class=3, seed=1)
    assert few.train.classes.bincount().tolist() == [3] * 10
    assert len(few.held_out) == 355
    alone = load_digits(8, classes=[4], per_class=3, seed=1)
    assert torch.equal(alone.train.images, few.train.images[few.train.classes == 4])
    other = load_digits(8, per_class=3, seed=2)
    assert not torch.equal(few.train.images, other.train.images)
    more = load_digits(8, per_class=6, seed=1)
    assert {image.numpy().tobytes() for image in few.train.images} <= {
        image.numpy().tobytes() for image in more.train.images
    }


def test_all_mistakes_of_a_choice_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"classes is \[3, 3, 10\];.*per_class is 0; give a number from 1 to 147"):
        load_digits(8, classes=[3, 3, 10], per_class=0)
    with pytest.raises(ValueError, match=r"classes is \[\];"):
        load_digits(8, classes=[])
    with pytest.raises(ValueError, match="per_class is 141; give a number from 1 to 140, or None"):
        load_digits(8, per_class=141)
