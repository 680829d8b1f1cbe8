"""A training is killed at many moments, and goes on: is it, to the last bit, the one that was never killed?

It goes on by itself, as `torchrun --max-restarts` starts it again; or it is started again with another number of
partitions, or of replicas, in processes or in one. After each step of each life all that the ranks have (losses,
weights, buffers, optimizer state, learning rate) is compared with what a training has that nobody killed: byte for
byte, and within rounding where the number of replicas changes, which sum in another order.

    python -m tests.soak.resume

Three minutes.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count as numbers_from
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory

from tests.support.processes.launch import run_ranks
from tests.support.processes.matrix import numbers
from tests.support.processes.outcome import HungError, Outcome, told_by
from tests.support.processes.torchrun import torchrun

from . import interrupted
from .interrupted import STEPS, Json, Layout, Moment
from .results import RESULTS, describe, facts, of, table, with_time_left, write

TOLERANCE = 1e-4
"""Of numbers that are sums made in another order, or have grown from such over all steps."""
LIMIT = 90.0
"""Seconds that a life may last."""
ALONE = Layout(1, (8,))
K2, K3, K4 = Layout(2, (2, 6)), Layout(3, (2, 4, 2)), Layout(4, (2, 2, 2, 2))
THREADS, PAIR, PAIR_OF_K2 = Layout(1, (2, 4, 2)), Layout(2, (8,)), Layout(4, (4, 4))


@dataclass(frozen=True)
class Chain:
    """A training of several lives, each but the last killed at its moment.

    Attributes:
        layouts: Of each life; one of all if torchrun starts it again.
        moments: At which lives end.
    """

    layouts: Sequence[Layout]
    moments: Sequence[Moment]

    @property
    def by_torchrun(self) -> bool:
        """Whether it goes on by itself."""
        return len(self.layouts) == 1

    @property
    def exact(self) -> bool:
        """Whether every bit is promised."""
        return len({layout.replicas for layout in self.layouts}) == 1

    def layout(self, life: int) -> Layout:
        """How a life trains."""
        return self.layouts[0 if self.by_torchrun else life]

    def __str__(self) -> str:
        if self.by_torchrun:
            return f"torchrun --max-restarts, {self.layouts[0]}"
        if not self.exact:
            return "started again with other K and numbers of replicas"
        replicas = self.layouts[0].replicas
        return "started again with other K" + (f", {replicas} replicas" if replicas > 1 else "")


@dataclass(frozen=True)
class Resume:
    """A life that goes on after a kill.

    Attributes:
        life: Which.
        killed: When the one before it was.
        before: How that trained.
        after: How this one does.
        start: The step that it goes on from.
        steps: What it did after that.
        wrong: What is not as if nobody had been killed; empty if all is.
    """

    life: int
    killed: str
    before: str
    after: str
    start: int
    steps: int
    wrong: str


@dataclass
class Found:
    """What came of a chain; `trouble` is why it did not come to its end."""

    chain: str
    exact: bool
    lives: int  # fewer than were wanted if a kill came too late
    wanted: int
    resumes: list[Resume] = field(default_factory=list)
    trouble: str = ""

    @property
    def differ(self) -> int:
        """Resumes that are not the training that was never killed; what does not end is one."""
        return sum(bool(resume.wrong) for resume in self.resumes) + bool(self.trouble)

    @property
    def total(self) -> int:
        """Of how many."""
        return len(self.resumes) + bool(self.trouble)


def moments(world: int, first: int = 0) -> list[Moment]:
    """A kill in each phase, by the ranks in turn; three in a save, and two at any moment."""
    turns = numbers_from(first)
    phases = ["forward", "recompute", "backward", "optimizer", "between"]
    found = [Moment(phase, next(turns) % world) for phase in phases]
    found += [Moment("save", rank, number) for rank, number in ((0, 12), (0, 45), (1, 6))]
    return found + [Moment("any", next(turns) % world, 100 * first + number) for number in range(2)]


def chains() -> list[Chain]:
    """All of them."""
    around = [K2, K4, THREADS, K3, ALONE, K2, THREADS, K4]
    same = [PAIR, PAIR_OF_K2, PAIR]
    replicas = [K2, PAIR_OF_K2, ALONE, PAIR, K4]
    return [
        Chain([K2], moments(2)),
        Chain([K4], moments(4, 1)[::3]),
        Chain([PAIR_OF_K2], moments(4, 2)[1::3]),
        *(Chain(layouts, _on(layouts, moments(4, 3 + at))) for at, layouts in enumerate([around, same, replicas])),
    ]


def _on(layouts: Sequence[Layout], due: Sequence[Moment]) -> list[Moment]:
    """Moments for all lives but the last, on ranks that there are."""
    lives = zip(layouts[:-1], due, strict=False)
    return [Moment(moment.phase, moment.rank % layout.processes, moment.number) for layout, moment in lives]


@cache
def never_killed(replicas: int) -> dict[int, Json]:
    """What a training has after each step that nobody kills, of one stage: its loss and, by name, its numbers."""
    layout = PAIR if replicas == 2 else ALONE
    with TemporaryDirectory() as name:
        outcomes = run_ranks(
            layout.processes, interrupted.train, name, layout.sizes, None, 0, limit=LIMIT, timeout=LIMIT
        )
        assert all(outcome.answered for outcome in outcomes), told_by(outcomes)
        return {line["step"]: line for line in read(Path(name) / "rank_0.jsonl")}


def read(log: Path) -> Iterator[Json]:
    """The lines of a rank; one may be cut off."""
    for line in log.read_text().splitlines() if log.exists() else []:
        if line.endswith("}"):
            yield json.loads(line)


def go(chain: Chain, folder: Path) -> str:
    """Has a training live and die; says why it did not come to its end, if so."""
    if chain.by_torchrun:
        return _go_by_torchrun(chain, folder)
    for life, layout in enumerate(chain.layouts):
        told = asdict(chain.moments[life]) if life < len(chain.moments) else None
        job = (interrupted.train, str(folder), layout.sizes, told, life)
        try:
            outcomes = run_ranks(layout.processes, *job, limit=LIMIT, timeout=LIMIT)
        except HungError as error:
            return _brief(error.outcomes)
        if all(outcome.answered for outcome in outcomes):
            return ""
    return _brief(outcomes)


def _brief(outcomes: Sequence[Outcome]) -> str:
    """How each rank ended; what they had to say goes to standard error."""
    print(told_by(outcomes), file=sys.stderr)
    return ", ".join(str(outcome).partition("\n")[0].removeprefix("--- ") for outcome in outcomes)


def _go_by_torchrun(chain: Chain, folder: Path) -> str:
    layout, restarts = chain.layouts[0], len(chain.moments)
    options = ("--max-restarts", str(restarts))
    told = interrupted.arguments(folder, layout, chain.moments)
    with torchrun(layout.processes, "tests.soak.interrupted", *told, folder=folder, options=options) as launched:
        with suppress(TimeoutExpired):
            launched.popen.wait(LIMIT * (restarts + 1))
        code = launched.popen.poll()
        if code:
            print(launched.log.read_text(errors="replace")[-5000:], file=sys.stderr)
        return "" if code == 0 else f"torchrun ended with {code}"


def judge(chain: Chain, folder: Path, trouble: str) -> Found:
    """Compares what all ranks have written down with what they would have had."""
    logs = [list(read(log)) for log in sorted(folder.glob("rank_*.jsonl"))]
    lives = 1 + max((line["life"] for log in logs for line in log), default=0)
    found = Found(str(chain), chain.exact, lives, len(chain.moments) + 1, trouble=trouble)
    last = max((line["step"] for log in logs for line in log), default=0)
    if last < STEPS and not trouble:
        found.trouble = f"it ended after step {last}"
    right = never_killed(chain.layouts[0].replicas)
    for life in range(1, lives):
        own = [part for log in logs if (part := [line for line in log if line["life"] == life])]
        start = own[0][0]["step"] if own else -1
        saved = [line for log in logs for line in log if line["life"] < life and line["step"] == start]
        wrong = "; ".join(why for log in own if (why := _wrong(log, saved, right, exact=chain.exact)))
        before, after, steps = str(chain.layout(life - 1)), str(chain.layout(life)), max(map(len, own), default=1) - 1
        killed, wrong = str(chain.moments[life - 1]), wrong if own else "it did not begin"
        found.resumes.append(Resume(life, killed, before, after, start, steps, wrong))
    return found


def _wrong(log: Sequence[Json], saved: Sequence[Json], right: dict[int, Json], *, exact: bool) -> str:
    """The first thing in a rank's life that is not as it was: what it begins with, or a step."""
    had: dict[str, Json] = {}
    for line in saved:  # what was saved last is loaded
        had |= line["state"]
    for at, line in enumerate(log):
        loss, state = (None, had) if at == 0 and had else (right[line["step"]]["loss"], right[line["step"]]["state"])
        found = {**line["state"], "the loss": line["loss"]}
        other = [n for n in found if not _same(found[n], {**state, "the loss": loss}[n], exact=exact or at == 0)]
        if other:
            return f"step {line['step']}: {', '.join(other[:5])}"
    return ""


