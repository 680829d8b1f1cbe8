"""The kinds of networks; importing this enters them into `KINDS`."""

from __future__ import annotations

from ..case import KINDS
from . import (
    ambient,
    attributes,
    begins,
    buffers,
    containers,
    functions,
    hooks,
    losses,
    memory,
    misuse,
    mixtures,
    models,
    modes,
    randomness,
    recompute,
    scripts,
    shares,
    sharing,
    states,
    surroundings,
    values,
)

__all__ = ["KINDS", "MODULES"]

MODULES = (
    *(hooks, memory, losses, recompute, functions, containers, buffers, shares, sharing, attributes, ambient),
    *(randomness, begins, misuse, models, mixtures, modes, states, values, scripts, surroundings),
)
