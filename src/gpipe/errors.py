"""What a pipe raises for failures elsewhere, and short tracebacks.

A user sees the line that called us, the public entrance, and the frames of the user's own layer. Where code of ours
fails by a bug, all frames stay.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from pathlib import Path
from types import CodeType, TracebackType
from typing import ParamSpec, TypeAlias, TypeVar

HOME = Path(__file__).parent
THEIRS = tuple(f"{HOME / part}" for part in ("cli", "recipes"))  # models and training loops of ours are as a user's
BUGS = (AssertionError, AttributeError, LookupError, NameError)

P = ParamSpec("P")
R = TypeVar("R")
Explain: TypeAlias = Callable[[Sequence[object], Mapping[str, object]], str | None]
_CODE = attrgetter("tb_frame.f_code")


def entrance(function: Callable[P, R], explain: Explain = lambda args, kwargs: None) -> Callable[P, R]:
    """Has what a function raises show the function's own frame and none behind it that is ours.

    What Python raises of arguments that the function does not take is said as `explain` says it.
    """
    code = innermost_code(function)

    @wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if type(error) is TypeError and code not in map(_CODE, frames_of(error)):
                error.args = (explain(args, kwargs) or str(error),)
            error.__traceback__ = folded(error, code)
            raise

    return entered


def innermost_code(function: Callable[..., object]) -> CodeType:
    """The code of a function that decorators have wrapped."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def folded(error: BaseException, entrance: CodeType | None = None) -> TracebackType | None:
    """The traceback of an exception without frames of ours, but for that of the entrance.

    Nor with those of `contextlib`: a context of ours that an interrupt left entered would be so as long as they are.
    """
    frames = frames_of(error)
    if not frames or (isinstance(error, BUGS) and is_ours(frames[-1])):
        return error.__traceback__
    kept: TracebackType | None = None
    for frame in reversed(frames):
        code = frame.tb_frame.f_code
        if code is entrance or not (is_ours(frame) or code.co_filename == contextlib.__file__):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno or 0)  # None: of no line
    return kept


def frames_of(error: BaseException) -> list[TracebackType]:
    """The traceback of an exception, from the outermost frame inwards."""
    frames = []
    here = error.__traceback__
    while here is not None:
        frames.append(here)
        here = here.tb_next
    return frames


def is_ours(frame: TracebackType) -> bool:
    """Whether a frame is of the machinery."""
    file = frame.tb_frame.f_code.co_filename
    return file.startswith(f"{HOME}{os.sep}") and not file.startswith(THEIRS)


class RemoteError(RuntimeError):
    """Another process of the pipe failed, and with it this step here too.

    Attributes:
        rank: The number of the process that failed: those of a replica stand side by side.
        type_name: The type of its exception, by name; empty if the process is gone without a word.
        traceback: Its traceback as text, as far as there is one.

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
        self.received = False  # from another process, not raised by the user's own code


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
        ...     print(str(error)[:55])
        stage 1, from layer 2 (2: Clip) to layer 3 (3: Linear),
    """


def received(message: str, rank: int, type_name: str = "", its_traceback: str = "") -> RemoteError:
    """The exception of a failure in another process."""
    error = RemoteError(message, rank, type_name, its_traceback)
    error.received = True
    return error


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def int_remedy(value: object) -> str:
    """The remedy for a whole number of another library, in words."""
    is_another = hasattr(value, "__index__") and type(value) not in (int, bool)
    return f", as an int: int(...), not a {type(value).__name__}" if is_another else ""
