"""Images of one's own: which are found, how they are read, and that workers change no bit."""

import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe.recipes.data.augment import Augmentation
from gpipe.recipes.data.images import ImageFolder, Reader, load_folder, read_image
from gpipe.recipes.recipe import Batch

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
def pets(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    return load_folder(paint_classes(tmp_path_factory.mktemp("pets"), 5))[0]


def test_every_fifth_image_of_each_class_is_held_out(tmp_path: Path) -> None:
    train, held_out = load_folder(paint_classes(tmp_path, 11))
    assert train.classes == held_out.classes == ("cat", "dog")
    assert held_out.names == ("cat/04.jpg", "cat/09.png", "dog/04.jpg", "dog/09.png")
    assert held_out.labels == (0, 0, 1, 1)
    assert len(train.names) == 18
    on_disk = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")}
    assert {*train.names} | {*held_out.names} == on_disk


def test_folders_say_what_to_hold_out_val_first_and_train_alone_is_split(tmp_path: Path) -> None:
    paint_classes(tmp_path / "train", 5)
    assert len(load_folder(tmp_path)[1].names) == 2
    for count, name in enumerate(("test", "validation", "val"), start=1):
        paint_classes(tmp_path / name, count, ["dog"])
        train, held_out = load_folder(str(tmp_path))
        assert len(train.names) == 10
        assert (held_out.root, held_out.labels) == (tmp_path / name, (1,) * count)
        assert held_out.classes == train.classes == ("cat", "dog")


def test_which_names_are_classes_and_images(tmp_path: Path) -> None:
    def classes(name: str, *found: str) -> tuple[str, ...]:
        return load_folder(paint_classes(tmp_path / name, 5, found))[0].classes

    assert classes("train", "bus", "train", "val") == ("bus", "train", "val")
    assert classes("numbers", "10", "9", "1") == ("1", "9", "10")
    assert classes("texts", "10", "9", "x") == ("10", "9", "x")
    pets = paint_classes(tmp_path / "pets", 5)
    paint(pets / "cat" / "more" / "1.png")
    for stray in (pets / ".git" / "x", pets / "cat" / ".cache" / "x", pets / "cat" / ".hidden"):
        stray.parent.mkdir(exist_ok=True)
        stray.touch()
    (pets / "README.txt").touch()
    train, held_out = load_folder(pets)
    assert "cat/more/1.png" in train.names
    assert (train.classes, len(train.names) + len(held_out.names)) == (("cat", "dog"), 11)


def test_all_mistakes_of_a_folder_are_told_at_once(tmp_path: Path) -> None:
    paint_classes(tmp_path / "train", 2)
    paint_classes(tmp_path / "val", 2, ["dog", "eel"])
    (tmp_path / "train" / "fox").mkdir()
    for name in ("a.txt", "b.txt", "c.csv", "d"):
        (tmp_path / "train" / "cat" / name).touch()
    with pytest.raises(ValueError, match=r"--image-folder: .* cannot be used") as caught:
        load_folder(tmp_path, classes=["cat", "yak"])
    assert str(caught.value).splitlines()[1:] == [
        f"- {tmp_path}/train contains empty class folders: fox. Add images, or remove them.",
        f"- {tmp_path}/train contains files that are not images: cat/a.txt, cat/b.txt, cat/c.csv, and 1 more. "
        "Remove them.",
        f"- {tmp_path}/val contains classes that {tmp_path}/train lacks: eel. Remove them.",
        "- Class yak does not exist. Choose from cat, dog, fox.",
    ]


def test_what_is_no_folder_of_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "1.png")
    with pytest.raises(ValueError, match=r"contains no class folders\. .*/cat/1\.jpg"):
        load_folder(tmp_path)
    with pytest.raises(ValueError, match=r"1\.png is not a folder"):
        load_folder(tmp_path / "1.png")
    with pytest.raises(ValueError, match="Every class has fewer than 5 images"):
        load_folder(paint_classes(tmp_path, 4))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[images\]'"):
        load_folder(tmp_path)


def test_images_are_read_upright_and_as_rgb_whatever_their_mode(tmp_path: Path) -> None:
    lying = Image.new("RGB", (6, 2))
    lying.putpixel((0, 0), (255, 0, 0))
    turned = lying.getexif()
    turned[0x0112] = 6  # to be turned a quarter to the right
    lying.save(tmp_path / "lying.png", exif=turned)
    image = read_image(tmp_path / "lying.png")
    assert (image.size, image.getpixel((1, 0))) == ((2, 6), (255, 0, 0))
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK"):
        file = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
        made = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
        made.save(file)
        assert (read_image(file).mode, read_image(file).getpixel((2, 2))) == ("RGB", (255, 255, 255))
        if mode == "P":
            made.save(file, transparency=b"\x00\x80")  # of which Pillow would warn
            assert read_image(file).mode == "RGB"


def test_a_file_that_cannot_be_learnt_from_is_told_by_its_path(tmp_path: Path) -> None:
    paint(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:200])
    (tmp_path / "text.png").write_bytes(b"meow")
    for name in ("cut", "text", "missing"):
        with pytest.raises(ValueError, match=rf"{name}\.png: cannot be read as an image: "):
            read_image(tmp_path / f"{name}.png")
    Image.fromarray(np.full((4, 4), 30000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png: has pixels of mode 'I.*'"):
        read_image(tmp_path / "deep.png")


@pytest.mark.parametrize("epoch", [1, None])
def test_batches_are_the_rows_asked_for(pets: ImageFolder, epoch: int | None) -> None:
    for rows, (images, classes) in zip(BATCHES, Reader(pets, HOW).read(BATCHES, epoch), strict=True):
        assert (images.shape, images.dtype, images.is_contiguous()) == ((3, 3, 8, 8), torch.float32, True)
        assert float(images.abs().max()) <= 1
        assert classes.tolist() == [pets.labels[row] for row in rows.tolist()]


def test_an_image_is_read_alike_in_any_batch_and_evaluation_looks_at_the_middle(
    pets: ImageFolder, tmp_path: Path
) -> None:
    def of(rows: list[int], epoch: int | None) -> torch.Tensor:
        [batch] = Reader(pets, HOW).read([torch.tensor(rows)], epoch)
        return batch.inputs

    assert torch.equal(of([4, 2], 1)[1:], of([2], 1))
    assert not torch.equal(of([2], 1), of([2], 2))
    framed = Image.new("RGB", (16, 16), (255, 255, 255))
    framed.paste((0, 0, 0), (1, 1, 15, 15))
    framed.save(tmp_path / "1.png")
    folder = ImageFolder(tmp_path, ("1.png",), (0,), ("cat",))
    [batch] = Reader(folder, Augmentation(size=14)).read([torch.tensor([0])], None)
    assert bool((batch.inputs == -1).all())


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # where there is one core
def test_worker_processes_change_no_bit(pets: ImageFolder) -> None:
    """Also not across epochs, between training and evaluation, or after a reading that was given up."""

    def read(reader: Reader) -> Iterator[Iterable[Batch]]:
        yield reader.read(BATCHES, 1)
        yield [next(reader.read(BATCHES, 2))]
        yield reader.read(BATCHES, None)
        yield reader.read(BATCHES[::-1], 2)

    before, children = torch.get_rng_state(), {*multiprocessing.active_children()}
    how = HOW._replace(seed=3)
    here, there = ([one for part in read(Reader(pets, how, workers)) for one in part] for workers in (0, 2))
    assert len(here) == len(there) == 10
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    assert {*multiprocessing.active_children()} == children
    assert torch.equal(torch.get_rng_state(), before)
