"""Loads images in batches: from a folder with one subfolder per class, or scikit-learn's handwritten digits.

There are 1797 digits with 8x8 pixels. By default, the digits are scaled to 64x64 pixels, with three channels.
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

from gpipe.recipes.data import require
from gpipe.recipes.data.augment import Augmentation, augment, central_box, random_box, some_of_each
from gpipe.recipes.options.training import DIGITS
from gpipe.recipes.recipe import Batch

if TYPE_CHECKING:
    from PIL.Image import Image


SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
HELD_OUT_FOLDERS = ("val", "validation", "test")
HELD_OUT_EVERY = 5  # Without a folder of held-out images, every fifth image of each class is held out.
SHOWN = 3  # Maximum number of files that a message names.

FIFTHS = np.s_[4::5]  # Every fifth image of each digit is held out.
START_METHOD = "spawn"  # A forked worker could wait forever for locks that threads of a pipe hold.


def load_folder(
    directory: str | os.PathLike[str], classes: Sequence[str] = (), per_class: int | None = None, seed: int = 0
) -> "tuple[ImageFolder, ImageFolder]":
    """Finds the images in a folder with one subfolder per class, such as `directory/cat/1.jpg`.

    If `directory/train` contains class folders, the held-out images are in `directory/val`, `validation` or `test`,
    whichever exists first. Otherwise every fifth image of each class, sorted by name, is held out. Ignores hidden
    files, and files next to the class folders. Class folders may contain subfolders.

    Args:
        directory: The folder.
        classes: Names of the classes to use. Their order determines the class numbers. Default: all classes.
        per_class: Number of training images to keep per class. Default: all.
        seed: Random seed for `per_class`.

    Returns:
        The training images and the held-out images.

    Raises:
        ValueError: If the folder or its contents are invalid. The message lists all problems.
        ImportError: If Pillow is not installed.
    """
    require("PIL.Image", "Reading images requires Pillow", "images")
    whole = root = held_out_root = Path(directory)
    if not root.is_dir():
        raise ValueError(
            f"--image-folder: {root} is not a folder. Pass a folder that contains one folder of images per class."
        )
    if _class_folders(root / "train"):
        root = root / "train"
        held_out_root = next((whole / name for name in HELD_OUT_FOLDERS if (whole / name).is_dir()), root)
    train, problems = _find(root)
    if held_out_root == root:
        held_out = {name: files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] for name, files in train.items()}
        train = {name: sorted({*files} - {*held_out[name]}) for name, files in train.items()}
        if not problems and not any(held_out.values()):
            problems.append(
                f"Every class has fewer than {HELD_OUT_EVERY} images, so no image is held out. Add images, or move "
                "some images to val/CLASS and all other images to train/CLASS."
            )
    else:
        held_out, more = _find(held_out_root)
        problems += more
        if unknown := [name for name in held_out if name not in train]:
            problems.append(f"{held_out_root} contains classes that {root} lacks: {_shorten(unknown)}. Remove them.")
    kept = tuple(classes) or tuple(train)
    known = _shorten([*train])
    problems += [f"Class {name} does not exist. Choose from {known}." for name in kept if name not in train]
    if problems:
        lines = [f"--image-folder: {whole} cannot be used:", *(f"- {problem}" for problem in problems)]
        raise ValueError("\n".join(lines))
    train = {name: train[name] for name in kept}
    if per_class is not None:
        chosen = some_of_each(dict(enumerate(train.values())), per_class, seed)
        train = dict(zip(kept, chosen.values(), strict=True))
    return ImageFolder.of(root, train), ImageFolder.of(held_out_root, {name: held_out.get(name, []) for name in kept})


class UnreadableImage(ValueError):  # noqa: N818 commands report it as a user error
    """Raised if a file is not an image, or has an unsupported pixel format."""


def read_image(file: Path) -> "Image":
    """Reads an image as RGB, rotated according to its EXIF data.

    Raises UnreadableImage if the file cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadableImage(f"{file}: cannot be read as an image: {error}. Replace or remove it.") from error
    if image.mode.startswith(("I", "F")):
        raise UnreadableImage(f"{file}: has pixels of mode {image.mode!r}. Convert it to 8 bits per channel.")
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def _class_folders(folder: Path) -> list[str]:
    """Returns the sorted names of the subfolders of a folder, or no names if the folder does not exist.

    If all names are numbers, sorts by value.
    """
    names = sorted(path.name for path in folder.glob("[!.]*/"))
    return sorted(names, key=int) if all(name.isascii() and name.isdecimal() for name in names) else names


