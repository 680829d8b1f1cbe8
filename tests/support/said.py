"""What a use of something gives, in words, or what it raises."""

from collections.abc import Callable


def said(use: Callable[[], object]) -> str:
    """What something gives or raises, with the notes of what is raised."""
    try:
        return repr(use())
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def raised_by(use: Callable[[], object]) -> BaseException | None:
    try:
        use()
    except BaseException as error:
        return error
    return None
