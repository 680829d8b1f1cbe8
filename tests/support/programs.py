"""Generated programs: any schedule, placement, rematerialization and set of routes, small enough to read."""

from collections.abc import Iterable, Sequence
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from gpipe.schedule.action import COMPUTE, Action, Kind, Route, parse_action
from gpipe.schedule.lower import (
    Remat,
    place_commits,
    place_offloads,
    place_recompute,
    place_reduces,
    place_shards,
    place_ties,
    place_transfers,
)
from gpipe.schedule.program import Program
from gpipe.schedule.rules import linearize
from gpipe.schedule.schedules import fill_drain, forward_only

LAW = settings(derandomize=True, deadline=None, max_examples=40, database=None)

REMATS: tuple[Remat, ...] = ("always", "except_last", "never", 1, 2)
FORWARD = (Kind.FORWARD,)
WHOLE = (Kind.FORWARD, Kind.BACKWARD)
SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)

seeds = st.integers(0, 10_000)
stage_counts = st.integers(1, 6)
micro_batch_counts = st.integers(1, 8)


def remats(stages: int) -> st.SearchStrategy[list[Remat]]:
    return st.lists(st.sampled_from(REMATS), min_size=stages, max_size=stages)


def skips(stages: int) -> st.SearchStrategy[list[Route]]:
    """Skip connections; one name may lead to several stages."""
    ends = [(source, target) for target in range(stages) for source in range(target)]
    if not ends:
        return st.just([])
    routes = st.tuples(st.sampled_from(ends), st.sampled_from(["e0", "e1"])).map(
        lambda drawn: Route(*drawn[0], drawn[1])
    )
    return st.lists(routes, max_size=4, unique=True)


@st.composite
def placements(draw: st.DrawFn, stages: int) -> tuple[int, ...]:
    """The rank of each stage: one stage a rank, or consecutive or round-robin stages; ranks in any order."""
    ranks = draw(st.integers(1, stages) | st.just(stages))
    names = draw(st.permutations(range(ranks)))
    consecutive = draw(st.booleans())
    return tuple(names[s * ranks // stages if consecutive else s % ranks] for s in range(stages))


def scattered(stages: int, micro_batches: int, kinds: Sequence[Kind], routes: Iterable[Route]) -> Program:
    """Actions tied by what they need and the order of the micro-batches alone: a row for each stage and kind."""
    rows = [[Action(kind, s, m) for m in range(micro_batches)] for kind in kinds for s in range(stages)]
    return Program.of(rows, micro_batches, rank_of=range(stages), skips=routes)


def placed(program: Program, rank_of: Sequence[int], rng: Random) -> Program:
    """The same actions in rows by rank, in a legal order."""
    rows: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for _, _, action in linearize(program, rng):
        rows[rank_of[action.stage]].append(action)
    skipping = [route for route in program.routes if route.name != "x"]
    return Program.of(rows, program.micro_batches, rank_of=rank_of, skips=skipping)


@st.composite
def bare_programs(draw: st.DrawFn, *, forward: bool = True, split: bool = True) -> Program:
    """Forwards and backwards alone: the schedules that have a name, and any legal order."""
    stages, micro_batches = draw(stage_counts), draw(micro_batch_counts)
    routes = draw(skips(stages))
    kinds = draw(st.sampled_from([WHOLE, *([SPLIT] if split else []), *([FORWARD] if forward else [])]))
    if kinds != SPLIT and draw(st.booleans()):
        schedule = forward_only if kinds == FORWARD else fill_drain
        program = Program.of(schedule(stages, micro_batches), micro_batches, skips=routes)
    else:
        program = scattered(stages, micro_batches, kinds, routes)
    return placed(program, draw(placements(stages)), Random(draw(seeds)))


@st.composite
def lowered_programs(draw: st.DrawFn, *, forward: bool = True, split: bool = True, sharded: bool = True) -> Program:
    """Programs as they are run: through all passes."""
    bare = draw(bare_programs(forward=forward, split=split))
    stages = st.sets(st.integers(0, bare.stages - 1))
    remat, offloads = draw(remats(bare.stages)), draw(stages)
    program = place_recompute(bare, remat)
    program = place_transfers(place_offloads(program, offloads, halved=draw(st.booleans())))
    program = place_commits(program, draw(stages))
    program = place_reduces(place_ties(program, draw(stages)), draw(stages))
    return place_shards(program, draw(stages)) if sharded else program


def lowered(stages: int, micro_batches: int, remat: Remat = "always", skips: Iterable[Route] = ()) -> Program:
    """A fill-drain program, one stage a rank, as it is run."""
    bare = Program.of(fill_drain(stages, micro_batches), micro_batches, skips=skips)
    return place_transfers(place_recompute(bare, [remat] * stages))


def closed(program: Program) -> Program:
    """The same program with every closing action at every stage."""
    stages = range(program.stages)
    return place_reduces(place_ties(place_commits(program, stages), stages), stages)


def computing(row: Iterable[Action]) -> list[Action]:
    return [action for action in row if action.kind in COMPUTE]


def listed(program: Program) -> list[Action]:
    return [action for row in program.table for action in row]


def parsed(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]
