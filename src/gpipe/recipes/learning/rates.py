"""How learning rates rise and fall."""

from math import cos, pi, sqrt


def rise(step: int, rising: float) -> float:
    """The share of the largest learning rate in a step, counted from 0, of `rising` steps of warming up.

    >>> [rise(step, 4) for step in (0, 1, 3)]
    [0.25, 0.5, 1.0]
    """
    return min(1.0, (step + 1) / max(1.0, rising))


def cosine(step: int, steps: int, rising: float) -> float:
    """Rises, then falls as half a cosine to 0 at the end of `steps`.

    >>> [round(cosine(step, 10, 2), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.038]
    """
    rising = max(1.0, rising)
    return rise(step, rising) if step < rising else (1 + cos(pi * (step - rising) / (steps - rising))) / 2


def exponential(step: int, every: float, rate: float, rising: float) -> float:
    """Rises, while it is multiplied by `rate` after every `every` steps.

    >>> [round(exponential(step, every=4, rate=0.5, rising=2), 3) for step in (0, 1, 3, 4, 8)]
    [0.5, 1.0, 1.0, 0.5, 0.25]
    """
    return float(rise(step, rising) * rate ** (step // every))


def inverse_root(step: int, rising: float) -> float:
    """Rises, then falls as the inverse root of the step, as Vaswani et al. (2017, section 5.3) have it.

    >>> [round(inverse_root(step, rising=4), 3) for step in (0, 3, 15)]
    [0.25, 1.0, 0.5]
    """
    return min(rise(step, rising), sqrt(max(1.0, rising) / (step + 1)))
