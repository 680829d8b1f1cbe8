"""Ctrl-C at a chosen place of what a thread does, where Python itself would act on it: behind a call, or in a loop.

The flag that the signal sets is set before an instruction, by code in which Python does not look at it: a trace
function in C. So no clock has a say, and whatever comes can come again.
"""

import ctypes
import dis
import functools
import signal
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

LOOKS = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "FOR_ITER", "BEFORE_WITH", "LOAD_ATTR")
"""How instructions begin that Python looks at the flag in, or that may run functions, in which it does."""


def _in_c(name: str, result: Any) -> Any:
    """A function of Python's own that is given what a trace function is, and overlooks it."""
    found = ctypes.PyDLL(None)[name]
    found.argtypes, found.restype = [ctypes.py_object] * 3, result
    return found


class _After:
    trace = _in_c("Py_IsInitialized", None)  # sees nothing


_set_flag = _in_c("PyErr_SetInterrupt", functools.partial(getattr, _After, "trace"))


class Place(NamedTuple):
    """An instruction, and the one that was done before it in its frame."""

    code: CodeType
    before: int
    at: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}, {self.code.co_qualname}, instruction {self.at} behind {self.before}"


def find_places(do: Callable[[], object]) -> dict[Place, int]:
    """The places that this thread comes to, and how often."""
    found, last = Counter[Place](), dict[FrameType, int]()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            if frame in last:
                found[Place(frame.f_code, last[frame], frame.f_lasti)] += 1
            last[frame] = frame.f_lasti
        return trace

    _trace(do, trace)
    names = {code: {each.offset: each.opname for each in dis.get_instructions(code)} for code, *_ in found}
    return {each: times for each, times in found.items() if names[each.code].get(each.at, "").startswith(LOOKS)}


def interrupt(do: Callable[[], object], place: Place, time: int) -> None:
    """Does it, and presses Ctrl-C when this thread has come to the place so often; raises whatever comes of it."""
    left = time

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code is not place.code:
            return None
        if event == "opcode" and frame.f_lasti == place.before:
            left -= 1
            if not left:
                sys.settrace(_After.trace)
                return _set_flag
        return trace

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _trace(do, trace)
    finally:
        signal.signal(signal.SIGINT, before)


def _trace(do: Callable[[], object], trace: Callable[[FrameType, str, object], Any]) -> None:
    def begin(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace(frame, event, arg)

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        do()
    finally:
        sys.settrace(before)
