import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe.recipes.data import Augmentation, ImageFolder, Images, Reader, SplitFolder, load_folder
from gpipe.recipes.data.folder import read_image

HOW = Augmentation(size=8, cutout=3)
BATCHES = [torch.tensor(rows) for rows in ([3, 0, 5], [1, 2, 6], [4, 7, 0])]


def paint(file: Path, number: int = 0, size: tuple[int, int] = (20, 14)) -> None:
    """Writes an image of its own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


def paint_classes(root: Path, count: int, classes: Sequence[str] = ("cat", "dog")) -> Path:
    for place, name in enumerate(classes):
        for number in range(count):
            suffix = (".png", ".jpg", ".JPEG")[number % 3]
            paint(root / name / f"{number:02}{suffix}", place * 100 + number, (14 + number, 20 - place))
    return root


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> SplitFolder:
    return load_folder(paint_classes(tmp_path_factory.mktemp("pets"), 5))


def same(first: Sequence[Images], second: Sequence[Images]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images) and torch.equal(a.classes, b.classes)
        for a, b in zip(first, second, strict=True)
    )


def test_every_fifth_image_of_each_class_is_held_out(tmp_path: Path) -> None:
    found = load_folder(paint_classes(tmp_path, 11))
    assert found.classes == ("cat", "dog")
    assert found.held_out.names == ("cat/04.jpg", "cat/09.png", "dog/04.jpg", "dog/09.png")
    assert found.held_out.labels == (0, 0, 1, 1)
    assert len(found.train) == 18
    on_disk = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")}
    assert {*found.train.names} | {*found.held_out.names} == on_disk


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_folders_say_what_to_hold_out(tmp_path: Path, name: str) -> None:
    paint_classes(tmp_path / "train", 3)
    paint_classes(tmp_path / name, 2, ["dog"])
    found = load_folder(tmp_path)
    assert len(found.train) == 6
    assert (found.held_out.root, found.held_out.labels) == (tmp_path / name, (1, 1))
    assert found.held_out.classes == found.classes == ("cat", "dog")


def test_val_goes_before_test_and_train_alone_is_split(tmp_path: Path) -> None:
    paint_classes(tmp_path / "train", 5)
    assert len(load_folder(tmp_path).held_out) == 2
    paint_classes(tmp_path / "test", 1)
    paint_classes(tmp_path / "val", 3)
    assert len(load_folder(str(tmp_path)).held_out) == 6


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    assert load_folder(paint_classes(tmp_path, 5, ["bus", "train", "val"])).classes == ("bus", "train", "val")


def test_classes_that_are_numbers_are_sorted_as_such(tmp_path: Path) -> None:
    assert load_folder(paint_classes(tmp_path / "a", 5, ["10", "9", "1"])).classes == ("1", "9", "10")
    assert load_folder(paint_classes(tmp_path / "b", 5, ["10", "9", "x"])).classes == ("10", "9", "x")


def test_images_may_lie_deeper_and_hidden_names_are_left_alone(tmp_path: Path) -> None:
    paint_classes(tmp_path, 5)
    paint(tmp_path / "cat" / "more" / "1.png")
    for stray in (tmp_path / ".git" / "x", tmp_path / "cat" / ".cache" / "x", tmp_path / "cat" / ".hidden"):
        stray.parent.mkdir(exist_ok=True)
        stray.touch()
    (tmp_path / "README.txt").touch()
    found = load_folder(tmp_path)
    assert "cat/more/1.png" in found.train.names
    assert (found.classes, len(found.train) + len(found.held_out)) == (("cat", "dog"), 11)


def test_all_mistakes_of_a_folder_are_told_at_once(tmp_path: Path) -> None:
    paint_classes(tmp_path / "train", 2)
    paint_classes(tmp_path / "val", 2, ["dog", "eel"])
    (tmp_path / "train" / "fox").mkdir()
    for name in ("a.txt", "b.txt", "c.csv", "d"):
        (tmp_path / "train" / "cat" / name).touch()
    with pytest.raises(ValueError, match="cannot be used as a folder of images") as caught:
        load_folder(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        f"- {tmp_path}/train has empty class folders: fox; add images or remove them",
        f"- {tmp_path}/train has files that are no images: cat/a.txt, cat/b.txt, cat/c.csv, and 1 more; remove them",
        f"- {tmp_path}/val has classes that {tmp_path}/train lacks: eel; add them there or remove them",
    ]


def test_a_folder_without_class_folders_or_none_at_all_is_refused(tmp_path: Path) -> None:
    paint(tmp_path / "1.png")
    with pytest.raises(ValueError, match=r"has no class folders; .*/cat/1\.jpg"):
        load_folder(tmp_path)
    with pytest.raises(
        ValueError, match=r"1\.png is no folder; give one that holds a folder of images for each class"
    ):
        load_folder(tmp_path / "1.png")


def test_too_few_images_to_hold_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no class has the 5 images of which one is held out"):
        load_folder(paint_classes(tmp_path, 4))


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install 'gpipe\[images\]'"):
        load_folder(tmp_path)


def test_images_are_read_upright(tmp_path: Path) -> None:
    lying = Image.new("RGB", (6, 2))
    lying.putpixel((0, 0), (255, 0, 0))
    turned = lying.getexif()
    turned[0x0112] = 6  # to be turned a quarter to the right
    lying.save(tmp_path / "lying.png", exif=turned)
    image = read_image(tmp_path / "lying.png")
    assert image.size == (2, 6)
    assert image.getpixel((1, 0)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_images_of_all_modes_are_read_as_rgb(tmp_path: Path, mode: str) -> None:
    file = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode).save(file)
    image = read_image(file)
    assert (image.mode, image.getpixel((2, 2))) == ("RGB", (255, 255, 255))


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path: Path) -> None:
    Image.new("P", (4, 4)).save(tmp_path / "image.png", transparency=b"\x00\x80")
    assert read_image(tmp_path / "image.png").mode == "RGB"


@pytest.mark.parametrize("damage", ["text", "cut", "missing"])
def test_a_file_that_cannot_be_decoded_is_told_by_its_path(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "cat.png"
    if damage != "missing":
        paint(file)
        file.write_bytes(b"meow" if damage == "text" else file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cat\.png cannot be read as an image: .*; replace or remove it"):
        read_image(file)


def test_more_than_8_bits_a_channel_are_refused_not_cut_off(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 30000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png has pixels of mode 'I.*'; convert it to 8 bits a channel"):
        read_image(tmp_path / "deep.png")


def read(
    folder: ImageFolder, batches: Sequence[torch.Tensor], how: Augmentation = HOW, *, workers: int = 0, **which: Any
) -> list[Images]:
    with Reader(folder, how, workers=workers) as reader:
        return [*reader.read(batches, **which)]


@pytest.mark.parametrize("train", [True, False])
def test_batches_are_the_rows_asked_for(pets: SplitFolder, train: bool) -> None:
    for rows, images in zip(BATCHES, read(pets.train, BATCHES, train=train), strict=True):
        assert images.images.shape == (3, 3, 8, 8)
        assert images.images.dtype == torch.float32
        assert images.images.is_contiguous()
        assert float(images.images.abs().max()) <= 1
        assert images.classes.tolist() == [pets.train.labels[row] for row in rows.tolist()]


def test_an_image_is_read_alike_in_any_batch_and_evaluation_draws_nothing(pets: SplitFolder) -> None:
    def of(rows: list[int], epoch: int, train: bool) -> torch.Tensor:
        [images] = read(pets.train, [torch.tensor(rows)], epoch=epoch, train=train)
        return images.images

    assert torch.equal(of([4, 2], 1, True)[1:], of([2], 1, True))
    assert not torch.equal(of([2], 1, True), of([2], 2, True))
    assert torch.equal(of([4, 2], 1, False), of([4, 2], 2, False))


def test_evaluation_looks_at_the_middle_scaled_to_the_range(tmp_path: Path) -> None:
    framed = Image.new("RGB", (16, 16), (255, 255, 255))
    framed.paste((0, 0, 0), (1, 1, 15, 15))
    (tmp_path / "cat").mkdir()
    framed.save(tmp_path / "cat" / "1.png")
    folder = ImageFolder(tmp_path, ("cat/1.png",), (0,), ("cat",))
    [images] = read(folder, [torch.tensor([0])], Augmentation(size=14), train=False)
    assert bool((images.images == -1).all())


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # where there is one core
def test_worker_processes_change_no_bit(pets: SplitFolder) -> None:
    """Also not across epochs, between training and evaluation, or after a reading that was given up."""

    def read(reader: Reader) -> Iterator[Images]:
        yield from reader.read(BATCHES, epoch=1, train=True)
        yield next(reader.read(BATCHES, epoch=2, train=True))
        yield from reader.read(BATCHES, train=False)
        yield from reader.read(BATCHES[::-1], epoch=2, train=True)

    before, children = torch.get_rng_state(), {*multiprocessing.active_children()}
    with Reader(pets.train, HOW, seed=3) as here, Reader(pets.train, HOW, workers=2, seed=3) as there:
        assert same([*read(here)], [*read(there)])
        assert len({*multiprocessing.active_children()} - children) == 2
    assert {*multiprocessing.active_children()} == children
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_tells_which_file_it_could_not_read(tmp_path: Path) -> None:
    found = load_folder(paint_classes(tmp_path, 5))
    (tmp_path / found.train.names[3]).write_bytes(b"meow")
    for workers in (0, 1):
        with pytest.raises(ValueError, match=rf"{found.train.names[3]} cannot be read as an image"):
            read(found.train, BATCHES, workers=workers, train=True)


def test_a_reader_does_one_reading_at_a_time(pets: SplitFolder) -> None:
    reader = Reader(pets.train, HOW)
    first = reader.read(BATCHES, train=True)
    next(first)
    next(reader.read(BATCHES, train=False))
    with pytest.raises(RuntimeError, match="a reader does one reading at a time"):
        next(first)


def test_a_negative_number_of_workers_is_refused(pets: SplitFolder) -> None:
    with pytest.raises(ValueError, match="workers is -1; give a number of processes, or 0"):
        Reader(pets.train, workers=-1)
