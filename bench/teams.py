"""Runs new processes in turns, A B C A B C, so that other load on the machine affects all of them equally."""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self, TypeVar

from torch import Tensor

from bench.machine import busy_seconds, cpu_seconds
from bench.runtimes import RUNTIMES
from bench.setup import Setup
from bench.worker import Answer, serve
from gpipe.schedule.program import Program

T = TypeVar("T")

TURN_SECONDS = 0.7
PATIENCE_SECONDS = 300  # others may keep the machine busy while all begin at once

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["bench.worker"])


class RuntimeFailedError(RuntimeError):
    """Raised if a runtime fails or does not answer."""


@dataclass
class Turn:
    """Several steps of one runtime, one after another.

    Attributes:
        seconds: Duration of each step. With several processes, of the slowest.
        cpu: CPU seconds of its processes per second of the turn.
        others: CPU seconds of all other processes per second of the turn.
        forwards: If the runtime times stages, the seconds of each stage for each micro-batch.
        backwards: Likewise for backward passes.
    """

    seconds: list[float]
    cpu: float
    others: float
    forwards: list[list[float]] = field(default_factory=list)
    backwards: list[list[float]] = field(default_factory=list)


class Team:
    """The processes of one runtime: one, one per partition, or independent copies."""

    def __init__(self, name: str, setup: Setup, *, copies: int = 1) -> None:
        self.name = name
        self.folder = TemporaryDirectory(dir="/dev/shm")  # where processes may share memory
        world = setup.partitions if RUNTIMES[name].processes else 1
        self.orders = []
        self.processes = []
        for rank in list(range(world)) * copies:
            ours, theirs = _context.Pipe()
            own = replace(setup, rank=rank, world=world, meeting=f"{self.folder.name}/meeting")
            process = _context.Process(target=serve, args=(theirs, name, own), daemon=True)
            process.start()
            theirs.close()
            self.orders.append(ours)
            self.processes.append(process)
        self.peaks: list[int] = []
        self.program: Program | None = None
        self.steps = 1

    def wait_until_ready(self) -> None:
        """Waits for the first steps, and decides how many steps make a turn."""
        answers = self._hear()
        self.peaks = [answer.peak_bytes for answer in answers]
        self.program = answers[0].program
        step = max(answer.seconds[-1] for answer in answers)
        self.steps = min(40, max(1, round(TURN_SECONDS / step)))
        if self.steps > 1:
            self.turn()  # what is short may need more to settle

    def turn(self) -> Turn:
        """Runs some steps in all processes."""
        cpu, busy, start = self._cpu(), busy_seconds(), time.perf_counter()
        answers = self._ask(self.steps)
        wall = time.perf_counter() - start
        cpu, busy = self._cpu() - cpu, busy_seconds() - busy
        slowest = [max(step) for step in zip(*(answer.seconds for answer in answers), strict=True)]
        return Turn(slowest, cpu / wall, max(0.0, busy - cpu) / wall, answers[0].forwards, answers[0].backwards)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the last step, merged from all processes."""
        return {name: gradient for answer in self._ask("gradients") for name, gradient in answer.gradients.items()}

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def _cpu(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.processes if process.pid)

    def _ask(self, order: object) -> list[Answer]:
        for orders in self.orders:
            orders.send(order)
        return self._hear()

    def _hear(self) -> list[Answer]:
        """Collects answers in order of arrival. If a process fails, the first answer has the reason."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(self.processes):
            waiting = {orders: at for at, orders in enumerate(self.orders) if at not in answers}
            there = wait(list(waiting), PATIENCE_SECONDS)
            if not there:
                raise RuntimeFailedError(f"no answer within {PATIENCE_SECONDS} s")
            for orders, at in waiting.items():
                if orders in there:
                    answers[at] = _answer(orders)
        return [answer for _, answer in sorted(answers.items())]


def _answer(orders: Connection) -> Answer:
    try:
        answer = orders.recv()
    except EOFError:
        raise RuntimeFailedError("the process ended") from None
    if answer.failure:
        raise RuntimeFailedError(answer.failure)
    assert isinstance(answer, Answer)
    return answer


class Teams:
    """Teams that take turns until the time is over."""

    def __init__(self, setups: Mapping[str, Setup], *, copies: int = 0) -> None:
        self.by_name = {name: Team(name, setup) for name, setup in setups.items()}
        if copies:
            self.by_name["copies"] = Team("plain", setups["plain"], copies=copies)
        self.turns: dict[str, list[Turn]] = {name: [] for name in self.by_name}
        self.failures: dict[str, str] = {}

    def __enter__(self) -> Self:
        for name, team in self.by_name.items():
            self._attempt(name, team.wait_until_ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for team in self.by_name.values():
            team.close()

    def run(self, rounds: int, until: float, rest: float = 0.0) -> None:
        """Gives all teams turns, at least `rounds` times, and further until the clock reaches `until`.

        After each turn follows a pause, `rest` times as long, in which other processes can use the machine.
        """
        done, longest = 0, 0.0
        while done < rounds or time.monotonic() + longest < until:
            start = time.monotonic()
            for name in self._working():
                begun = time.monotonic()
                turn = self._attempt(name, self.by_name[name].turn)
                if turn is not None:
                    self.turns[name].append(turn)
                time.sleep(rest * (time.monotonic() - begun))
            longest = max(longest, time.monotonic() - start)
            done += 1

    def gradients(self) -> dict[str, dict[str, Tensor]]:
        """Returns the gradients of the last step of each team by name."""
        found = {name: self._attempt(name, self.by_name[name].gradients) for name in self._working()}
        return {name: gradients for name, gradients in found.items() if gradients is not None}

    def _working(self) -> list[str]:
        return [name for name in self.by_name if name not in self.failures]

    def _attempt(self, name: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (RuntimeFailedError, OSError) as error:
            self.failures[name] = str(error)
            return None


def reason(failure: str) -> str:
    r"""Returns the line of a traceback that names the exception. Notes may follow it.

    >>> reason("Traceback (most recent call last):\n  File ...\nValueError: no\nin layer 3")
    'ValueError: no'
    """
    last = failure.rpartition("Traceback (most recent call last):\n")[2]
    return next(line for line in last.splitlines() if line and not line.startswith(" "))


def quietest(turns: Sequence[Turn], at_least: int, others: float) -> list[Turn]:
    """Returns the turns in which other processes used at most this number of cores, or the quietest ones."""
    return _quietest(turns, at_least, others, lambda turn: turn.others)


def quietest_pairs(of: Sequence[Turn], over: Sequence[Turn], at_least: int, others: float) -> list[tuple[Turn, Turn]]:
    """Returns pairs of turns in the same rounds, in which both were quiet."""
    pairs = list(zip(of, over, strict=False))  # what failed has fewer
    return _quietest(pairs, at_least, others, lambda pair: max(turn.others for turn in pair))


def _quietest(items: Sequence[T], at_least: int, others: float, used: Callable[[T], float]) -> list[T]:
    ordered = sorted(items, key=used)
    quiet = [item for item in ordered if used(item) <= others]
    return quiet if len(quiet) >= at_least else ordered[:at_least]
