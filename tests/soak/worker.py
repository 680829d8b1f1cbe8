"""Runs configurations one after another in a separate process, which may crash or hang without ending the soak."""

import faulthandler
import multiprocessing as mp
from multiprocessing.connection import Connection

from .judge import Verdict


def serve(link: Connection, limit: float) -> None:
    """Judges configurations from standard input. Prints its stack before its time is over."""
    faulthandler.enable()
    from tests.support.kinds import KINDS

    from .judge import judge

    link.send("ready")
    while (asked := link.recv()) is not None:
        name, number = asked
        faulthandler.dump_traceback_later(0.9 * limit)
        link.send(judge(KINDS[name], number))
        faulthandler.cancel_dump_traceback_later()


class Worker:
    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.limit))
        self.process.start()
        theirs.close()
        self.link.recv()  # ready

    def judge(self, name: str, number: int) -> Verdict:
        self.link.send((name, number))
        try:
            if self.link.poll(self.limit):
                answer = self.link.recv()
                assert isinstance(answer, Verdict)
                return answer
            verdict, why = "HANG", f"nothing within {self.limit:.0f} s"
        except (EOFError, ConnectionError):
            verdict, why = "CRASH", "the process is gone"
        self._end()
        self._start()
        return Verdict(name, number, verdict, why, "", self.limit)

    def _end(self) -> None:
        self.process.kill()
        self.process.join()
        self.link.close()

    def close(self) -> None:
        self.link.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self._end()