def _same(one: Json, other: Json, *, exact: bool) -> bool:
    if exact:
        return json.dumps(one) == json.dumps(other)  # every digit counts, and NaN equals NaN
    pairs = zip(numbers([one]), numbers([other]), strict=True)
    return all(abs(a - b) <= TOLERANCE for a, b in pairs)


def run(name: str = "resume") -> list[Found]:
    """Has all chains happen, and keeps what is found after each."""
    about, found = facts(), list[Found]()
    for chain in with_time_left(chains(), "resume"):
        with TemporaryDirectory() as folder:
            found.append(judge(chain, Path(folder), go(chain, Path(folder))))
        report(found, about, name)
    return found


def count() -> tuple[int, int]:
    """How many resumes differ from the training that was never killed, and how many there were."""
    found = run()
    return sum(one.differ for one in found), sum(one.total for one in found)


def report(found: Sequence[Found], about: dict[str, str], name: str) -> None:
    """Keeps what was found."""
    rows = [
        [
            one.chain,
            "byte for byte" if one.exact else "within rounding",
            of(one.lives, one.wanted),
            of(one.differ, one.total),
        ]
        for one in found
    ]
    kills = [
        [resume.killed, resume.before, resume.after, f"{resume.start} ({resume.steps})", resume.wrong or "the same"]
        for one in found
        for resume in one.resumes
    ]
    troubles = "".join(f"\nNot ended: {one.chain}: {one.trouble}\n" for one in found if one.trouble)
    text = (
        f"# Killed and resumed\n\n{describe(about)}\n\n{__doc__.partition('    python')[0].strip()}\n\n"
        f"{table(['', 'compared', 'lives', 'resumes that differ'], rows)}\n{troubles}\n"
        f"{table(['killed', 'while', 'went on as', 'from step (steps)', ''], kills)}"
    )
    write(RESULTS / name, text, {"facts": about, "found": [asdict(one) for one in found]})


def main() -> None:
    found = run()
    print("\n".join(f"{one.chain}: {of(one.differ, one.total)} differ. {one.trouble}" for one in found))


if __name__ == "__main__":
    main()
