"""The fault matrix: each kind of fault, in each phase, on each rank; and what every rank has to say about it."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

from tests.support.jobs.training import Json, faulty_layer, reference, train
from tests.support.processes.faults import (
    DEATHS,
    EXCEPTIONS,
    KINDS,
    LAYER_PHASES,
    PHASES,
    STALLS,
    TEXTS,
    VALUES,
    Fault,
)
from tests.support.processes.launch import TIMEOUT, WorkerPool
from tests.support.processes.outcome import HungError, Outcome


@dataclass(frozen=True)
class Case:
    partitions: int
    origin: int
    fault: Fault

    def __str__(self) -> str:
        where = "between steps" if self.fault.phase == "between" else f"in {self.fault.phase}"
        return f"{self.fault.kind} {where}, rank {self.origin} of {self.partitions}"

    @property
    def stalls(self) -> bool:
        """Whether the rank stands still rather than fails, which only a timeout can tell."""
        return self.fault.kind in STALLS

    @property
    def ends_the_rank(self) -> bool:
        """Whether the faulty rank is gone afterwards: by itself, or as it fails where the pipe has no part in it."""
        return self.stalls or self.fault.kind in DEATHS or self.fault.phase in {"optimizer", "between"}

    @property
    def must_raise(self) -> list[int]:
        if self.fault.kind == "nan" and self.fault.phase not in {"forward", "recompute"}:
            return []  # as loud as it is without a pipeline; but a forward and its recompute must agree
        silent = self.stalls or self.fault.kind in DEATHS
        return [rank for rank in range(self.partitions) if not (silent and rank == self.origin)]


def cases(
    partitions: int, kinds: Collection[str] = KINDS, phases: Collection[str] = PHASES, ranks: Collection[int] = ()
) -> Iterator[Case]:
    for phase in phases:
        for kind in kinds:
            for rank in ranks or range(partitions):
                if _can_be(kind, phase, is_last=rank == partitions - 1):
                    layer = faulty_layer(rank, partitions) if phase in LAYER_PHASES else -1
                    yield Case(partitions, rank, Fault(kind, phase, layer, rank))


def _can_be(kind: str, phase: str, *, is_last: bool) -> bool:
    """Whether a fault means something: the last stage recomputes all that its forward gave, for the loss."""
    if kind in VALUES and phase == "forward" and is_last:
        return False
    if phase == "loss":
        return is_last and kind != "shape"
    return kind not in VALUES or phase in LAYER_PHASES


@dataclass(frozen=True)
class Finding:
    """What one rank made of a case."""

    rank: int
    seconds: float | None  # from the fault until it raised, if it did
    told: str  # what it raised, with its notes
    missing: tuple[str, ...]  # what that leaves out; "error" if it raised nothing although it must
    hung: bool  # it had to be killed
    wrong: bool  # it gave other numbers than training without a pipeline does, and said nothing
    contented: bool  # its process ended as if all were well, although it had failed


def wanted(case: Case, rank: int) -> dict[str, str]:
    """What a rank's message has to name, each with a pattern for it: nothing where the user's own loop raises."""
    fault, inside = case.fault, case.fault.phase in (*LAYER_PHASES, "loss")
    if rank == case.origin and not inside:
        return {}
    rank = case.origin
    if fault.kind == "shape":  # whoever cannot use it is the origin
        rank_is, layer = r"\d", r"layer \d|in the loss"
        phase, micro_batch = "forward|recompute|backward|loss", str(fault.micro_batch)
    else:
        rank_is, layer = str(rank), rf"layer {fault.layer}\b" if fault.layer >= 0 else "in the loss"
        phase, micro_batch = fault.phase, str(fault.micro_batch)
    names = {"rank": rf"rank {rank_is}\b"}
    if inside:
        names |= {"stage": rf"stage {rank_is}\b", "layer": layer, "phase": rf"\b({phase})\b"}
        names |= {"micro-batch": rf"micro-batch {micro_batch}\b"}
    if inside and fault.kind in (*EXCEPTIONS, "SIGINT"):
        name = "KeyboardInterrupt" if fault.kind == "SIGINT" else fault.kind
        names |= {"exception": rf"{name}\b", "text": re.escape(TEXTS[fault.kind])}
    return names


def run(
    case: Case,
    pool: WorkerPool,
    *,
    timeout: float = TIMEOUT,
    length: int = 0,
) -> list[Finding]:
    """Has a case happen; gives what each rank made of it, in order.

    Where the faulty rank is gone afterwards, the ranks are fresh processes. Else they are the pool's, who catch what
    they raise, do the step again, and train on.
    """
    again = not case.ends_the_rank
    with nullcontext(pool) if again else WorkerPool(case.partitions) as ranks:
        if case.stalls:  # whatever is loaded late is loaded before the timeout is short
            ranks.run(train, asdict(replace(case.fault, kind="", phase="")), False, length)
        try:
            outcomes = ranks.run(
                train,
                *(asdict(case.fault), again, length),
                world=case.partitions,
                timeout=timeout,
                stuck=[case.origin] if case.stalls else [],
                last=not again,
            )
        except HungError as error:
            outcomes = error.outcomes
    right = reference(case.fault, length)
    return [find(case, outcome, right) for outcome in outcomes]


def find(case: Case, outcome: Outcome, right: Json) -> Finding:
    """Judges what a rank made of a case; `right` is what training without a pipeline gives."""
    answer = outcome.answer if outcome.answered else {}
    failure = answer.get("failure") or {}
    error, told = failure.get("error", outcome.error), failure.get("told", outcome.told)
    seconds = outcome.seconds if outcome.error else None
    if failure and outcome.marked is not None:
        seconds = failure["raised"] - outcome.marked
    due = outcome.rank in case.must_raise
    text = f"{error}: {told}"
    names = wanted(case, outcome.rank)
    missing = [name for name, pattern in names.items() if not re.search(pattern, text)] if error else ["error"]
    own = outcome.rank == case.origin
    return Finding(
        outcome.rank,
        seconds,
        text if error else "",
        tuple(missing) if due else (),
        outcome.hung and not (own and case.stalls),
        bool(answer) and not same_numbers(answer, right),
        outcome.code == 0 and case.ends_the_rank and not own,
    )


def same_numbers(answer: Json, right: Json) -> bool:
    """Whether a rank's losses and parameters are those of training without a pipeline, to the last digit."""
    mine = answer["losses"], answer["parameters"]
    others = right["losses"], {name: right["parameters"][name] for name in answer["parameters"]}
    return json.dumps(mine) == json.dumps(others)  # NaN equals NaN


def shortfalls(findings: Sequence[Finding]) -> list[str]:
    found = []
    for one in findings:
        if one.hung:
            found.append(f"rank {one.rank} hung")
        if one.wrong:
            found.append(f"rank {one.rank} gave wrong numbers silently")
        if one.contented:
            found.append(f"rank {one.rank} ended with exit code 0")
        if one.missing and not one.hung:
            found.append(f"rank {one.rank} did not name {', '.join(one.missing)}; it said {one.told!r}")
    return found
