"""Data sets of the recipes, and orders, draws and changes that depend on seed, epoch and row alone."""

from gpipe.recipes.data.augment import Augmentation, cutout, flip, jitter
from gpipe.recipes.data.digits import Digits, Images, load_digits
from gpipe.recipes.data.folder import ImageFolder, Reader, SplitFolder, UnreadableImage, load_folder
from gpipe.recipes.data.pairs import Pair, Split, read_catalogues, read_tsv, split_by_english
from gpipe.recipes.data.sampling import batches, draw, language_probabilities
from gpipe.recipes.data.token_batches import (
    BEGIN,
    END,
    PAD,
    Vocabulary,
    collate,
    short_enough,
    steps_per_epoch,
    token_batches,
)

__all__ = [
    "BEGIN",
    "END",
    "PAD",
    "Augmentation",
    "Digits",
    "ImageFolder",
    "Images",
    "Pair",
    "Reader",
    "Split",
    "SplitFolder",
    "UnreadableImage",
    "Vocabulary",
    "batches",
    "collate",
    "cutout",
    "draw",
    "flip",
    "jitter",
    "language_probabilities",
    "load_digits",
    "load_folder",
    "read_catalogues",
    "read_tsv",
    "short_enough",
    "split_by_english",
    "steps_per_epoch",
    "token_batches",
]
