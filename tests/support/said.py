"""What a use of something gives, in words."""

from collections.abc import Callable


def said(use: Callable[[], object]) -> str:
    """What something gives or raises, with the notes of what is raised."""
    try:
        return repr(use())
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
