"""A clock that only advances if a test says so."""

import threading
import time

import pytest
from torch import Tensor, nn

from gpipe.runtime.streams import RankStream


class Clock:
    """Replaces `time.perf_counter`. Only `sleep`, in any thread, advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        self._one_at_a_time = threading.Lock()
        monkeypatch.setattr(time, "perf_counter", lambda: self._now)
        for name in ("mark", "stamp"):  # which hold the function itself
            monkeypatch.setattr(RankStream, name, staticmethod(time.perf_counter))

    def sleep(self, seconds: float) -> None:
        with self._one_at_a_time:
            self._now += seconds


class Slow(nn.Linear):
    """A layer that takes this number of seconds."""

    def __init__(self, width: int, seconds: float, clock: Clock) -> None:
        super().__init__(width, width)
        self.seconds, self.clock = seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(self.seconds)
        return super().forward(x)
