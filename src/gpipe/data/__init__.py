"""Data sets of the example jobs, as tensors, and batch orders that depend on (seed, epoch) alone."""

from gpipe.data.digits import Digits, Images, load_digits
from gpipe.data.jitter import jitter
from gpipe.data.order import batches

__all__ = ["Digits", "Images", "batches", "jitter", "load_digits"]
