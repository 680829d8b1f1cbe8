"""Returns the result of a call as text, or the error that it raises."""

from collections.abc import Callable


def said(use: Callable[[], object]) -> str:
    """Returns the result or the error of a call, with the notes of the error."""
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
