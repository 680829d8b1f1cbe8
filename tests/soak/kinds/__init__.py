"""The kinds of networks; importing this enters them into `KINDS`."""

from __future__ import annotations

from ..case import KINDS
from . import ambient, buffers, functions, hooks, memory, mixtures, modes, randomness, recompute, sharing

__all__ = ["KINDS", "MODULES"]

MODULES = (hooks, memory, recompute, functions, buffers, sharing, ambient, randomness, mixtures, modes)
