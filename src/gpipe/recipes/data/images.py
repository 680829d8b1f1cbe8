"""Images, read in batches by worker processes: a folder of class folders, or scikit-learn's handwritten digits.

Of these there are 1797 real images of 8x8 pixels, here at 64x64 in three channels.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpipe.recipes.data import imported
from gpipe.recipes.data.augment import Augmentation, augment, central_box, random_box, some_of_each
from gpipe.recipes.recipe import Batch

if TYPE_CHECKING:
    from PIL.Image import Image


SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
HELD_OUT_FOLDERS = ("val", "validation", "test")
HELD_OUT_EVERY = 5  # of each class, in the order of names, where no folder says what to hold out
SHOWN = 3  # of many files, in a message
CLASSES = 10  # of digits
FIFTHS = np.s_[4::5]  # of each digit, in the order of the file, every fifth image is held out
START = "spawn"  # a copy of a process in which threads run, as those of a pipe do, could wait forever for their locks


def load_folder(
    directory: str | os.PathLike[str], classes: Sequence[str] = (), per_class: int | None = None, seed: int = 0
) -> "tuple[ImageFolder, ImageFolder]":
    """Finds the images of a folder of class folders, `directory/cat/1.jpg`, also deeper: to train on, and held out.

    Where `directory/train` has class folders, `directory/val`, `validation` or `test`, whichever exists first, holds
    out; elsewhere every fifth image of each class, in the order of names. Names that begin with a dot, and files
    beside the class folders, are left alone. `classes` keeps only these, numbered from 0 in the order given;
    `per_class` only so many training images of each, chosen by `seed`. A ValueError lists all that cannot be.
    """
    imported("PIL.Image", "images are read by Pillow", "images")
    whole = root = held_out_root = Path(directory)
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; give one that holds a folder of images for each class")
    if _class_folders(root / "train"):
        root = root / "train"
        held_out_root = next((whole / name for name in HELD_OUT_FOLDERS if (whole / name).is_dir()), root)
    train, mistakes = _find(root)
    if held_out_root == root:
        held_out = {name: files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] for name, files in train.items()}
        train = {name: sorted({*files} - {*held_out[name]}) for name, files in train.items()}
        if not mistakes and not any(held_out.values()):
            remedy = "add images, or put some into val/CLASS and the others into train/CLASS"
            mistakes.append(f"no class has the {HELD_OUT_EVERY} images of which one is held out; {remedy}")
    else:
        held_out, more = _find(held_out_root)
        mistakes += more
        if unknown := [name for name in held_out if name not in train]:
            mistakes.append(f"{held_out_root} has classes that {root} lacks: {_some(unknown)}; add or remove them")
    kept = tuple(classes) or tuple(train)
    mistakes += [f"there is no class {name}; there are {_some([*train])}" for name in kept if name not in train]
    if mistakes:
        raise ValueError("\n".join([f"{whole} cannot be used as a folder of images:", *(f"- {m}" for m in mistakes)]))
    train = {name: train[name] for name in kept}
    if per_class is not None:
        chosen = some_of_each(dict(enumerate(train.values())), per_class, seed)
        train = dict(zip(kept, chosen.values(), strict=True))
    return ImageFolder.of(root, train), ImageFolder.of(held_out_root, {name: held_out.get(name, []) for name in kept})


class UnreadableImage(ValueError):  # noqa: N818 a worker process hands it over by its name
    """A file that is no image, or none that can be learnt from."""


def read_image(file: Path) -> "Image":
    """Reads an image: RGB, turned as its EXIF data say; raises UnreadableImage, with its path, if it cannot."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadableImage(f"{file} cannot be read as an image: {error}; replace or remove it") from error
    if image.mode.startswith(("I", "F")):
        raise UnreadableImage(f"{file} has pixels of mode {image.mode!r}; convert it to 8 bits a channel")
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def _class_folders(folder: Path) -> list[str]:
    """The names of folders in a folder, which may not exist, sorted; as numbers, if all are."""
    names = sorted(path.name for path in folder.glob("[!.]*/"))
    return sorted(names, key=int) if all(name.isascii() and name.isdecimal() for name in names) else names


