"""Checkpoints damaged in every way: how many are loaded all the same, and does a refusal name what is damaged?

Each is loaded into a model: as the latest of its run; by its own name, where `latest` has no part in the damage; and
by four ranks, all of which must refuse it, in the same words. What changes no byte is left out. Nothing of the model
may change by a refusal.

    python -m tests.soak.damage

A minute.
"""

import logging
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import gpipe
from tests.checkpoint.test_damage import FILES
from tests.support.checkpointed import Odd, build, differences, remembered, snapshot, trained
from tests.support.thread_ranks import RankPipe, optimizer_of, rank_pipes, run_ranks, save_in_ranks

from .damages import LATEST, Damage, bits, contents, latests, mixtures, places
from .results import RESULTS, describe, facts, of, table, with_time_left, write

BITS = 8
"""Of so many bits of a file one is turned over."""


@dataclass(frozen=True)
class Trial:
    """A damaged checkpoint, and what came of loading it.

    Attributes:
        names: Of what was damaged.
        loaded: How.
        accepted: Whether it was loaded, if only by one of the ranks.
        named: Whether the refusal, the same on all ranks, named something that was damaged.
        changed: Whether anything of the model was other after a refusal.
        said: The refusals.
    """

    names: Sequence[str]
    loaded: str
    accepted: bool
    named: bool
    changed: bool
    said: str

    @property
    def is_good(self) -> bool:
        """Whether it went as it must."""
        return self.named and not self.accepted and not self.changed


@dataclass
class Victim:
    """A model into which damaged checkpoints are loaded: of two stages, of one process or of four."""

    def __post_init__(self) -> None:
        self.pipe, self.optimizer = trained([*build(3), Odd()], 2, steps=1)
        self.before = snapshot(self.pipe, self.optimizer)

    def load(self, folder: Path) -> list[BaseException | None]:
        """What it raises."""
        try:
            gpipe.load(folder, self.pipe, self.optimizer)
        except Exception as error:
            return [error]
        return [None]

    def load_in_ranks(self, folder: Path) -> list[BaseException | None]:
        """What each of four ranks raises: two replicas, whose copies are put into the model afterwards."""
        pipes = rank_pipes(self.pipe, 2)
        made = run_ranks(lambda own: self._load_own(folder, own), pipes)
        for own in pipes:
            self.pipe.load_state_dict({**self.pipe.state_dict(), **own.state_dict()})
        return made

    def _load_own(self, folder: Path, own: RankPipe) -> None:
        gpipe.load(folder, own, optimizer_of(self.pipe, self.optimizer, own))

    @property
    def is_changed(self) -> bool:
        """Whether anything is other than it was."""
        return bool(differences(remembered(self.pipe, self.optimizer), self.before))


@dataclass
class Found:
    """What came of all damages of a kind: those that did not go as they must, and how many there were."""

    trials: int = 0
    accepted: int = 0
    named: int = 0
    changed: int = 0
    bad: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """Counts one more."""
        self.trials += 1
        self.accepted += trial.accepted
        self.named += trial.named
        self.changed += trial.changed
        if not trial.is_good:
            self.bad.append(trial)


def make_runs(folder: Path) -> None:
    """Two runs of the same shapes, with checkpoints of steps 1 and 2 each; and one of them by other processes."""
    for name, seed in (("run", 1), ("other", 2)):
        for step in (1, 2):
            pipe, optimizer = trained([*build(seed), Odd()], 2, steps=step)
            gpipe.save(folder / name, pipe, optimizer, extra={"rng": torch.arange(8.0) + seed + step})
    pipe, optimizer = trained([*build(1), Odd()], 3, steps=2)
    save_in_ranks(folder / "world", pipe, optimizer, extra={"rng": torch.arange(8.0)})


