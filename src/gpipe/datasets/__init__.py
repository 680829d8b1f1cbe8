"""Data sets of the example jobs, as tensors, and batch orders that depend on (seed, epoch) alone."""

from gpipe.datasets.digits import Digits, Images, load_digits
from gpipe.datasets.jitter import jitter
from gpipe.datasets.order import batches

__all__ = ["Digits", "Images", "batches", "jitter", "load_digits"]