def _find(root: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The files of each class, as sorted paths below the root, and what cannot be."""
    found: dict[str, list[str]] = {}
    strange = []
    for name in _class_folders(root):
        below = [f"{name}/{file}" for file in iglob("**/*", root_dir=root / name, recursive=True)]
        others = [file for file in below if Path(file).suffix.lower() not in SUFFIXES]
        folders = {file for file in others if (root / file).is_dir()}
        found[name] = sorted({*below} - folders)
        strange += sorted({*others} - folders)
    if not found:
        return found, [f"{root} has no class folders; put the images of each class into one: {root}/cat/1.jpg"]
    mistakes = []
    if empty := [name for name, files in found.items() if not files]:
        mistakes.append(f"{root} has empty class folders: {_some(empty)}; add images or remove them")
    if strange:
        mistakes.append(f"{root} has files that are no images: {_some(strange)}; remove them")
    return found, mistakes


def _some(names: Sequence[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


Order = tuple[list[int], Augmentation, int | None]  # rows to read, and how for which epoch; None is evaluation


@dataclass(frozen=True)
class ImageFolder(Dataset[Batch | UnreadableImage]):
    """Images in files: `names` are paths below `root`, class by class, `labels` places in `classes`.

    It reads whole batches: a function of the order, the same in every process.
    """

    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, root: Path, found: Mapping[str, Sequence[str]]) -> "ImageFolder":
        pairs = [(file, number) for number, files in enumerate(found.values()) for file in files]
        return cls(root, tuple(file for file, _ in pairs), tuple(number for _, number in pairs), tuple(found))

    def __getitem__(self, order: Order) -> Batch | UnreadableImage:
        from PIL.Image import Resampling

        (rows, how, epoch), pixels = order, []
        for row in rows:
            try:
                image = read_image(self.root / self.names[row])
            except UnreadableImage as error:
                return error  # raised where it is read: a DataLoader would put a traceback into its text
            box = central_box(*image.size)
            if epoch is not None:
                box = random_box(*image.size, row, least_area=how.least_area, seed=how.seed, epoch=epoch)
            pixels.append(np.asarray(image.resize((how.size, how.size), Resampling.BILINEAR, box=box)))
        stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        images = (stacked.to(torch.float32) / 127.5 - 1).contiguous()
        if epoch is not None:
            images = augment(images, torch.tensor(rows), how, epoch)
        return Batch(images, torch.tensor([self.labels[row] for row in rows]))


class Digits(TensorDataset):
    """Images and their classes, as tensors; reads whole batches, as `ImageFolder` does."""

    @property
    def labels(self) -> Tensor:
        return self.tensors[1]

    def __getitem__(self, order: Order) -> Batch:
        rows, how, epoch = order
        images, classes = (tensor[rows] for tensor in self.tensors)
        return Batch(images if epoch is None else augment(images, torch.tensor(rows), how, epoch), classes)


def load_digits(
    size: int = 64, classes: Sequence[int] = range(CLASSES), per_class: int | None = None, seed: int = 0
) -> tuple[Digits, Digits]:
    """Reads the digits to train on and those held out, images [N, 3, size, size] in float32 and their classes [N].

    The pixels of all training images together have mean 0 and standard deviation 1. Held out is a fifth of each
    class. `classes` keeps only these digits, numbered in the order given, and `per_class` only so many training
    images of each, chosen by `seed`.
    """
    found = imported("sklearn.datasets", "the digits come with scikit-learn", "digits").load_digits()
    pixels = torch.from_numpy(found.images.astype(np.float32))[:, None]
    digits = torch.from_numpy(found.target)
    rows = [np.flatnonzero(found.target == digit) for digit in range(CLASSES)]
    to_train_on = np.sort(np.concatenate([np.delete(own, FIFTHS) for own in rows]))
    pixels = (pixels - pixels[to_train_on].mean()) / pixels[to_train_on].std()
    images = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    number = torch.full((CLASSES,), -1)
    number[list(classes)] = torch.arange(len(classes))

    def part(chosen: Sequence[Sequence[int]]) -> Digits:
        places = sorted(place for own in chosen for place in own)
        return Digits(images[places], number[digits[places]])

    train = {digit: np.delete(rows[digit], FIFTHS).tolist() for digit in classes}
    if per_class is not None:
        train = some_of_each(train, per_class, seed)
    return part([*train.values()]), part([rows[digit][FIFTHS].tolist() for digit in classes])


class Reader:
    """Reads batches of images, of `labels` [N], in `workers` processes, for 0 in this one, to the same bits.

    Workers are fresh processes, which import the script again; they begin with the first batch and live as long as it
    does. It reads one thing at a time.
    """

    def __init__(self, images: Any, how: Augmentation, workers: int = 0) -> None:
        self.labels = torch.as_tensor(images.labels)
        self._how, self._orders = how, list[Order]()
        self._loader: DataLoader[Batch | UnreadableImage] = DataLoader(
            images,
            batch_size=None,  # an order is a batch
            sampler=self._orders,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=START if workers else None,
            generator=torch.Generator(),  # the default one would be drawn from, and belongs to others
        )

    def read(self, batches: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Reads batches given by their rows, [N] each: augmented by (seed, epoch, row), or for None as they are."""
        self._orders[:] = [(rows.tolist(), self._how, epoch) for rows in batches]
        for images in self._loader:
            if isinstance(images, UnreadableImage):
                raise images
            yield images