def _find(root: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the sorted files of each class, as paths relative to the root, and a list of problems."""
    files_of: dict[str, list[str]] = {}
    invalid = []
    for name in _class_folders(root):
        below = [f"{name}/{file}" for file in iglob("**/*", root_dir=root / name, recursive=True)]
        others = [file for file in below if Path(file).suffix.lower() not in SUFFIXES]
        folders = {file for file in others if (root / file).is_dir()}
        files_of[name] = sorted({*below} - folders)
        invalid += sorted({*others} - folders)
    if not files_of:
        return files_of, [f"{root} contains no class folders. Create one per class, such as {root}/cat/1.jpg."]
    problems = []
    if empty := [name for name, files in files_of.items() if not files]:
        problems.append(f"{root} contains empty class folders: {_shorten(empty)}. Add images, or remove them.")
    if invalid:
        problems.append(f"{root} contains files that are not images: {_shorten(invalid)}. Remove them.")
    return files_of, problems


def _shorten(names: Sequence[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


BatchKey = tuple[list[int], Augmentation, int | None]  # Rows, augmentation and epoch (None in an evaluation).


@dataclass(frozen=True)
class ImageFolder(Dataset[Batch | UnreadableImage]):
    """A data set of image files. Each index describes a whole batch.

    Attributes:
        root: The folder.
        names: Paths of the files, relative to `root`, sorted by class.
        labels: Class numbers of the files: indices into `classes`.
        classes: Names of the classes.
    """

    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    @classmethod
    def of(cls, root: Path, files_of: Mapping[str, Sequence[str]]) -> "ImageFolder":
        """Creates the data set from the files of each class."""
        pairs = [(file, number) for number, files in enumerate(files_of.values()) for file in files]
        return cls(root, tuple(file for file, _ in pairs), tuple(number for _, number in pairs), tuple(files_of))

    def __getitem__(self, key: BatchKey) -> Batch | UnreadableImage:
        from PIL.Image import Resampling

        (rows, how, epoch), pixels = key, []
        for row in rows:
            try:
                image = read_image(self.root / self.names[row])
            except UnreadableImage as error:
                return error  # `Reader.read` raises it. A DataLoader would add a traceback to the message.
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
    """A data set of digits in memory. Each index describes a whole batch, as in `ImageFolder`."""

    @property
    def labels(self) -> Tensor:
        return self.tensors[1]

    def __getitem__(self, key: BatchKey) -> Batch:
        rows, how, epoch = key
        images, classes = (tensor[rows] for tensor in self.tensors)
        return Batch(images if epoch is None else augment(images, torch.tensor(rows), how, epoch), classes)


def load_digits(
    size: int = 64, classes: Sequence[int] = range(DIGITS), per_class: int | None = None, seed: int = 0
) -> tuple[Digits, Digits]:
    """Loads the digits as float32 images [N, 3, size, size] and classes [N]. A fifth of each class is held out.

    The pixels of all training images together have mean 0 and standard deviation 1.

    Args:
        size: Height and width of the images.
        classes: Digits to use. Their order determines the class numbers.
        per_class: Number of training images to keep per class. Default: all.
        seed: Random seed for `per_class`.

    Returns:
        The training images and the held-out images.
    """
    data = require("sklearn.datasets", "The digits require scikit-learn", "digits").load_digits()
    pixels = torch.from_numpy(data.images.astype(np.float32))[:, None]
    digits = torch.from_numpy(data.target)
    rows = [np.flatnonzero(data.target == digit) for digit in range(DIGITS)]
    train_rows = np.sort(np.concatenate([np.delete(each, FIFTHS) for each in rows]))
    pixels = (pixels - pixels[train_rows].mean()) / pixels[train_rows].std()
    images = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    number = torch.full((DIGITS,), -1)
    number[list(classes)] = torch.arange(len(classes))

    def part(rows: Sequence[Sequence[int]]) -> Digits:
        selected = sorted(row for each in rows for row in each)
        return Digits(images[selected], number[digits[selected]])

    train = {digit: np.delete(rows[digit], FIFTHS).tolist() for digit in classes}
    if per_class is not None:
        train = some_of_each(train, per_class, seed)
    return part([*train.values()]), part([rows[digit][FIFTHS].tolist() for digit in classes])


class Reader:
    """Reads batches of images in worker processes, or in this process if `workers` is 0.

    The images do not depend on the number of workers. Workers start with the first batch, by the spawn method, and
    run until the reader is deleted. Finish a `read` before you start the next `read`.

    Attributes:
        labels: The class numbers [N] of all images.
    """

    def __init__(self, images: Any, how: Augmentation, workers: int = 0) -> None:
        self.labels = torch.as_tensor(images.labels)
        self._augmentation, self._keys = how, list[BatchKey]()
        self._loader: DataLoader[Batch | UnreadableImage] = DataLoader(
            images,
            batch_size=None,  # A key is a whole batch.
            sampler=self._keys,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=START_METHOD if workers else None,
            generator=torch.Generator(),  # Otherwise the DataLoader would draw from the default generator.
        )

    def read(self, batches: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yields batches with these row numbers, augmented for the epoch.

        If `epoch` is None, images are not augmented.
        """
        self._keys[:] = [(rows.tolist(), self._augmentation, epoch) for rows in batches]
        for images in self._loader:
            if isinstance(images, UnreadableImage):
                raise images
            yield images
