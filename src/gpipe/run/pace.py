"""Chooses who walks the rows where the user did not: rank threads, or for very short layers the calling thread.

Layers of some microseconds gain nothing from threads: their ranks only wait for each other at the interpreter's lock,
and on two free cores take longer than one after another. The bits are the same either way, so the clock may decide.
"""

from statistics import median

SHORT = 3e-3
"""Seconds of one action below which it is worth a try."""

TRIALS = 8
"""Runs of each way that are compared; only then is anything but threads tried."""


class Pace:
    """What the runs of one program took, by way."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def threaded(self) -> bool:
        """Whether the next run is one for rank threads.

        >>> pace = Pace()
        >>> for _ in range(TRIALS): pace.note(5e-4, threaded=True)
        >>> pace.threaded
        False
        >>> for _ in range(TRIALS): pace.note(2e-4, threaded=False)
        >>> pace.threaded
        False
        """
        threads, alone = self._seconds[True], self._seconds[False]
        if len(threads) < TRIALS or median(threads) > SHORT:
            return True
        if any(seconds > 2 * median(threads) for seconds in alone):  # no need to try that again
            return True
        return len(alone) == TRIALS and median(threads) <= median(alone)

    def note(self, seconds: float, *, threaded: bool) -> None:
        """Notes the seconds that a run took for each action of its longest row."""
        if len(self._seconds[threaded]) < TRIALS:
            self._seconds[threaded].append(seconds)
