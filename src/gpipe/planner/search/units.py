"""Formats seconds and bytes in units that suit their size."""

import math


def format_seconds(seconds: float, unit: str = "ms") -> str:
    """Returns a time with three digits in s, ms or µs. An empty `unit` means that costs have no unit.

    >>> format_seconds(0.01234), format_seconds(0.9996), format_seconds(2e-7), format_seconds(0.0)
    ('12.3 ms', '1.00 s', '0.200 µs', '0 ms')
    """
    if not (seconds and unit):
        return f"{seconds:,.7g} {unit or 'units'}"
    size, name = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * s), (1e-6, "µs"))
    value = seconds / size
    return f"{value:.{max(0, 2 - math.floor(math.log10(float(f'{value:.3g}'))))}f} {name}"


def format_bytes(number: float) -> str:
    """Formats a number of bytes with the unit GiB, MiB, KiB or bytes.

    >>> format_bytes(3 * 2**29), format_bytes(100)
    ('1.50 GiB', '100 bytes')
    """
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:.3g} bytes"
