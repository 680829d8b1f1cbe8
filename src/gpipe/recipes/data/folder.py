"""Images of one's own: a folder of class folders.

Batches of images out of files, read ahead by worker processes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpipe.recipes.data.augment import Augmentation, augment, central_box, random_box
from gpipe.recipes.data.digits import SUBSET, Images

if TYPE_CHECKING:
    from PIL.Image import Image


SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
HELD_OUT_FOLDERS = ("val", "validation", "test")
HELD_OUT_EVERY = 5  # of each class, in the order of names, where no folder says what to hold out
SHOWN = 3  # of many files, in a message


@dataclass(frozen=True)
class ImageFolder:
    """Images in files, and the class of each.

    `names` are paths below `root`, sorted class by class; `labels` are places in `classes`. `folder[row]` reads an
    image as it should be looked at, upright and in RGB, and gives its label with it.
    """

    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> "tuple[Image, int]":
        return read_image(self.root / self.names[row]), self.labels[row]


@dataclass(frozen=True)
class SplitFolder:
    """Images to train on and images held out, of the same classes."""

    train: ImageFolder
    held_out: ImageFolder

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted; as numbers, if all are."""
        return self.train.classes


def load_folder(directory: str | os.PathLike[str]) -> SplitFolder:
    """Finds the images of a folder of class folders: `directory/cat/1.jpg`, also deeper.

    Where `directory/train` has class folders, `directory/val`, `validation` or `test`, whichever exists first, holds
    out. Elsewhere every fifth image of each class is held out, in the order of names. Names that begin with a dot,
    and files beside the class folders, are left alone. No image is read before it is asked for.

    Raises:
        ImportError: Pillow, which reads images, is not installed.
        ValueError: No class folders, empty ones, held-out classes that training lacks, or files that are no images by
            their suffix; the message lists all.
    """
    _require_pillow()
    root = Path(directory)
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; give one that holds a folder of images for each class")
    if not _subfolders(root / "train"):
        return _split(root, _find(root))
    held_out = next((root / name for name in HELD_OUT_FOLDERS if (root / name).is_dir()), None)
    train = _find(root / "train")
    if held_out is None:
        return _split(root / "train", train)
    return _pair(root / "train", train, held_out, _find(held_out))


def select(
    found: SplitFolder, classes: Sequence[str] | None = None, per_class: int | None = None, seed: int = 0
) -> SplitFolder:
    """Keeps some of the images of a folder.

    `classes` keeps only these, numbered from 0 in the order given. `per_class` keeps only so many training images of
    each, chosen by `seed`, of which fewer are always a part of more; no held-out image is left out by it.

    Raises:
        ValueError: There is no such class, or `per_class` is more than there are.
    """
    kept = found.classes if classes is None else tuple(classes)
    train = {name: _names_of(found.train, name) for name in kept}
    mistakes = [f"there is no class {name}; there are {_some([*found.classes])}" for name in kept if not train[name]]
    most = min((len(names) for names in train.values() if names), default=1)
    if per_class is not None and not 1 <= per_class <= most:
        mistakes.append(f"per_class is {per_class}; give a number from 1 to {most}, or None for all")
    _refuse(found.train.root, mistakes)
    if per_class is not None:
        train = {
            name: _some_of(names, per_class, (seed, number)) for number, (name, names) in enumerate(train.items())
        }
    held_out = {name: _names_of(found.held_out, name) for name in kept}
    return SplitFolder(_folder(found.train.root, train, kept), _folder(found.held_out.root, held_out, kept))


def _names_of(folder: ImageFolder, name: str) -> list[str]:
    """The files of a class; none where there is no such class."""
    if name not in folder.classes:
        return []
    label = folder.classes.index(name)
    return [file for file, own in zip(folder.names, folder.labels, strict=True) if own == label]


def _some_of(names: Sequence[str], count: int, key: tuple[int, int]) -> list[str]:
    order = np.random.default_rng((*key, SUBSET)).permutation(len(names))
    return [names[place] for place in sorted(order[:count])]


class UnreadableImage(ValueError):  # noqa: N818 a worker process hands it over by its name
    """A file that is no image, or none that can be learnt from."""


def read_image(file: Path) -> "Image":
    """Reads an image: RGB, turned as its EXIF data say.

    Raises:
        ImportError: Pillow is not installed.
        UnreadableImage: The file cannot be decoded, or has more than 8 bits a channel; the message has its path.
    """
    _require_pillow()
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


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("images are read by Pillow: pip install 'gpipe[images]'") from error


