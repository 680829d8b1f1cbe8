"""Short tracebacks: where the public entrances of a pipe raise, its own frames in between are folded away.

What a user sees is the line that called us, the entrance, and the frames of the user's own layer. Where code of ours
fails by a bug, all frames stay.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import CodeType, TracebackType
from typing import ParamSpec, TypeVar

HOME = Path(__file__).parent.parent
OURS = tuple(f"{HOME / part}" for part in ("run", "plan", "checkpoint"))
BUGS = (AssertionError, AttributeError, LookupError, NameError)

Given = ParamSpec("Given")
Made = TypeVar("Made")


def entrance(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Has what a function raises show the function's own frame and none behind it that is ours."""
    code = innermost_code(function)

    @wraps(function)
    def entered(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            error.__traceback__ = folded(error, code)
            raise

    return entered


def innermost_code(function: Callable[..., object]) -> CodeType:
    """The code of a function that decorators have wrapped."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def folded(error: BaseException, entrance: CodeType | None = None) -> TracebackType | None:
    """The traceback of an exception without frames of ours, but for that of the entrance."""
    frames = []
    here = error.__traceback__
    while here is not None:
        frames.append(here)
        here = here.tb_next
    if not frames or (isinstance(error, BUGS) and is_ours(frames[-1])):
        return error.__traceback__
    kept: TracebackType | None = None
    for frame in reversed(frames):
        if not is_ours(frame) or frame.tb_frame.f_code is entrance:
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def is_ours(frame: TracebackType) -> bool:
    """Whether a frame is of the machinery: models and training loops of ours are as a user's."""
    file = Path(frame.tb_frame.f_code.co_filename)
    return file.parent == HOME or f"{file}".startswith(OURS)
