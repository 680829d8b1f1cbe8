"""What a process is at, for the others to see."""

import ctypes
import mmap
import time
from typing import Self, TypeAlias


class Status(ctypes.Structure):
    """What a process is at, in memory that the other processes of its host can read: also when it is stuck or gone.

    Its run, its place in the actions (-1 outside) and since when, how many layers began there, whether it waits.
    """

    _fields_ = (
        ("run", ctypes.c_uint32),
        ("at", ctypes.c_int32),
        ("layers", ctypes.c_uint32),
        ("waits", ctypes.c_bool),
        ("since", ctypes.c_double),
    )

    @classmethod
    def shown_in(cls, folder: str) -> Self:
        """That of this process, as a file in a folder."""
        with open(f"{folder}/status", "x+b") as file:
            file.write(bytes(ctypes.sizeof(cls)))
            file.flush()
            shown = cls.from_buffer(mmap.mmap(file.fileno(), 0))
        shown.reach(0, -1)
        return shown

    @staticmethod
    def memory_in(folder: str) -> mmap.mmap:
        """The memory of another process's, to read."""
        with open(f"{folder}/status", "rb") as file:
            return mmap.mmap(file.fileno(), ctypes.sizeof(Status), prot=mmap.PROT_READ)

    def reach(self, run: int, at: int) -> None:
        """Notes a place among the actions."""
        self.run, self.at, self.layers, self.waits, self.since = run, at, 0, False, time.monotonic()


Memory: TypeAlias = Status | mmap.mmap  # where a status stands
