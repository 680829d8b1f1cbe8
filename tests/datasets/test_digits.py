import sys

import pytest
import torch

from gpipe.datasets import load_digits


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
    monkeypatch.setattr("gpipe.datasets.digits.find_spec", lambda name: None)
    theirs = load_digits(8)
    assert torch.equal(own.train.images, theirs.train.images)
    assert torch.equal(own.held_out.classes, theirs.held_out.classes)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.datasets.digits.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'gpipe\[digits\]'"):
        load_digits()
