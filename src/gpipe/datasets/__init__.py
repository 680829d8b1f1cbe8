"""Data sets of the recipes, and orders, draws and changes that depend on seed, epoch and row alone."""

from gpipe.datasets.augment import Augmentation, cutout, flip
from gpipe.datasets.catalogues import read_catalogues
from gpipe.datasets.digits import Digits, Images, load_digits
from gpipe.datasets.folder import ImageFolder, SplitFolder, load_folder
from gpipe.datasets.jitter import jitter
from gpipe.datasets.order import batches
from gpipe.datasets.pairs import Pair, Split, read_tsv, split_by_english
from gpipe.datasets.reading import Reader, read_batches
from gpipe.datasets.sampling import draw, language_probabilities
from gpipe.datasets.token_batches import collate, short_enough, steps_per_epoch, token_batches
from gpipe.datasets.vocabulary import BEGIN, END, PAD, Vocabulary

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
    "read_batches",
    "read_catalogues",
    "read_tsv",
    "short_enough",
    "split_by_english",
    "steps_per_epoch",
    "token_batches",
]
