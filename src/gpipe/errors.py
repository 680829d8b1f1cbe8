"""Defines the exceptions of gpipe, and removes internal frames from tracebacks.

A traceback shows the user's line, the public method of gpipe that the line called, and the frames of the user's
layers. If the exception is a bug of gpipe, the traceback keeps all frames.
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
USER_LEVEL = tuple(f"{HOME / part}" for part in ("cli", "recipes"))  # their frames are shown like frames of the user
BUGS = (AssertionError, AttributeError, LookupError, NameError)

P = ParamSpec("P")
R = TypeVar("R")
Explain: TypeAlias = Callable[[Sequence[object], Mapping[str, object]], str | None]
_CODE = attrgetter("tb_frame.f_code")


def hide_internal_frames(function: Callable[P, R], explain: Explain = lambda args, kwargs: None) -> Callable[P, R]:
    """Wraps a public function so that tracebacks of its exceptions contain no internal frames.

    Args:
        function: The public function or method.
        explain: A function that returns a better message for arguments that `function` does not accept, or None to
            keep Python's message.
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
    """Returns the code object of a function below all decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def user_traceback(error: BaseException, public: CodeType | None = None) -> TracebackType | None:
    """Returns the traceback of an exception without internal frames. Keeps the frame of the `public` function.

    Also removes frames of `contextlib`. After an interrupt, such a frame could keep a context manager of gpipe alive,
    and the context manager would never exit.
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
    """Returns the traceback entries of an exception, with the outermost entry first."""
    frames = []
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    return frames


def is_internal(frame: TracebackType) -> bool:
    """Returns whether a frame runs code of gpipe outside its command line and recipes."""
    file = frame.tb_frame.f_code.co_filename
    return file.startswith(f"{HOME}{os.sep}") and not file.startswith(USER_LEVEL)


class RemoteError(RuntimeError):
    """Raised if the current call failed because a different process of the pipe failed.

    `rank`, `type_name` and `traceback` are also attributes.

    Args:
        message: The text of the error.
        rank: The rank of the failed process within the pipe. The processes of one replica have consecutive ranks.
        type_name: The type name of the exception in the failed process. Empty if the process did not report an
            exception.
        traceback: The traceback of that exception as text. Empty if the process did not report a traceback.

    Attributes:
        received: True if gpipe raised this exception because a different process failed. False if the user's code
            raised the exception.

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
    """Raised if the results of a step may differ from the results of the reference loop.

    The reference loop runs the micro-batches one after the other through the unsplit model. After a step with new
    modes, inputs or program, `step` and `backward` replay two micro-batches in this order, and raise this error if
    the replay returns different results. The message names the stage, the result that differs, and the likely cause.
    After this error, `.grad` is undefined.

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
    """Creates an exception for pickle and copy, without a call of its `__init__`."""
    return kind.__new__(kind, *args)


def received_error(message: str, rank: int, type_name: str = "", traceback: str = "") -> RemoteError:
    """Returns the exception for a failure that a different process reported, or that ended the process."""
    error = RemoteError(message, rank, type_name, traceback)
    error.received = True
    return error


def is_count(value: object) -> bool:
    """Returns whether a value is an int of at least 1, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def int_remedy(value: object) -> str:
    """Returns a hint for the end of a message, if the value is an integer type of a different library."""
    is_foreign_integer = hasattr(value, "__index__") and type(value) not in (int, bool)
    return f" (a Python int: convert the {type(value).__name__} with int())" if is_foreign_integer else ""
