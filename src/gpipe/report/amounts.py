"""Times, bytes and shares in words, short enough to be read at a glance."""

from collections.abc import Mapping
from math import floor, log10


def percent(share: float) -> str:
    """A share in whole percent.

    >>> percent(0.254)
    '25 %'
    """
    return f"{100 * share:.0f} %"


def lasts(seconds: float) -> str:
    """A time, in three digits and the unit that suits it.

    >>> lasts(0.01234), lasts(0.9996), lasts(2e-7), lasts(0.0)
    ('12.3 ms', '1.00 s', '0.200 µs', '0 ms')
    """
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    return _in_units(seconds, units, "ms")


def held(count: float) -> str:
    """A number of bytes likewise.

    >>> held(123), held(5 * 2**20)
    ('123 B', '5.00 MiB')
    """
    return _in_units(count, {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}, "B")


def _in_units(amount: float, units: Mapping[str, float], of_zero: str) -> str:
    if not amount:
        return f"0 {of_zero}"
    name, size = next(((n, s) for n, s in units.items() if amount >= s * 0.9995), list(units.items())[-1])
    value = amount / size
    return f"{value:.{max(0, 2 - floor(log10(float(f'{value:.3g}'))))}f} {name}"