def _subfolders(folder: Path) -> list[str]:
    """The names of folders in a folder, which may not exist, sorted; as numbers, if all are."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if all(name.isascii() and name.isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _find(folder: Path) -> dict[str, list[str]]:
    """The files of each class, as paths below the folder, sorted."""
    return {name: sorted(_files(folder, name)) for name in _subfolders(folder)}


def _files(root: Path, name: str) -> Iterable[str]:
    for at, folders, files in os.walk(root / name, followlinks=True):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        below = Path(at).relative_to(root).as_posix()
        yield from (f"{below}/{file}" for file in files if not file.startswith("."))


def _split(root: Path, found: Mapping[str, list[str]]) -> SplitFolder:
    """Holds out every fifth file of each class."""
    held_out = {name: files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] for name, files in found.items()}
    mistakes = _mistakes(root, found)
    if not mistakes and not any(held_out.values()):
        mistakes.append(
            f"no class has the {HELD_OUT_EVERY} images of which one is held out; "
            "add images, or put some into val/CLASS and the others into train/CLASS"
        )
    _refuse(root, mistakes)
    rest = {name: [*files] for name, files in found.items()}
    for files in rest.values():
        del files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return SplitFolder(train=_folder(root, rest, tuple(found)), held_out=_folder(root, held_out, tuple(found)))


def _pair(
    root: Path, train: Mapping[str, list[str]], held_out_root: Path, held_out: Mapping[str, list[str]]
) -> SplitFolder:
    """Takes the classes of the training images for both."""
    mistakes = [*_mistakes(root, train), *_mistakes(held_out_root, held_out)]
    unknown = [name for name in held_out if name not in train]
    if unknown:
        mistakes.append(
            f"{held_out_root} has classes that {root} lacks: {_some(unknown)}; add them there or remove them"
        )
    _refuse(root.parent, mistakes)
    classes = tuple(train)
    return SplitFolder(train=_folder(root, train, classes), held_out=_folder(held_out_root, held_out, classes))


def _mistakes(root: Path, found: Mapping[str, list[str]]) -> list[str]:
    if not found:
        return [
            f"{root} has no class folders; put the images of each class into a folder of its own: {root}/cat/1.jpg"
        ]
    empty = [name for name, files in found.items() if not files]
    strange = [file for files in found.values() for file in files if Path(file).suffix.lower() not in SUFFIXES]
    return [
        *([f"{root} has empty class folders: {_some(empty)}; add images or remove them"] if empty else []),
        *([f"{root} has files that are no images: {_some(strange)}; remove them"] if strange else []),
    ]


def _some(names: list[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def _refuse(root: Path, mistakes: list[str]) -> None:
    if mistakes:
        raise ValueError("\n".join([f"{root} cannot be used as a folder of images:", *(f"- {m}" for m in mistakes)]))


def _folder(root: Path, found: Mapping[str, list[str]], classes: tuple[str, ...]) -> ImageFolder:
    place = {name: number for number, name in enumerate(classes)}
    pairs = [(file, place[name]) for name, files in found.items() for file in files]
    names, labels = zip(*pairs, strict=True)
    return ImageFolder(root, names, labels, classes)


START = "spawn"  # a copy of a process in which threads run, as those of a pipe do, could wait forever for their locks


@dataclass(frozen=True)
class Order:
    """Which rows to read, and the key of what is drawn for them; an epoch of None is evaluation, without draws."""

    rows: tuple[int, ...]
    epoch: int | None


@dataclass(frozen=True)
class Source(Dataset[Images | UnreadableImage]):
    """Reads whole batches: a function of the order, the same in every process."""

    folder: ImageFolder
    augmentation: Augmentation
    seed: int

    def __getitem__(self, order: Order) -> Images | UnreadableImage:
        try:
            pixels = torch.from_numpy(np.stack([self._pixels(row, order.epoch) for row in order.rows]))
        except UnreadableImage as error:
            return error  # raised where it is read: a DataLoader would put a traceback into its text
        images = (pixels.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1).contiguous()
        classes = torch.tensor([self.folder.labels[row] for row in order.rows])
        if order.epoch is not None:
            rows = torch.tensor(order.rows)
            images = augment(images, rows, self.augmentation, seed=self.seed, epoch=order.epoch)
        return Images(images, classes)

    def _pixels(self, row: int, epoch: int | None) -> NDArray[np.uint8]:
        """Returns the pixels [size, size, 3] of a box of an image."""
        from PIL.Image import Resampling

        image, _ = self.folder[row]
        how = self.augmentation
        if epoch is None:
            box = central_box(*image.size)
        else:
            box = random_box(*image.size, row, least_area=how.least_area, seed=self.seed, epoch=epoch)
        return np.asarray(image.resize((how.size, how.size), Resampling.BILINEAR, box=box))


class Reader:
    """Reads batches of images in `workers` processes, which begin with the first batch and live until `close()`.

    The bits are the same for any number of workers, also for 0, which reads in the process itself. Workers are fresh
    processes: a script that uses them keeps what it does under `if __name__ == "__main__":`.

    Raises:
        ValueError: `workers` is negative.
    """

    def __init__(
        self, folder: ImageFolder, augmentation: Augmentation | None = None, *, workers: int = 0, seed: int = 0
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers is {workers}; give a number of processes, or 0 to read in this one")
        self._source = Source(folder, augmentation or Augmentation(), seed)
        self._orders: list[Order] = []
        self._reading: object = None
        self._loader = _load(self._source, self._orders, workers) if workers else None

    def read(self, batches: Sequence[Tensor], *, epoch: int = 0, train: bool) -> Iterator[Images]:
        """Reads batches given by their rows, [N] each: augmented by (seed, epoch, row) to train, else as they are.

        Raises:
            RuntimeError: Another reading has begun since this one did; a reader does one at a time.
            UnreadableImage: A file cannot be decoded; the message has its path.
        """
        self._reading = reading = object()
        self._orders[:] = [Order(tuple(rows.tolist()), epoch if train else None) for rows in batches]
        for images in self._loader or map(self._source.__getitem__, tuple(self._orders)):
            if isinstance(images, UnreadableImage):
                raise images
            yield images
            if self._reading is not reading:
                raise RuntimeError(
                    "a reader does one reading at a time: finish this one first, or use another reader"
                )

    def close(self) -> None:
        """Ends the worker processes; what is read later is read in this one."""
        self._loader, self._reading = None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _load(source: Source, orders: list[Order], workers: int) -> "DataLoader[Images | UnreadableImage]":
    return DataLoader(
        source,
        batch_size=None,  # an order is a batch
        sampler=orders,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context=START,
        generator=torch.Generator(),  # the default one would be drawn from, and belongs to others
    )