def damages(runs: Path) -> Iterator[Damage]:
    """All of them."""
    yield from contents([*FILES, "latest"])
    yield from places(FILES)
    yield from mixtures(runs, FILES)
    yield from latests()
    sizes = {name: (runs / "run" / LATEST / name).stat().st_size for name in FILES}
    yield from bits({**sizes, "latest": (runs / "run" / "latest").stat().st_size}, BITS)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that is in a folder: of each thing what it is, and its bytes."""
    found = {}
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        found[str(path.relative_to(folder))] = stat.S_IFMT(mode), path.read_bytes() if stat.S_ISREG(mode) else b""
    return found


def trials(damage: Damage, run: Path, victim: Victim) -> Iterator[Trial]:
    """Loads a damaged run in all ways; turned bits only as the latest, for they are many."""
    ways = [("as the latest", victim.load, run)]
    if damage.kind != "a bit turned over":
        ways += [("by four ranks", victim.load_in_ranks, run)]
        ways += [("by its name", victim.load, run / LATEST)] if damage.by_name else []
    for loaded, load, folder in ways:
        made = load(folder)
        said = {str(error).replace(f"{run.parent}/", "") for error in made if error is not None}
        accepted = any(error is None for error in made)
        refused = all(isinstance(error, gpipe.CheckpointError) for error in made) and len(said) == 1
        named = refused and any(name in min(said).partition("\n")[2] for name in damage.names)
        changed = not accepted and victim.is_changed
        yield Trial(damage.names, loaded, accepted, named, changed, "\n".join(sorted(said)))


def run(name: str = "damage") -> dict[str, Found]:
    """Has all damages done, and keeps what is found."""
    about, found = facts(), dict[str, Found]()
    with TemporaryDirectory() as folder:
        runs = Path(folder)
        make_runs(runs)
        good, victim = content(runs / "run"), Victim()
        every = list(damages(runs))
        by_kind = {kind: [one for one in every if one.kind == kind] for kind in dict.fromkeys(d.kind for d in every)}
        for kind in with_time_left(list(by_kind), "damage"):
            found[kind] = Found()
            for damage in by_kind[kind]:
                victim = _try(damage, runs, good, victim, found[kind])
            report(found, about, name)
    return found


def _try(damage: Damage, runs: Path, good: dict[str, tuple[int, bytes]], victim: Victim, found: Found) -> Victim:
    """Damages a copy of the run and loads it; gives the victim, or another if that is not what it was."""
    run = Path(shutil.copytree(runs / "run", runs / "damaged"))
    damage.act(run)
    if content(run) != good:
        for trial in trials(damage, run, victim):
            found.add(trial)
            victim = Victim() if trial.accepted or trial.changed else victim
    shutil.rmtree(run)
    return victim


def count() -> tuple[int, int]:
    """How many damaged checkpoints were loaded all the same, and how many there were."""
    found = run().values()
    return sum(one.accepted for one in found), sum(one.trials for one in found)


def report(found: dict[str, Found], about: dict[str, str], name: str) -> None:
    """Keeps what was found."""
    total = Found(
        *(sum(getattr(one, key) for one in found.values()) for key in ("trials", "accepted", "named", "changed"))
    )
    rows = [
        [kind, str(one.trials), str(one.accepted), of(one.named, one.trials), str(one.changed)]
        for kind, one in [*found.items(), ("all", total)]
    ]
    bad = [
        f"- {kind}: {', '.join(trial.names)}, loaded {trial.loaded}: {trial.said.partition(chr(10))[2] or 'accepted'}"
        for kind, one in found.items()
        for trial in one.bad[:3]
    ]
    text = (
        f"# Damaged checkpoints\n\n{describe(about)}\n\n{__doc__.partition('    python')[0].strip()}\n\n"
        f"{table(['', 'loads', 'accepted', 'refused with the name', 'model changed'], rows)}\n\nWhat falls short:\n\n"
        + ("\n".join(bad) or "Nothing.")
    )
    write(RESULTS / name, text, {"facts": about, "found": {kind: asdict(one) for kind, one in found.items()}})


def main() -> None:
    logging.getLogger("gpipe").setLevel(logging.ERROR)
    accepted, total = count()
    print(f"damaged checkpoints accepted: {of(accepted, total)}")


if __name__ == "__main__":
    main()
