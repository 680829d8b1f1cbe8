"""Faults while a pipe is made, from before the first line of the construction to its last: part of `faults`.

Each kind of fault happens at calls of gpipe's own that are spread evenly over the construction, on the ranks in turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.jobs.construction import BEFORE, FEW, construct, save_and_die
from tests.support.processes.faults import EXCEPTIONS
from tests.support.processes.launch import Crew, Job, run_ranks
from tests.support.processes.outcome import HungError, Outcome
from tests.support.processes.torchrun import torchrun, wait_for

from .results import of, table, with_time_left

KINDS = ("SIGKILL", "os._exit", "SIGSEGV", "FaultError", "KeyboardInterrupt", FEW)
PLACES = 10
LEGEND = (
    "Worst seconds until every other rank had raised, and how many of them named the one on which the fault struck: "
    "before it made the pipe, and at nine places of the construction. Few files: from there on a rank may open none."
)
TIMEOUT, LIMIT = 60.0, 90.0  # seconds: of the group; and after which a rank hangs


@dataclass(frozen=True)
class Struck:
    """A fault while a pipe is made, and what came of it.

    Attributes:
        kind: Of fault.
        world: How many ranks there were.
        who: On which one it struck.
        at: At which call; before the pipe was begun, or, at the end, while a checkpoint was written.
        seconds: Until the last of the others had raised; None if nothing happened.
        named: How many of the others named it.
        hung: How many ranks hung.
        aborted: How many of the others were taken down by a signal.
    """

    kind: str
    world: int
    who: int
    at: int
    seconds: float | None
    named: int
    hung: int
    aborted: int

    @property
    def due(self) -> int:
        """How many ranks had to raise; none, if the fault did not come to anything."""
        return 0 if self.seconds is None and not self.hung else self.world - 1


def strike_all(worlds: Sequence[int]) -> Iterator[Struck]:
    """Has every fault happen."""
    calls = {world: run_ranks(world, construct, 0, "", 0)[0].answer for world in worlds}
    due = [
        (kind, world, (number + turn) % world, BEFORE if not number else calls[world] * number // PLACES)
        for world in worlds
        for turn, kind in enumerate(KINDS)
        for number in range(PLACES)
        if number or kind != FEW
    ]
    with Crew(max(worlds)) as crew:  # of those who live on, and need not be started anew
        for kind, world, who, at in with_time_left(due, "faults while a pipe is made"):
            ranks = crew if kind in EXCEPTIONS else None
            yield judged(kind, world, who, at, _outcomes(world, construct, who, kind, at, ranks=ranks))
    for world in worlds[:1]:
        for who in range(world):
            yield judged("SIGKILL while it saves", world, who, calls[world], _outcomes(world, save_and_die, who))


def _outcomes(world: int, job: Job, *args: object, ranks: Crew | None = None) -> list[Outcome]:
    try:
        if ranks is not None:
            return ranks.run(job, *args, world=world, timeout=TIMEOUT, limit=LIMIT)
        return run_ranks(world, job, *args, timeout=TIMEOUT, limit=LIMIT)
    except HungError as error:
        return error.outcomes


def judged(kind: str, world: int, who: int, at: int, outcomes: Sequence[Outcome]) -> Struck:
    """What came of a fault; one that came to nothing has left all ranks well."""
    others = [outcome for outcome in outcomes if outcome.rank != who]
    happened = any(outcome.error or outcome.code for outcome in outcomes)
    known = [outcome.seconds for outcome in others if outcome.error and outcome.seconds is not None]
    return Struck(
        kind,
        world,
        who,
        at,
        max(known, default=None) if happened else None,
        sum(outcome.error == "RemoteError" and f"rank {who} " in outcome.told for outcome in others),
        sum(outcome.hung for outcome in outcomes),
        sum((outcome.code or 0) < 0 for outcome in others if not outcome.hung),
    )


def late_orphans(worlds: Sequence[int], wait: float) -> tuple[int, int]:
    """Workers that outlive their launcher although they came to make a pipe only then; and how many there were."""
    found = total = 0
    for world in worlds:
        with TemporaryDirectory() as name:
            folder = Path(name)
            with torchrun(world, "tests.support.jobs.late_worker", name, folder=folder) as launched:
                wait_for(launched, [folder / f"joined_{rank}" for rank in range(world)], limit=90)
                launched.workers()
                launched.popen.kill()
                launched.popen.wait()
                (folder / "go").touch()
                total += world
                found += len(launched.outlive(wait))
    return found, total


def figures(struck: Sequence[Struck], late: tuple[int, int]) -> dict[str, str]:
    """The figures, by title."""
    seconds = [one.seconds for one in struck if one.seconds is not None]
    due = sum(one.due for one in struck)
    return {
        "faults while a pipe is made": f"{sum(one.due > 0 for one in struck)}",
        "worst seconds until every other rank has raised": f"{max(seconds, default=0.0):.2f}",
        "(fault, rank) pairs in which the rank is named": of(sum(one.named for one in struck), due),
        "ranks that hang or are taken down by a signal": of(sum(one.hung + one.aborted for one in struck), due),
        "orphans 5 s after they came to make a pipe, the launcher killed before": of(*late),
    }


def by_kind(struck: Sequence[Struck]) -> str:
    """A table of worst seconds, and of how many ranks were told which rank it was."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in struck):
        row = [kind]
        for world in sorted({one.world for one in struck}):
            some = [one for one in struck if (one.kind, one.world) == (kind, world) and one.due]
            worst = max((one.seconds for one in some if one.seconds is not None), default=0.0)
            named, due = sum(one.named for one in some), sum(one.due for one in some)
            row.append(f"{worst:.2f} s, {named} of {due}" if some else "")
        rows.append(row)
    return table(["", *(f"K = {world}" for world in sorted({one.world for one in struck}))], rows)
