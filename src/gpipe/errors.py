"""Exceptions of gpipe, and tracebacks without its internal frames.

A traceback shows the user's line, the public method it called, and the frames of the user's own layers. If gpipe
itself fails because of a bug, all frames are kept.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeAlias, TypeVar

HOME = Path(__file__).parent
USER_LEVEL = tuple(f"{HOME / part}" for part in ("cli", "recipes"))  # their frames are shown, like a user's
BUGS = (AssertionError, AttributeError, LookupError, NameError)

P = ParamSpec("P")
R = TypeVar("R")
Explain: TypeAlias = Callable[[Sequence[object], Mapping[str, object]], str | None]
_CODE = attrgetter("tb_frame.f_code")


def hide_internal_frames(function: Callable[P, R], explain: Explain = lambda args, kwargs: None) -> Callable[P, R]:
    """Wraps a public function so that tracebacks of its exceptions show no internal frames below it.

    Args:
        function: The public function or method.
        explain: Returns a better message for arguments that the function does not accept, or None to keep Python's.
    """
    code = innermost_code(function)

    @wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if type(error) is TypeError and code not in map(_CODE, frames_of(error)):
                error.args = (explain(args, kwargs) or str(error),)
            error.__traceback__ = user_traceback(error, code)
            raise

    return public


def innermost_code(function: Callable[..., object]) -> CodeType:
    """Returns the code object of a function without its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def user_traceback(error: BaseException, public: CodeType | None = None) -> TracebackType | None:
    """Returns the traceback of an exception without internal frames, except the frame of the `public` function.

    Frames of `contextlib` are removed too: they would keep a context manager of gpipe alive, and so entered, if an
    interrupt left it open.
    """
    frames = frames_of(error)
    if not frames or (isinstance(error, BUGS) and is_internal(frames[-1])):
        return error.__traceback__
    kept: TracebackType | None = None
    for frame in reversed(frames):
        code = frame.tb_frame.f_code
        if code is public or not (is_internal(frame) or code.co_filename == contextlib.__file__):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno or 0)  # tb_lineno may be None
    return kept


def frames_of(error: BaseException) -> list[TracebackType]:
    """Returns the traceback entries of an exception, outermost first."""
    frames = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    return frames


def is_internal(frame: TracebackType) -> bool:
    """Returns whether a frame runs code of gpipe, except the code of its commands and recipes."""
    file = frame.tb_frame.f_code.co_filename
    return file.startswith(f"{HOME}{os.sep}") and not file.startswith(USER_LEVEL)


class RemoteError(RuntimeError):
    """Another process of the pipe failed, and the current call failed with it.

    `rank`, `type_name` and `traceback` are also attributes.

    Args:
        message: The text of the error.
        rank: The rank of the failed process within the pipe. The processes of one replica have consecutive ranks.
        type_name: The name of the type of its exception. Empty if the process ended without reporting one.
        traceback: Its traceback as text. Empty if it reported none.

    Attributes:
        received: Whether the message came from another process. False if the user's code raised the exception.

    Example:
        >>> import gpipe
        >>> gpipe.RemoteError("rank 1 failed: ValueError: no", rank=1, type_name="ValueError").rank
        1
    """

    def __init__(self, message: str, rank: int, type_name: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name
        self.traceback = traceback
        self.received = False

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.args), vars(self)


class VerificationError(RuntimeError):
    """The results of a step may differ from those of the reference loop.

    `step` and `backward` raise it after the first step of each new combination of modes, inputs and program, if a
    replay of two micro-batches in the order of the reference loop gives different results. The message names the
    stage, the result that differs, and the likely cause. `.grad` is undefined afterwards.

    Example:
        >>> import torch, gpipe
        >>> class Clip(torch.nn.Module):
        ...     def forward(self, x):
        ...         x.data.clamp_(-0.1, 0.1)  # PyTorch does not notice
        ...         return x * 2
        >>> layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), Clip(), torch.nn.Linear(4, 1)]
        >>> pipe = gpipe.GPipe(layers, [2, 2], micro_batches=2, remat="never", seed=0)
        >>> try:
        ...     loss = pipe.step(torch.ones(4, 4), torch.ones(4, 1), torch.nn.functional.mse_loss)
        ... except gpipe.VerificationError as error:
        ...     print(str(error)[:50])
        stage 1 (layer 2 (2: Clip) to layer 3 (3: Linear))
    """


def rebuild(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Creates an exception for pickle and copy, which would otherwise call its `__init__` with only the message."""
    return kind.__new__(kind, *args)


def received_error(message: str, rank: int, type_name: str = "", traceback: str = "") -> RemoteError:
    """Returns the exception for a failure that another process reported, or that ended it."""
    error = RemoteError(message, rank, type_name, traceback)
    error.received = True
    return error


def is_count(value: object) -> bool:
    """Returns whether a value is an int of at least 1 (and not a bool)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def int_remedy(value: object) -> str:
    """Returns text to append to "an integer" in a message, if the value is an integer of another library."""
    is_foreign_integer = hasattr(value, "__index__") and type(value) not in (int, bool)
    return f" (a Python int: convert the {type(value).__name__} with int())" if is_foreign_integer else ""
