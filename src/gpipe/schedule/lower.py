"""Defines passes that turn a schedule of forwards and backwards into an executable program.

Each pass takes a program and returns a new one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import filterfalse, groupby
from typing import Literal, TypeAlias, get_args

from gpipe.schedule.action import COMPUTE, TRANSFERS, Action, Kind, nth_backward
from gpipe.schedule.program import Program, RankActions
from gpipe.schedule.rules import BACKWARD_PARTS, BACKWARDS, closing_order, crossing, linearize

RematName: TypeAlias = Literal["always", "except_last", "never", "offload", "offload_inputs"]
Remat: TypeAlias = RematName | int
"""The recomputation mode of a stage: a name, or the maximum number of micro-batches that keep their activations."""
REMATS: tuple[str, ...] = get_args(RematName)
ActionsByIndex = defaultdict[int, list[Action]]  # actions to insert, by the index of an existing action in its row
MIN_ACTIONS_BETWEEN = 2
"""The minimum number of actions between a forward and its backward for an offload. With fewer actions, FETCH would
follow OFFLOAD directly, so the memory would never be free."""


def place_remat(program: Program, remat: Sequence[Remat], *, halved: bool = False) -> Program:
    """Adds the R, OFFLOAD and FETCH actions that the mode of each stage requires.

    The program must not have transfers.
    """
    offloading = {stage for stage, mode in enumerate(remat) if mode == "offload"}
    # The caller of the pipe keeps the inputs of stage 0 in any case.
    offloading |= {stage for stage, mode in enumerate(remat) if mode == "offload_inputs" and stage}
    return place_offloads(place_recompute(program, remat, halved=halved), offloading, halved=halved)


def place_recompute(program: Program, remat: Sequence[Remat], *, halved: bool = False) -> Program:
    """Adds R before the backwards that need a recompute, according to the mode of each stage.

    R does not need a gradient, so it runs while the gradient is in flight. The function `recomputed` returns the
    micro-batches that are recomputed.

    Args:
        program: A program without transfers.
        remat: The mode of each stage.
        halved: Whether `halves` will split the program, so that other code may run between forward and backward.
            Default: False.

    Returns:
        The program with an R before each of these backwards. The order of its other actions is unchanged.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> bare = Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2)
    >>> place_recompute(bare, ["except_last"]).around(0, 2)
    '0F0 0F1 >0B0< 0R1 0B1'
    """

    def place(row: RankActions, before: ActionsByIndex, after: ActionsByIndex) -> None:
        targets = recomputed(row, remat, halved=halved, slices=program.slices)
        for index, action in enumerate(row):
            if action.kind in BACKWARDS and (action.stage, action.micro_batch) in targets:
                before[index].append(action._replace(kind=Kind.RECOMPUTE))

    return _insert(program, place)


def _insert(program: Program, place: Callable[[RankActions, ActionsByIndex, ActionsByIndex], None]) -> Program:
    """Inserts actions into a program. `place` adds the actions to insert before and after each index of a row."""

    def filled(row: RankActions) -> Iterator[Action]:
        before, after = ActionsByIndex(list), ActionsByIndex(list)
        place(row, before, after)
        for index, action in enumerate(row):
            yield from (*before[index], action, *after[index])

    return program.with_table(map(filled, program.table))


def recomputed(
    row: RankActions, remat: Sequence[Remat], *, halved: bool = False, slices: int = 1
) -> set[tuple[int, int | None]]:
    """Returns the (stage, micro-batch) pairs that a rank recomputes. `row` contains its forwards and backwards.

    - A backward that immediately follows its forward is never recomputed, because this would save no memory.
    - `"except_last"` does not recompute micro-batch 0, whose backward comes first. This needs the activations of one
      more micro-batch.
    - If the mode is a number n, a micro-batch is not recomputed if fewer than n other micro-batches keep their
      activations during its forward.
    """
    targets: set[tuple[int, int | None]] = set()
    kept: dict[int, set[int | None]] = defaultdict(set)
    for action, following in zip(row, (*row[1:], None), strict=True):
        stage, m = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            immediate = not halved and following in [Action(kind, stage, m) for kind in BACKWARDS]
            if not immediate and _recomputes(remat[stage], nth_backward(m or 0, slices), len(kept[stage])):
                targets.add((stage, m))
            elif not immediate:
                kept[stage].add(m)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) and not halved:
            kept[stage].discard(m)
    return targets


def _recomputes(remat: Remat, nth: int, kept: int) -> bool:
    if remat == "except_last":
        return nth != 0
    return remat in ("always", "offload_inputs") if isinstance(remat, str) else kept >= remat


def place_offloads(program: Program, stages: Collection[int], *, halved: bool = False) -> Program:
    """Adds OFFLOAD after the forwards of these stages, and FETCH one action before their backwards or recomputes.

    Activations are copied to host memory while the rank runs the next action. They are copied back while the rank
    runs the action before the backward. If the backward has a recompute, the inputs of the stage are copied instead,
    and copied back before the recompute. Micro-batches with fewer than `MIN_ACTIONS_BETWEEN` actions in between are
    not offloaded.

    Args:
        program: A program without transfers, after `place_recompute`.
        stages: The stages that offload.
        halved: Whether `halves` will split the program, so that other code may run between forward and backward.
            Default: False.

    Returns:
        The program with an OFFLOAD and a FETCH for each offloaded micro-batch of each stage. The order of its other
        actions is unchanged.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> bare = Program.of(fill_drain(stages=1, micro_batches=4), micro_batches=4)
    >>> print(*place_offloads(bare, [0]).table[0])
    0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0FETCH0 0F3 0OFFLOAD3 0FETCH1 0B0 0FETCH2 0B1 0FETCH3 0B2 0B3
    """

    def place(row: RankActions, before: ActionsByIndex, after: ActionsByIndex) -> None:
        starts: dict[tuple[int, int | None], int] = {}
        for index, action in enumerate(row):
            key = action.stage, action.micro_batch
            if action.kind is Kind.FORWARD:
                starts[key] = index
            elif action.kind in (Kind.RECOMPUTE, *BACKWARDS) and action.stage in stages and key in starts:
                start = starts.pop(key)
                if halved or index - start > MIN_ACTIONS_BETWEEN:
                    after[start].append(Action(Kind.OFFLOAD, *key))
                    before[max(index - 1, start + 1)].append(Action(Kind.FETCH, *key))

    return _insert(program, place)


def place_transfers(program: Program) -> Program:
    """Adds a SEND after each action whose output a different rank needs, and adds the RECEIVE on that rank.

    The pass visits all actions in one valid order and adds both at the same time. So the two ranks list their
    messages in the same order.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> print(*program.table[0])
    0F0 0SEND0@x:0>1 0RECEIVE0@x:0>1 0B0
    """
    rows: list[list[Action]] = [[] for _ in program.table]
    for rank, _, action in linearize(program):
        rows[rank].append(action)
        for send in crossing(action, program):
            rows[rank].append(send)
            rows[program.rank_of[send.peer.stage]].append(send.peer)
    return program.with_table(rows)


def place_commits(program: Program, stages: Collection[int]) -> Program:
    """Adds COMMIT after the last forward of each of these stages.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_commits(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2), [0])
    >>> print(*program.table[0])
    0F0 0F1 0COMMIT 0B0 0B1
    """

    def place(row: RankActions, before: ActionsByIndex, after: ActionsByIndex) -> None:
        last = {a.stage: index for index, a in enumerate(row) if a.kind is Kind.FORWARD and a.stage in stages}
        for stage, index in last.items():
            after[index].append(Action(Kind.COMMIT, stage))

    return _insert(program, place)


def place_ties(program: Program, stages: Collection[int]) -> Program:
    """Adds a TIE for each of these stages that has a backward, after all other actions of its rank.

    A TIE waits for all tied stages, so it must come after all actions that a tied stage needs. Call this before
    `place_reduces`.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> place_ties(program, [0, 1]).around(1, 3)
    '1RECEIVE0@x:0>1 1F0 1B0 >1SEND0@x:0>1< 1TIE'
    """
    trained = {action.stage for action in program.actions if action.kind in BACKWARDS}
    ties = [Action(Kind.TIE, stage) for stage in sorted(trained.intersection(stages))]
    return program.with_table(
        (*row, *(tie for tie in ties if program.rank_of[tie.stage] == rank)) for rank, row in enumerate(program.table)
    )


def place_reduces(program: Program, stages: Collection[int]) -> Program:
    """Adds a REDUCE for each of these stages: after its TIE, or without a TIE after its last backward and SEND.

    So the REDUCE overlaps with the work of other ranks, and no rank waits longer for a gradient. Each rank reduces
    its stages from the last to the first, and tied stages at the end. The order is the same in all replicas, even if
    a replica has fewer micro-batches.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> program = place_transfers(Program.of(fill_drain(stages=2, micro_batches=1), micro_batches=1))
    >>> place_reduces(place_ties(program, [1]), [0, 1]).around(1, 3)
    '1RECEIVE0@x:0>1 1F0 1B0 >1SEND0@x:0>1< 1TIE 1REDUCE'
    """

    def place(row: RankActions, before: ActionsByIndex, after: ActionsByIndex) -> None:
        of_stages = [(index, action) for index, action in enumerate(row) if action.stage in stages]
        last = {a.stage: index for index, a in of_stages if a.kind in BACKWARD_PARTS or a.carries_gradient}
        ties = {a.stage: index for index, a in enumerate(row) if a.kind is Kind.TIE}
        last |= dict.fromkeys(ties.keys() & last.keys(), max(ties.values(), default=0))
        end = 0
        for reduce in sorted((Action(Kind.REDUCE, stage) for stage in last), key=partial(closing_order, program)):
            end = max(end, last[reduce.stage])
            after[end].append(reduce)

    return _insert(program, place)


def place_shards(program: Program, stages: Collection[int]) -> Program:
    """Adds UNSHARD before the first computation of each of these stages, and RESHARD after the last computation.

    So the communication volume does not grow with the number of micro-batches. UNSHARD comes directly after the
    preceding computation of the rank, so that the gather overlaps with idle time.

    Weights stay gathered while the rank runs other stages. Freeing the weights in between would gather a stage twice
    in 40 of 124 tables of the named schedules, and would not lower the peak memory of any rank.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> print(*place_shards(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2), [0]).table[0])
    0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD
    """

    def place(row: RankActions, before: ActionsByIndex, after: ActionsByIndex) -> None:
        computations = [index for index, action in enumerate(row) if action.kind in COMPUTE]
        for stage in sorted(stages):
            if uses := [nth for nth, index in enumerate(computations) if row[index].stage == stage]:
                first = computations[uses[0] - 1] + 1 if uses[0] else 0
                before[first].append(Action(Kind.UNSHARD, stage))
                after[computations[uses[-1]]].append(Action(Kind.RESHARD, stage))

    return _insert(program, place)


def place_loads(program: Program, stages: Collection[int], resident: int = 2) -> Program:
    """Adds LOAD before the computations of each of these stages and FREE after them, so that few are loaded at once.

    At most `resident` stages of a rank are loaded. Each LOAD comes where the rank starts with the preceding stage, so
    the copy overlaps with computation. The stage that is needed last is freed (optimal paging).

    >>> from gpipe.schedule.schedules import breadth_first
    >>> program = Program.of(breadth_first((0, 0, 0), 1), micro_batches=1, rank_of=(0, 0, 0))
    >>> print(*place_loads(program, range(3)).table[0])
    0LOAD0 1LOAD0 0F0 0FREE0 2LOAD0 1F0 2F0 2B0 2FREE0 0LOAD1 1B0 1FREE0 0B0 0FREE1
    """

    def place(row: RankActions, before: ActionsByIndex, after: ActionsByIndex) -> None:
        uses = [
            (action.stage, i) for i, action in enumerate(row) if action.kind in COMPUTE and action.stage in stages
        ]
        periods = [(stage, [i for _, i in each]) for stage, each in groupby(uses, lambda use: use[0])]
        order = [stage for stage, _ in periods]
        loaded: dict[int, int] = {}  # by stage, its last period so far
        times = Counter[int]()

        def free(stage: int) -> None:
            after[periods[loaded.pop(stage)][1][-1]].append(Action(Kind.FREE, stage, times[stage] - 1))

        for number, stage in enumerate(order):
            if stage not in loaded:
                start = max(number - 1, 0) if resident > 1 else number  # the period that overlaps with the copy
                in_use = {order[start]} - {stage}
                if len(loaded.keys() | in_use) >= resident:
                    free(max(loaded.keys() - in_use, key=order[number:].index))
                before[periods[start][1][0]].append(Action(Kind.LOAD, stage, times[stage]))
                times[stage] += 1
            loaded[stage] = number
            if stage not in order[number + 1 :]:
                free(stage)

    return _insert(program, place)


def join_backwards(program: Program, unsplit: Collection[int] = ()) -> Program:
    """Replaces I and W by one B, at the `unsplit` stages and wherever splitting does not help.

    Requires a program without transfers.

    Splitting does not help if I and its W are adjacent and no other rank needs the result of I.
    """

    def joined(row: RankActions) -> Iterator[Action]:
        done = set[Action]()  # the W actions that are part of a B
        for action, following in zip(row, (*row[1:], None), strict=True):
            weight = action._replace(kind=Kind.BACKWARD_WEIGHT)
            joins = action.stage in unsplit or (following == weight and not any(crossing(action, program)))
            if joins and action.kind is Kind.BACKWARD_INPUT:
                done.add(weight)
                yield action._replace(kind=Kind.BACKWARD)
            elif action not in done:
                yield action

    return program.with_table(map(joined, program.table))


def halves(program: Program) -> tuple[Program, Program]:
    """Splits a program into a forward half and a backward half, for a loss that is computed outside the pipe.

    The first half has the forwards with their transfers, OFFLOAD and COMMIT. The second half has all other actions.

    >>> from gpipe.schedule.schedules import fill_drain
    >>> forward, backward = halves(Program.of(fill_drain(stages=1, micro_batches=2), micro_batches=2))
    >>> print(*forward.table[0], "and", *backward.table[0])
    0F0 0F1 and 0B0 0B1
    """

    def is_forward(action: Action) -> bool:
        if action.kind in TRANSFERS:
            return not action.carries_gradient
        return action.kind in {Kind.FORWARD, Kind.OFFLOAD, Kind.COMMIT}

    forward = program.with_table(filter(is_forward, row) for row in program.table)
    return forward, program.with_table(filterfalse(is_forward, row) for row in program.table)
