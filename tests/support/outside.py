"""What layers note where no run on a sample puts it back: in a queue, whose content cannot be copied."""

from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def drained(noted: "SimpleQueue[T]") -> list[T]:
    """What was put into a queue so far, and is not in it any more."""
    return [noted.get() for _ in range(noted.qsize())]
