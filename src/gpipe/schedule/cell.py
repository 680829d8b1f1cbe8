"""What a notebook's cell shows of a value."""

from importlib import import_module


def in_cell(kind: str, value: object) -> str | None:
    """The HTML that `gpipe.profiling.cells` makes of a value; None has the cell show its text.

    It stands above all that it draws, and is found by name once a notebook asks, as public names are.
    """
    try:
        html: str = getattr(import_module("gpipe.profiling.cells"), kind)(value)
    except Exception:  # what cannot be drawn, or only by what is not installed here, is to be shown all the same
        return None
    return html
